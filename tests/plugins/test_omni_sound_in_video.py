"""Videos read with their sound: order, positions and features are those of transformers' own processor and model.

Shape legend: T tokens of a row.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from relax_core.check_deep import placeholder_problems
from relax_core.errors import DataError, MissingTrack
from relax_core.interfaces import ComponentConfig, Extended, Modality, Segment
from relax_core.media import MediaStore
from relax_core.testing.forwards import logits, segment
from relax_core.testing.noise import film, picture, sound
from relax_core.types import Decoded, Encoded, Image, MediaKind, Message, ToolResult, Video, message, user
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.testing import tiny_omni

torch.set_num_threads(1)

CLIPS = [
    # frames, frames a second, height and width, samples of sound at 16 kHz
    (4, 2.0, (64, 64), 32000),
    (6, 1.0, (32, 64), 90000),
    (10, 2.0, (64, 64), 8000),  # the sound ends first
    (3, 2.0, (64, 64), 48000),
    (1, 2.0, (32, 32), 20000),
    (2, 2.0, (64, 64), 1600),  # a tenth of a second
    (16, 4.0, (64, 32), 64000),
    (5, 0.5, (64, 64), 16000 * 12),
    (7, 3.0, (32, 96), 20000),  # a time step is 8 2/3 positions
]


def clip(frames: int, rate: float, size: tuple[int, int], samples: int) -> Video:
    """Stands for a file: what the modalities below make of these bytes."""
    return Video(repr((frames, rate, size, samples)).encode())


def parts_of(source: Path | bytes) -> Any:
    assert isinstance(source, bytes)
    return ast.literal_eval(source.decode())


class Moving(Modality):
    kind: ClassVar[MediaKind] = "video"

    def decode(self, source: Path | bytes) -> Decoded:
        frames, rate, size, _ = parts_of(source)
        found = film(frames, rate, size).source
        assert isinstance(found, Decoded)
        return found

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        raise NotImplementedError

    def restore(self, content: bytes) -> Decoded:
        raise NotImplementedError


class Sounding(Moving):
    kind: ClassVar[MediaKind] = "audio"

    def decode(self, source: Path | bytes) -> Decoded:
        samples = parts_of(source)[3]
        if not samples:
            raise MissingTrack("audio clip.mp4: holds no audio stream")
        if samples < 0:
            raise DataError("audio clip.mp4: truncated")
        found = sound(samples).source
        assert isinstance(found, Decoded)
        return found


def adapter_with(use: bool | str, **settings: Any) -> OmniAdapter:
    found = tiny_omni(use_audio_in_video=use, **settings)
    found.media = MediaStore({"video": Moving(ComponentConfig()), "audio": Sounding(ComponentConfig())}, 10**9)
    return found


@pytest.fixture(scope="module")
def adapter() -> OmniAdapter:
    return adapter_with(True)


@pytest.fixture(scope="module")
def model(adapter: OmniAdapter) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    return adapter.load("cpu", torch.float32)


def names(adapter: OmniAdapter, ids: list[int]) -> list[str]:
    found = adapter.tokenizer.convert_ids_to_tokens(ids)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("content", CLIPS)
def test_the_order_is_that_of_the_models_processor(adapter: OmniAdapter, content: Any) -> None:
    row = adapter.encode([user("what", clip(*content), "?")])
    [ref] = row.media
    features = adapter.media.get(ref.key)
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        audio_bos_token="<|audio_start|> ",
        audio_eos_token="<|audio_end|> ",
        video_token="<|video_pad|> ",
        audio_token="<|audio_pad|> ",
    )
    theirs: Any = Qwen3OmniMoeProcessor.replace_video_with_audio_token
    plan = adapter.processor.plan(features)
    assert plan.sound is not None
    expected = theirs(
        processor,
        {"video_grid_thw": [features["grid"]], "video_second_per_grid": [2 / content[1]]},
        0,
        {"num_audio_tokens": [int(plan.sound.sum())]},
        0,
        position_id_per_seconds=13,
    )
    span = row.ids[ref.start - 1 : ref.start + ref.length + 1]
    assert names(adapter, span) == expected.split()
    assert names(adapter, row.ids)[ref.start - 2] == "<|vision_start|>"
    assert list(placeholder_problems(row, adapter.banned_token_ids)) == []


def their_positions(adapter: OmniAdapter, model: Any, row: Encoded) -> torch.Tensor:
    """The model's own positions (3, T) of a row in which each video has sound."""
    found = [(ref.kind, adapter.media.get(ref.key)) for ref in row.media]

    def grids(kind: MediaKind) -> torch.Tensor | None:
        some = [f["grid"] for k, f in found if k == kind]
        return torch.from_numpy(np.stack(some)) if some else None

    positions: torch.Tensor = model.get_rope_index(
        torch.tensor([row.ids]),
        image_grid_thw=grids("image"),
        video_grid_thw=grids("video"),
        attention_mask=torch.ones(1, len(row.ids), dtype=torch.int64),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([f["mel"].shape[1] for _, f in found if "mel" in f]),
        second_per_grids=torch.tensor([f["step"].item() / 13 for _, f in found if "step" in f]),
    )[0]
    return positions[:, 0]


