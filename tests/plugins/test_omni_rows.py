"""Omni rows: features, placeholders and positions equal those of transformers' own processors and model.

Shape legend: T tokens of a row, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Extended, Segment
from relax_core.testing.forwards import segment
from relax_core.testing.noise import film, picture, sound
from relax_core.types import (
    Audio,
    Encoded,
    Image,
    MediaKind,
    MediaPart,
    Message,
    Part,
    Text,
    ToolResult,
    Video,
    message,
    system,
    user,
)
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.positions import VisionBlock, rope_positions
from relax_plugin_omni.testing import tiny_omni

torch.set_num_threads(1)
WORDS = ["what", "colour", "?", "red", "green", "blue", "zoom"]


@pytest.fixture(scope="module")
def adapter() -> OmniAdapter:
    return tiny_omni(WORDS)


@pytest.fixture(scope="module")
def model(adapter: OmniAdapter) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    return adapter.load("cpu", torch.float32)


def words(adapter: OmniAdapter, ids: Sequence[int]) -> str:
    """The tokens, a run of one placeholder as name*count."""
    out: list[str] = []
    for name in adapter.tokenizer.convert_ids_to_tokens(list(ids)):
        previous, _, count = out[-1].partition("*") if out else ("", "", "")
        if name.endswith("_pad|>") and previous == name:
            out[-1] = f"{name}*{int(count) + 1}"
        else:
            out.append(f"{name}*1" if name.endswith("_pad|>") else name)
    return " ".join(out)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_placeholders_stand_where_the_parts_do(adapter: OmniAdapter) -> None:
    row = adapter.encode([system("red"), user("what", picture(), "colour", sound(), film(), "?")])
    assert words(adapter, row.ids) == (
        "system red user what <|vision_start|> <|image_pad|>*4 <|vision_end|> colour <|audio_start|> <|audio_pad|>*7 "
        "<|audio_end|> <|vision_start|> <|video_pad|>*8 <|vision_end|> ? assistant"
    )
    assert [(ref.kind, ref.start, ref.length) for ref in row.media] == [
        ("image", 5, 4),
        ("audio", 12, 7),
        ("video", 21, 8),
    ]


MESSAGES: dict[str, tuple[Part | str, ...]] = {
    "text": ("what colour ?",),
    "image": ("what", picture(), "?"),
    "images": (picture(64, 32), "what", picture(32, 32), "?"),
    "audio": ("what", sound(), "?"),
    "video": ("what", film(), "?"),
    "slow video": (film(5, rate=1.0), "?"),
    "wide video": (film(3, rate=2.0, size=(32, 64)),),
    "mixed": (sound(20000), "what", film(6), picture(), "colour", sound(1000), picture(64, 32), "?"),
}


def rope_index(adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, row: Encoded) -> torch.Tensor:
    """The model's own positions (3, T) of one row."""
    found = [(ref.kind, adapter.media.get(ref.key)) for ref in row.media]
    seconds = [f["step"].item() / 13 for kind, f in found if kind == "video"]

    def stacked(kind: MediaKind) -> torch.Tensor | None:
        grids = [f["grid"] for k, f in found if k == kind]
        return torch.from_numpy(np.stack(grids)) if grids else None

    index: Any = model.get_rope_index
    positions: torch.Tensor = index(
        torch.tensor([row.ids]),
        image_grid_thw=stacked("image"),
        video_grid_thw=stacked("video"),
        attention_mask=torch.ones(1, len(row.ids), dtype=torch.int64),
        audio_seqlens=torch.tensor([f["mel"].shape[1] for kind, f in found if kind == "audio"]),
        second_per_grids=torch.tensor(seconds),
    )[0]
    return positions[:, 0]


@pytest.mark.parametrize("content", MESSAGES.values(), ids=MESSAGES)
def test_positions_equal_the_models(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, content: tuple[Part | str, ...]
) -> None:
    row = adapter.encode([user(*content)])
    assert row.positions is not None and row.positions.dtype == np.int32
    np.testing.assert_array_equal(row.positions, rope_index(adapter, model, row).numpy())


def test_times_between_two_positions_take_the_nearer(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration
) -> None:
    """At 3 frames a second a time index is 8.67 positions; columns hold whole numbers."""
    row = adapter.encode([user(film(6, rate=3.0))])
    assert row.positions is not None
    exact = rope_index(adapter, model, row).numpy()
    assert 0 < np.abs(row.positions - exact).max() <= 0.5
    assert row.positions[0, row.media[0].start :: 4][:3].tolist() == [2, 11, 19]


def test_continuations_of_a_row_are_parts_of_it() -> None:
    blocks = [VisionBlock(2, (2, 2, 2), 13.0), VisionBlock(14, (1, 1, 2))]
    whole = rope_positions(20, blocks)
    first = rope_positions(12, blocks[:1])
    rest = rope_positions(8, [VisionBlock(2, (1, 1, 2))], int(first.max()) + 1)
    np.testing.assert_array_equal(np.concatenate([first, rest], axis=1), whole)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("new", MESSAGES.values(), ids=MESSAGES)
