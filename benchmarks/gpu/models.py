"""Random models in real shapes, with a byte-level tokenizer made on the spot: speed does not depend on what they say.

    python benchmarks/gpu/models.py qwen3-0.6b models/qwen3-0.6b [--device cuda]

The tokenizer has as many tokens as the model has logits, so that, as with a real one, almost none are banned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_DENSE = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28}
_SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 384}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _DENSE | {"hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": True},
    "qwen3-1.7b": _DENSE | {"hidden_size": 2048, "intermediate_size": 6144, "tie_word_embeddings": True},
    "qwen3-moe": _DENSE
    | _EXPERTS
    | {"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 768, "num_experts": 32},
    "tiny": _SMALL | {"hidden_size": 64, "intermediate_size": 128},
    "tiny-tied": _SMALL | {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True},
    "tiny-moe": _SMALL | _EXPERTS | {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32},
    "tiny-llama": _SMALL | {"hidden_size": 64, "intermediate_size": 128},
}
"""Qwen3 at its released sizes, and what tests take. One with experts is a Qwen3-MoE."""


def byte_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a byte, three special ones, and words ``<|fill 9|>`` that no text has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, PAD, END, START]
    words += [f"<|fill {i}|>" for i in range(size - len(words))]
    plain = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(word, special=True) for word in (PAD, END, START)])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=plain, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_model(shape: str, device: str = "cpu", seed: int = 0, std: float = 0.02) -> PreTrainedModel:
    """In bfloat16."""
    import torch
    import transformers

    sizes = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": False} | SHAPES[shape]
    family = "Qwen3Moe" if "num_experts" in sizes else "Llama" if shape.endswith("llama") else "Qwen3"
    alphabet = 256
    sizes |= {"initializer_range": std, "pad_token_id": alphabet, "eos_token_id": alphabet + 1, "bos_token_id": None}
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.train(False)
    return model


def write(folder: Path, shape: str, device: str = "cpu", seed: int = 0, std: float = 0.02) -> Path:
    """Write the model and its tokenizer, unless the folder has them."""
    if not (folder / "tokenizer.json").is_file():
        model = random_model(shape, device, seed, std)
        model.save_pretrained(folder)
        byte_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def main(words: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("shape", choices=SHAPES)
    p.add_argument("folder", type=Path)
    p.add_argument("--device", default="cpu", help="where the random numbers are drawn")
    a = p.parse_args(words)
    print(write(a.folder, a.shape, a.device))


if __name__ == "__main__":
    main(sys.argv[1:])