@pytest.mark.parametrize("content", CLIPS)
def test_positions_are_those_of_the_model(adapter: OmniAdapter, model: Any, content: Any) -> None:
    row = adapter.encode([user("what", clip(*content), "colour ?")])
    assert row.positions is not None
    exact = their_positions(adapter, model, row).numpy()
    whole = 26 / content[1] % 1 == 0  # ours are whole numbers: of the others, each takes the nearest
    np.testing.assert_allclose(row.positions, exact, atol=0 if whole else 0.5)


def test_positions_after_a_short_sound_of_a_wide_video() -> None:
    """The model goes on behind the last run of one kind, here the sound's 13 tokens, though the width has 18."""
    adapter = adapter_with(True, video_pixels=[1024, 10**6])
    history: list[Message] = [user("what", clip(2, 2.0, (32, 576), 16000), "colour ?")]
    row = adapter.encode(history)
    assert row.positions is not None
    [ref] = row.media
    start = int(row.positions[0, ref.start])
    assert row.positions[:, ref.start : ref.start + ref.length].max() == start + 17
    assert row.positions[:, ref.start + ref.length].tolist() == [start + 13] * 3
    exact = their_positions(adapter, adapter.load("cpu", torch.float32), row).numpy()
    np.testing.assert_array_equal(row.positions, exact)
    word = adapter.tokenizer.get_vocab()
    positions = np.concatenate([row.positions, row.positions[:, -1:] + 1, row.positions[:, -1:] + 2], axis=1)
    past = Encoded([*row.ids, word["red"], word["<|im_end|>"]], row.media, positions)
    history.append(message("assistant", "red"))
    more = adapter.extend(history, past, [user("what ?")])
    whole = adapter.encode([*history, user("what ?")])
    assert isinstance(more, Extended) and whole.positions is not None and more.new.positions is not None
    assert past.ids + more.new.ids == whole.ids
    np.testing.assert_array_equal(more.new.positions, whole.positions[:, len(past.ids) :])


def test_positions_beside_other_media(adapter: OmniAdapter, model: Any) -> None:
    row = adapter.encode(
        [user(picture(), "what", clip(*CLIPS[0]), sound(20000), clip(*CLIPS[1]), picture(32, 32), "?")]
    )
    assert row.positions is not None
    np.testing.assert_array_equal(row.positions, their_positions(adapter, model, row).numpy())


def test_the_forward_equals_transformers_own(adapter: OmniAdapter, model: Any) -> None:
    row = adapter.encode([user("what", clip(*CLIPS[3]), "?")])
    [ref] = row.media
    features = adapter.media.get(ref.key)
    mel = torch.from_numpy(features["mel"])[None]
    theirs = model(
        input_ids=torch.tensor([row.ids]),
        attention_mask=torch.ones(1, len(row.ids), dtype=torch.int64),
        pixel_values_videos=torch.from_numpy(features["pixels"]),
        video_grid_thw=torch.from_numpy(features["grid"])[None],
        video_second_per_grid=torch.tensor([1.0]),
        input_features=mel,
        feature_attention_mask=torch.ones(1, mel.shape[2], dtype=torch.int64),
        use_audio_in_video=True,
        position_ids=torch.from_numpy(row.positions)[:, None],
    ).logits
    ours = logits(adapter, model, [segment(row)])
    assert float((ours - theirs).detach().abs().max()) < 1e-4


def test_batches_give_each_row_what_it_has_alone(adapter: OmniAdapter, model: Any) -> None:
    content: list[tuple[Any, ...]] = [
        ("what", clip(*CLIPS[0])),
        (clip(*CLIPS[2]), picture(), "?"),
        ("what colour ?",),
        (sound(5000), "what", clip(*CLIPS[3]), clip(*CLIPS[0])),
    ]
    rows = [adapter.encode([user(*parts)]) for parts in content]
    for order in (rows, rows[::-1]):
        together = logits(adapter, model, [segment(row) for row in order]).detach()
        for row, got in zip(order, together, strict=True):
            alone = logits(adapter, model, [segment(row)])[0].detach()
            assert float((got[: len(row.ids)] - alone).abs().max()) < 1e-4