def test_extensions_equal_the_whole_conversation(
    adapter: OmniAdapter, new: tuple[Part | str, ...], ended: bool
) -> None:
    """Ids, media and positions, also where the tool's answer holds media."""
    history: list[Message] = [user("what", film(), picture(seed=1))]
    first = adapter.encode(history)
    word = adapter.tokenizer.get_vocab()
    sampled = [word["zoom"], word["red"]] + [word["<|im_end|>"]] * ended
    assert first.positions is not None
    steps = np.arange(1, len(sampled) + 1, dtype=np.int32) + first.positions.max()
    positions = np.concatenate([first.positions, np.broadcast_to(steps, (3, len(sampled)))], axis=1)
    past = Encoded(first.ids + sampled, first.media, positions)
    history.append(message("assistant", "zoom red"))
    answer = tuple(p for p in user(*new).parts if isinstance(p, Text | Image | Audio | Video))
    tool = Message("tool", (ToolResult(answer),))
    result = adapter.extend(history, past, [tool])
    assert isinstance(result, Extended)
    whole = adapter.encode([*history, tool])
    assert past.ids + result.new.ids == whole.ids
    assert past.media + result.new.media == whole.media
    assert whole.positions is not None and result.new.positions is not None
    np.testing.assert_array_equal(np.concatenate([positions, result.new.positions], axis=1), whole.positions)
    bare = adapter.extend(history, Encoded(past.ids, past.media), [tool])
    assert isinstance(bare, Extended) and bare.new.positions is not None
    np.testing.assert_array_equal(bare.new.positions, result.new.positions)


def test_banned_are_all_special_tokens_but_the_end(adapter: OmniAdapter) -> None:
    banned = set(adapter.tokenizer.convert_ids_to_tokens(list(adapter.banned_token_ids)))
    assert banned == {
        *("<|endoftext|>", "<|unk|>", "<|im_start|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    }
    assert adapter.stop_ids == {adapter.tokenizer.get_vocab()["<|im_end|>"]}


# --- placeholders that do not match -----------------------------------------------------------------------------------


PARTS: dict[str, Callable[[], MediaPart]] = {"image": picture, "audio": sound, "video": film}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_placeholder_counts_are_refused(adapter: OmniAdapter, kind: str, change: int) -> None:
    """transformers itself lets too few audio placeholders pass, and every later clip shift."""
    row = adapter.encode([user("what", PARTS[kind](), "?")])
    ref = row.media[0]
    placeholder = row.ids[ref.start]
    end = ref.start + ref.length
    ids = (
        row.ids[:end] + [placeholder] * max(change, 0) + row.ids[end:]
        if change > 0
        else row.ids[: end - 1] + row.ids[end:]
    )
    with pytest.raises(DataError, match=f"a row holds {ref.length + change} {kind} placeholders"):
        adapter.forward_inputs([Segment(ids, row.media)], len(ids))
    claimed = replace(ref, length=ref.length + change)
    with pytest.raises(
        DataError, match=f"{kind} .*: {ref.length + change} placeholders in the row, and the model reads"
    ):
        adapter.forward_inputs([Segment(ids, (claimed,))], len(ids))


def test_placeholders_elsewhere_or_of_another_kind_are_refused(adapter: OmniAdapter) -> None:
    row = adapter.encode([user("what", picture(), film(2))])
    moved = tuple(replace(ref, start=ref.start + 1) for ref in row.media)
    swapped = tuple(replace(a, start=b.start) for a, b in zip(row.media, row.media[::-1], strict=True))
    doubled = (row.media[0], row.media[0])
    for media in (moved, swapped, doubled, row.media[:1], ()):
        with pytest.raises(DataError, match="placeholders"):
            adapter.forward_inputs([Segment(row.ids, media, row.positions)], len(row.ids))


def test_towers_that_disagree_with_the_plan_are_refused(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration
) -> None:
    row = adapter.encode([user(picture(), sound())])
    inputs = adapter.forward_inputs([segment(row)], len(row.ids))
    for name in ("audio", "vision"):
        wrong = inputs | {f"media_{name}_tokens": inputs[f"media_{name}_tokens"] + 1}
        with pytest.raises(DataError, match=f"the {name} tower gives"), torch.no_grad():
            adapter.backbone(model, **wrong)


def test_placeholders_in_text_are_refused(adapter: OmniAdapter) -> None:
    with pytest.raises(DataError, match="holds the special token"):
        adapter.encode([user("what <|audio_pad|> ?")])


def test_templates_must_write_one_placeholder_a_medium(tmp_path: Path) -> None:
    file = tmp_path / "blind.jinja"
    file.write_text("{% for m in messages %}{{ m.role }} {% endfor %}")
    with pytest.raises(DataError, match="writes 0 image placeholders for 1 image parts; use a template"):
        tiny_omni(WORDS, chat_template=file).encode([user(picture())])


def test_forgotten_features_are_an_error(adapter: OmniAdapter) -> None:
    row = adapter.encode([user(picture())])
    with pytest.raises(DataError, match="not in the store"):
        tiny_omni(WORDS).forward_inputs([segment(row)], len(row.ids))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tiny": {"words": ["a"], "experts": 2, "experts_per_token": 3}}, "experts_per_token: found 3"),
        ({"image_pixels": [4096, 1024]}, "image_pixels: found .4096, 1024.; the least must not exceed the most"),
        ({"tiny": None}, "give exactly one"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        tiny_omni(WORDS, **settings)


def test_other_models_are_refused(tmp_path: Path, adapter: OmniAdapter) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 40}')
    adapter.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"holds a qwen3; .*model\.id text"):
        tiny_omni(WORDS, tiny=None, path=tmp_path)
