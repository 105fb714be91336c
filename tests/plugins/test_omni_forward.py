"""The Omni forward: equal to transformers' own, packed, cached, with shared prompts, and in every parameter's gradient.

Shape legend: B rows, W width, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from relax_core.errors import ConfigError
from relax_core.interfaces import Segment
from relax_core.testing.forwards import assert_equal_gradients, gradients, logits, segment
from relax_core.testing.noise import film, picture, sound
from relax_core.types import Encoded, MediaRef, user
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.testing import WORDS, mixed_rows, tiny_omni

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def adapter() -> OmniAdapter:
    return tiny_omni()


@pytest.fixture(scope="module")
def rows(adapter: OmniAdapter) -> list[Encoded]:
    return mixed_rows(adapter)


@pytest.fixture
def model(adapter: OmniAdapter) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    return adapter.load("cpu", torch.float32)


def packed(rows: Sequence[Encoded]) -> tuple[Segment, torch.Tensor]:
    """One lane of several rows, and its block-diagonal causal mask (1, 1, W, W)."""
    ids: list[int] = []
    media: list[MediaRef] = []
    for row in rows:
        media += [MediaRef(r.kind, r.key, r.start + len(ids), r.length) for r in row.media]
        ids += row.ids
    owner_W = np.repeat(np.arange(len(rows)), [len(r.ids) for r in rows])
    seen = (owner_W[:, None] == owner_W) & np.tri(len(ids), dtype=bool)
    positions = np.concatenate([r.positions for r in rows if r.positions is not None], axis=1)
    return Segment(ids, media, positions), torch.from_numpy(seen)[None, None]


def untouched(model: Qwen3OmniMoeThinkerForConditionalGeneration) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    """The same weights in a model that the adapter has not had its hands on."""
    plain = Qwen3OmniMoeThinkerForConditionalGeneration(model.config)
    plain.load_state_dict(model.state_dict())
    plain.train(False)
    return plain


def transformers_logits(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, row: Encoded
) -> torch.Tensor:
    """The logits (T, V) of transformers' own forward of one row, positions and all."""
    found = [(ref.kind, adapter.media.get(ref.key)) for ref in row.media]
    inputs: dict[str, Any] = {}
    for kind, pixels, grid in (("image", "pixel_values", "image"), ("video", "pixel_values_videos", "video")):
        if some := [f for k, f in found if k == kind]:
            inputs[pixels] = torch.from_numpy(np.concatenate([f["pixels"] for f in some]))
            inputs[f"{grid}_grid_thw"] = torch.from_numpy(np.stack([f["grid"] for f in some]))
    if films := [f for k, f in found if k == "video"]:
        inputs["video_second_per_grid"] = torch.tensor([f["step"].item() / 13 for f in films])
    if mels := [f["mel"] for k, f in found if k == "audio"]:
        longest = max(m.shape[1] for m in mels)
        filled = [np.pad(m, ((0, 0), (0, longest - m.shape[1]))) for m in mels]
        inputs["input_features"] = torch.from_numpy(np.stack(filled))
        inputs["feature_attention_mask"] = torch.tensor([[i < m.shape[1] for i in range(longest)] for m in mels]).long()
    ids = torch.tensor([row.ids])
    result: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
    return result[0]


# --- the model --------------------------------------------------------------------------------------------------------


def test_tiny_has_about_half_a_million_parameters_from_its_seed(adapter: OmniAdapter) -> None:
    model = adapter.load("cpu", torch.float32)
    assert 550_000 < sum(p.numel() for p in model.parameters()) < 570_000
    again = adapter.load("cpu", torch.float32).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in model.state_dict().items())
    other = tiny_omni(tiny={"words": WORDS, "seed": 1}).load("cpu", torch.float32).state_dict()
    assert not torch.equal(other["lm_head.weight"], again["lm_head.weight"])


def test_saved_folder_is_the_same_model(adapter: OmniAdapter, tmp_path: Path) -> None:
    model = adapter.load("cpu", torch.float32)
    adapter.save(model, tmp_path)
    again = tiny_omni(tiny=None, path=tmp_path)
    loaded = again.load("cpu", torch.float32).state_dict()
    assert all(torch.equal(v, loaded[k]) for k, v in model.state_dict().items())
    assert again.processor.settings == adapter.processor.settings
    history = [user("what colour ?", picture(), sound(), film())]
    ours, theirs = adapter.encode(history), again.encode(history)
    assert (ours.ids, ours.media) == (theirs.ids, theirs.media)
    assert (again.banned_token_ids, again.stop_ids) == (adapter.banned_token_ids, adapter.stop_ids)


