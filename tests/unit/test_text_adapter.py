"""The text adapter: any causal LM of a local folder, or a tiny one, through packed, cached and padded forwards.

Shape legend: B rows, W width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
)

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Extended, Segment
from relax_core.media import MediaStore
from relax_core.models import hf
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.models.words import word_tokenizer
from relax_core.types import Decoded, Encoded, Image, message, user

torch.set_num_threads(1)
WORDS = ["red", "green", "blue", "what", "colour", "?"]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VOCABULARY = len(word_tokenizer(WORDS))


def build(**settings: Any) -> TextAdapter:
    return TextAdapter(TextConfig.model_validate_json(json.dumps(settings, default=str)), MediaStore({}, 0))


def tiny(**settings: Any) -> TextAdapter:
    return build(tiny={"words": WORDS, "hidden": 32, **settings})


def folder(path: Path, model: PreTrainedModel, words: Sequence[str] = WORDS) -> Path:
    hf.save_pretrained(model, word_tokenizer(words), path)
    return path


def plain_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits


def equal_bits(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "found neither; give exactly one"),
        ({"path": "{folder}", "tiny": {"words": ["a"]}}, "found both; give exactly one"),
        ({"path": "no/such/folder"}, "holds no config.json"),
        ({"tiny": {"words": ["a"]}, "chat_template": "no.jinja"}, "there is no file no.jinja"),
        ({"tiny": {"words": ["a b"]}}, "'a b' is not a word"),
        ({"tiny": {"words": ["<|im_end|>"]}}, "is not a word"),
        ({"tiny": {"words": ["a"], "hidden": 36, "heads": 8}}, "heads must divide half of hidden"),
        ({"tiny": {"words": ["a"], "heads": 4, "kv_heads": 3}}, "a multiple of kv_heads"),
        ({"tiny": {"words": ["a"], "hiden": 32}}, "hiden"),
    ],
)
def test_bad_settings_are_refused_with_what_to_do(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = json.dumps(settings).replace("{folder}", str(tmp_path))
    with pytest.raises(ValidationError, match=problem.replace(".", r"\.")):
        TextConfig.model_validate_json(text)


# --- the tiny model ---------------------------------------------------------------------------------------------------


def test_loads_have_equal_bits_and_leave_torchs_generator_alone() -> None:
    adapter = tiny(seed=3)
    torch.manual_seed(11)
    first = adapter.load("cpu", torch.float32)
    drawn = torch.rand(1)
    torch.manual_seed(11)
    assert torch.equal(drawn, torch.rand(1))
    assert equal_bits(first, adapter.load("cpu", torch.float32))
    assert not equal_bits(first, tiny(seed=4).load("cpu", torch.float32))
    assert isinstance(first, Qwen3ForCausalLM) and not first.training


def test_bfloat16_keeps_rotary_frequencies_exact() -> None:
    model = tiny().load("cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_saved_folder_is_the_same_model(tmp_path: Path) -> None:
    adapter = tiny()
    model = adapter.load("cpu", torch.float32)
    adapter.save(model, tmp_path)
    again = build(path=tmp_path)
    assert equal_bits(model, again.load("cpu", torch.float32))
    history = [user("what colour ?")]
    assert again.encode(history) == adapter.encode(history)
    assert (again.stop_ids, again.banned_token_ids, again.pad_id, again.vocab_size) == (
        adapter.stop_ids,
        adapter.banned_token_ids,
        adapter.pad_id,
        adapter.vocab_size,
    )


def test_one_turn_and_the_next() -> None:
    adapter = tiny()
    word = adapter.tokenizer.get_vocab().__getitem__
    prompt = adapter.encode([user("what colour ?")])
    assert adapter.tokenizer.convert_ids_to_tokens(prompt.ids) == ["user", "what", "colour", "?", "assistant"]
    assert prompt.positions is None
    sampled = [word("red"), word("blue"), word("<|im_end|>")]
    assert adapter.decode(sampled) == "red blue"
    history = [user("what colour ?"), message("assistant", "red blue")]
    past = Encoded(prompt.ids + sampled)
    assert adapter.extend(history, past, [user("green ?")]) == Extended(
        Encoded([word("user"), word("green"), word("?"), word("assistant")])
    )


def test_unknown_words_are_an_error_unless_kept() -> None:
    with pytest.raises(DataError, match=r"the word 'purple' is not in .*model\.tiny\.words"):
        tiny().encode([user("purple ?")])
    assert tiny(unknown_words="keep").tokenizer.unk_token_id in tiny(unknown_words="keep").encode([user("purple")]).ids


def test_media_are_refused_by_name() -> None:
    picture = Image(Decoded("image", np.zeros((8, 8, 3), np.uint8)))
    with pytest.raises(DataError, match=r"user message: holds image, and model\.id text .* reads text only"):
        tiny().encode([user("what", picture)])


# --- folders ----------------------------------------------------------------------------------------------------------

ARCHITECTURES: dict[str, Any] = {
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **SIZES)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCABULARY, final_logit_softcapping=1.5, attn_logit_softcapping=None, **SIZES)
    ),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(vocab_size=VOCABULARY, logits_scaling=3.0, **SIZES)),
    "cohere, multiplied": lambda: CohereForCausalLM(CohereConfig(vocab_size=VOCABULARY, logit_scale=0.25, **SIZES)),
}


@pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_backbone_and_head_give_the_models_own_logits(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(0)
    adapter = build(path=folder(tmp_path, make()))
    model = adapter.load("cpu", torch.float32)
    rows = [[4, 7, 9, 8], [5, 6]]
    with torch.no_grad():
        hidden = adapter.backbone(model, **adapter.forward_inputs([Segment(r) for r in rows], 6))
        logits_BWV = adapter.head(model, hidden)
    assert logits_BWV.shape == (2, 6, adapter.vocab_size)
    for row, ids in enumerate(rows):
        torch.testing.assert_close(logits_BWV[row, : len(ids)], plain_logits(model, ids), atol=1e-5, rtol=0)


def test_packed_rows_equal_rows_alone() -> None:
    """Also through float masks, and with positions in either of their two forms."""
    adapter = tiny()
    model = adapter.load("cpu", torch.float32)
    rows = [[4, 7, 9, 8, 5], [6, 8], [9, 9, 4]]
    owner_W = np.repeat([0, 1, 2], [len(r) for r in rows])
    positions_W = np.concatenate([np.arange(len(r), dtype=np.int32) for r in rows])
    seen = torch.from_numpy((owner_W[:, None] == owner_W) & np.tri(len(owner_W), dtype=bool))[None, None]
    flat = [i for r in rows for i in r]
    alone = torch.cat([plain_logits(model, r) for r in rows])
    for positions in (positions_W, np.broadcast_to(positions_W, (3, len(flat)))):
        for mask in (seen, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)):
            inputs = adapter.forward_inputs([Segment(flat, positions=positions)], len(flat))
            with torch.no_grad():
                logits = adapter.head(model, adapter.backbone(model, **inputs, attention_mask=mask, use_cache=False))[0]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cached_steps_equal_the_full_forward(name: str) -> None:
    adapter = tiny()
    model = adapter.load("cpu", torch.float32)
    cache, ids = DynamicCache(), [4, 7, 9, 8, 5]
    steps = []
    with torch.no_grad():
        for position, i in enumerate(ids):
            inputs = adapter.forward_inputs([Segment([i], positions=np.array([position], np.int32))], 1)
            steps.append(adapter.backbone(model, **inputs, **{name: cache}, use_cache=True))
        logits = adapter.head(model, torch.cat(steps, 1))[0]
    torch.testing.assert_close(logits, plain_logits(model, ids), atol=1e-5, rtol=0)


def test_stops_come_from_tokenizer_generation_config_and_model(tmp_path: Path) -> None:
    path = folder(tmp_path, Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **SIZES)))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    adapter = build(path=path)
    assert adapter.stop_ids == {1, 5}
    assert not adapter.stop_ids & set(adapter.banned_token_ids)


def test_banned_are_special_tokens_and_slots_without_a_token(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY + 5, **SIZES))
    model.save_pretrained(tmp_path)
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    adapter = build(path=tmp_path)
    special = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    assert adapter.banned_token_ids == (*special, *range(VOCABULARY + 1, VOCABULARY + 5))
    assert adapter.vocab_size == VOCABULARY + 5, "but not <think>, an added word"


def test_a_folder_that_does_not_hold_together_is_refused(tmp_path: Path) -> None:
    small = folder(tmp_path / "small", Qwen3ForCausalLM(Qwen3Config(vocab_size=5, **SIZES)))
    with pytest.raises(ConfigError, match="ids up to 12, the model a vocabulary of 5"):
        build(path=small)
    torn = folder(tmp_path / "torn", Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **SIZES)))
    weights = load_file(torn / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, torn / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's weights.*layers\.1\.mlp\.up_proj"):
        build(path=torn).load("cpu", torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).unlink()
    with pytest.raises(ConfigError, match="holds no tokenizer; one of these is needed"):
        build(path=small)


def test_architectures_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4, eos_token_id=1))
    with pytest.raises(ConfigError, match="BloomForCausalLM"):
        build(path=folder(tmp_path / "bloom", bloom)).load("cpu", torch.float32)
    Qwen3NextConfig(vocab_size=VOCABULARY, num_hidden_layers=4).save_pretrained(tmp_path / "linear")
    word_tokenizer(WORDS).save_pretrained(tmp_path / "linear")
    with pytest.raises(ConfigError, match=r"layers of type linear_attention .* carry a state"):
        build(path=tmp_path / "linear")


@pytest.mark.parametrize("masked", [False, True])
def test_sliding_windows_are_those_of_the_model(tmp_path: Path, masked: bool) -> None:
    """With the model's own mask, and with one given for each type of layer."""
    config = Gemma2Config(vocab_size=VOCABULARY, sliding_window=4, attn_logit_softcapping=None, **SIZES)
    torch.manual_seed(0)
    adapter = build(path=folder(tmp_path, Gemma2ForCausalLM(config)))
    model = adapter.load("cpu", torch.float32)
    ids = [4, 7, 9, 8, 5, 6, 7, 7, 4]
    causal = torch.ones(len(ids), len(ids)).tril() == 1
    near = causal & (torch.ones(len(ids), len(ids)).tril(-4) == 0)
    masks = {"full_attention": causal, "sliding_attention": near}
    added = {k: torch.zeros(m.shape).masked_fill(~m, -torch.inf)[None, None] for k, m in masks.items()}
    inputs = adapter.forward_inputs([Segment(ids)], len(ids))
    with torch.no_grad():
        hidden = adapter.backbone(model, **inputs, attention_mask=added if masked else None)
        torch.testing.assert_close(adapter.head(model, hidden)[0], plain_logits(model, ids), atol=1e-5, rtol=0)


def test_a_chat_template_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ first }} {{ messages[0].content }}")
    adapter = build(tiny={"words": WORDS}, chat_template=file, template_options={"first": "blue"})
    assert adapter.decode(adapter.encode([user("red")]).ids) == "blue red"