def test_both_towers_learn_from_it(adapter: OmniAdapter) -> None:
    model = adapter.load("cpu", torch.float32)
    row = adapter.encode([user("what", clip(*CLIPS[0]), "?")])
    torch.autograd.backward(logits(adapter, model, [segment(row)])[:, -1].square().sum())
    moved = {
        name.split(".")[0 if "model" not in name else 1]
        for name, p in model.named_parameters()
        if p.grad is not None and bool(p.grad.any())
    }
    assert any("audio" in name for name in moved) and any("visual" in name for name in moved)


def test_it_goes_on_after_a_reply(adapter: OmniAdapter) -> None:
    """What a tool returns is a clip with sound: its tokens are those of the whole conversation."""
    history: list[Message] = [user("what", clip(*CLIPS[1]))]
    first = adapter.encode(history)
    word = adapter.tokenizer.get_vocab()
    sampled = [word["red"], word["<|im_end|>"]]
    assert first.positions is not None
    steps = np.arange(1, 3, dtype=np.int32) + first.positions.max()
    past = Encoded(
        first.ids + sampled, first.media, np.concatenate([first.positions, np.broadcast_to(steps, (3, 2))], axis=1)
    )
    tool = Message("tool", (ToolResult((clip(*CLIPS[0]),)),))
    history.append(message("assistant", "red"))
    result = adapter.extend(history, past, [tool])
    assert isinstance(result, Extended)
    whole = adapter.encode([*history, tool])
    assert past.ids + result.new.ids == whole.ids and past.media + result.new.media == whole.media
    assert whole.positions is not None and result.new.positions is not None
    np.testing.assert_array_equal(result.new.positions, whole.positions[:, len(past.ids) :])


# --- with and without sound -------------------------------------------------------------------------------------------


def test_a_silent_video_is_an_error_or_read_without_sound(adapter: OmniAdapter) -> None:
    silent = clip(4, 2.0, (64, 64), 0)
    with pytest.raises(DataError, match="no audio stream"):
        adapter.encode([user("what", silent)])
    lenient = adapter_with("if_any")
    plain = adapter_with(False)
    assert lenient.encode([user("what", silent)]).ids == plain.encode([user("what", silent)]).ids
    assert lenient.encode([user(clip(*CLIPS[0]))]).ids == adapter.encode([user(clip(*CLIPS[0]))]).ids
    assert len(plain.encode([user(clip(*CLIPS[0]))]).ids) < len(adapter.encode([user(clip(*CLIPS[0]))]).ids)


def test_a_broken_sound_is_an_error_in_any_case() -> None:
    with pytest.raises(DataError, match="truncated"):
        adapter_with("if_any").encode([user(clip(4, 2.0, (64, 64), -1))])


def test_frames_without_a_file_have_no_sound(adapter: OmniAdapter) -> None:
    with pytest.raises(DataError, match="give its file, or set use_audio_in_video: if_any"):
        adapter.encode([user(film())])
    assert adapter_with("if_any").encode([user(film())]).ids == adapter_with(False).encode([user(film())]).ids


def test_another_sound_is_another_medium(adapter: OmniAdapter) -> None:
    one, other = (adapter.encode([user(clip(4, 2.0, (64, 64), n))]).media[0].key for n in (32000, 32016))
    assert one != other


@pytest.mark.parametrize("change", ["swapped", "missing"])
def test_placeholders_in_another_order_are_refused(adapter: OmniAdapter, change: str) -> None:
    row = adapter.encode([user("what", clip(*CLIPS[0]))])
    word = adapter.tokenizer.get_vocab()
    ids = list(row.ids)
    at = ids.index(word["<|audio_pad|>"])
    if change == "swapped":
        video = max(i for i in range(at) if ids[i] == word["<|video_pad|>"])
        ids[at], ids[video] = ids[video], ids[at]
    else:
        ids[at] = word["red"]
    with pytest.raises(DataError, match=r"placeholders, and its (video|audio) media take"):
        adapter.forward_inputs([Segment(ids, row.media, row.positions)], len(ids))


def test_images_are_read_as_ever(adapter: OmniAdapter) -> None:
    part = picture()
    assert isinstance(part, Image)
    assert adapter.encode([user(part)]).ids == adapter_with(False).encode([user(part)]).ids