@pytest.mark.parametrize("layout", ["saved", "in memory"])
def test_a_whole_checkpoint_gives_its_thinker(adapter: OmniAdapter, tmp_path: Path, layout: str) -> None:
    """Released checkpoints prefix the thinker's weights and hold a talker beside it; missing weights are refused."""
    model = adapter.load("cpu", torch.float32)
    adapter.save(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors") if layout == "saved" else model.state_dict()
    whole = {f"thinker.{k}": v.contiguous() for k, v in weights.items()} | {"talker.x": torch.zeros(3)}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "qwen3_omni_moe", "thinker_config": json.loads((tmp_path / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = tiny_omni(tiny=None, path=tmp_path).load("cpu", torch.float32).state_dict()
    assert all(torch.equal(v, loaded[k]) for k, v in model.state_dict().items())
    torn = shutil.copytree(tmp_path, tmp_path / "torn")
    del whole[next(k for k in whole if k.endswith("lm_head.weight"))]
    save_file(whole, torn / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of the model's weights.*lm_head"):
        tiny_omni(tiny=None, path=torn).load("cpu", torch.float32)


def test_bfloat16_runs_and_keeps_rotary_frequencies_exact(adapter: OmniAdapter, rows: list[Encoded]) -> None:
    model = adapter.load("cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    with torch.no_grad():
        assert logits(adapter, model, [segment(rows[-1])]).isfinite().all()


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_logits_equal_transformers_own(rows: list[Encoded], adapter: OmniAdapter, experts: str) -> None:
    other = tiny_omni(experts=experts)
    other.media = adapter.media
    model = other.load("cpu", torch.float32)
    plain = untouched(model)
    with torch.no_grad():
        together = logits(other, model, [segment(r) for r in rows])
        for got, row in zip(together, rows, strict=True):
            if [ref.kind for ref in row.media] != ["audio"]:  # a lone short clip: see the next test
                want = transformers_logits(adapter, plain, row)
                torch.testing.assert_close(got[: len(row.ids)], want, atol=1e-5, rtol=0)


def test_a_clip_sounds_the_same_in_any_company(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded]
) -> None:
    """transformers pads a clip to the longest of the batch, which changes what its last token hears."""
    short, long = rows[2], adapter.encode([user(sound(16000, seed=9))])
    both = adapter.encode([user(sound(5000, seed=2), sound(16000, seed=9))])
    with torch.no_grad():
        alone = logits(adapter, model, [segment(short)])[0]
        for company in ([short, long], [long, short, short]):
            got = logits(adapter, model, [segment(r) for r in company])[company.index(short), : len(short.ids)]
            torch.testing.assert_close(got, alone, atol=1e-5, rtol=0)
        end = both.media[0].start + both.media[0].length
        torch.testing.assert_close(logits(adapter, model, [segment(both)])[0, :end], alone[:end], atol=1e-5, rtol=0)
        want = transformers_logits(adapter, untouched(model), both)
        torch.testing.assert_close(logits(adapter, model, [segment(both)])[0], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("additive", [False, True])
def test_packed_equals_unpacked(
    adapter: OmniAdapter,
    model: Qwen3OmniMoeThinkerForConditionalGeneration,
    rows: list[Encoded],
    additive: bool,
) -> None:
    lane, seen = packed(rows)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) if additive else seen
    with torch.no_grad():
        got = logits(adapter, model, [lane], attention_mask=mask, use_cache=False)[0]
        want = torch.cat([logits(adapter, model, [segment(r)])[0] for r in rows])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_packed_gradients_equal_unpacked(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded]
) -> None:
    lane, seen = packed(rows)
    weights = torch.randn(len(lane.ids), adapter.vocab_size, generator=torch.Generator().manual_seed(0))
    (logits(adapter, model, [lane], attention_mask=seen)[0] * weights).sum().backward()  # type: ignore[no-untyped-call]
    got, at = gradients(model), 0
    for row in rows:
        part = weights[at : at + len(row.ids)]
        (logits(adapter, model, [segment(row)])[0] * part).sum().backward()  # type: ignore[no-untyped-call]
        at += len(row.ids)
    assert_equal_gradients(got, gradients(model))


def test_every_parameter_gets_a_gradient(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded]
) -> None:
    logits(adapter, model, [segment(r) for r in rows]).square().sum().backward()  # type: ignore[no-untyped-call]
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not [n for n, grad in found.items() if "k_proj.bias" not in n and not grad.abs().max() > 0]


def test_a_medium_in_several_rows_is_read_once(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded]
) -> None:
    row = rows[-1]
    inputs = adapter.forward_inputs([segment(row)] * 3, len(row.ids))
    single = adapter.forward_inputs([segment(row)], len(row.ids))
    assert inputs["media_pixels"].shape == single["media_pixels"].shape
    assert inputs["media_chunks"].shape == single["media_chunks"].shape
    with torch.no_grad():
        thrice, once = adapter.backbone(model, **inputs), adapter.backbone(model, **single)
    torch.testing.assert_close(thrice, once.expand(3, -1, -1), atol=1e-5, rtol=0)


def test_positions_must_be_given_and_no_state_is_left(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded]
) -> None:
    with torch.no_grad():
        logits(adapter, model, [segment(rows[3])])
    assert getattr(model.model, "rope_deltas", None) is None is getattr(model, "rope_deltas", None)
    inputs = adapter.forward_inputs([segment(rows[3])], len(rows[3].ids))
    del inputs["position_ids"]
    with pytest.raises(ValueError, match="position_ids"):
        adapter.backbone(model, **inputs)
