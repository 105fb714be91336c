"""Sizes of pictures and budgets of tokens: those of the model's own processor, or an error that names the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from pydantic import ValidationError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Segment
from relax_core.testing.forwards import logits, segment
from relax_core.testing.noise import film, picture, sound
from relax_core.types import Decoded, Encoded, Image, Video, user
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.processing import Processor, Settings, fit
from relax_plugin_omni.testing import tiny_omni

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def settings() -> Settings:
    return tiny_omni().processor.settings


def of(part: Image | Video) -> Decoded:
    assert isinstance(part.source, Decoded)
    return part.source


def tokens(processor: Processor, medium: Decoded) -> int:
    return processor.plan(processor.features(medium)).tokens


def test_sizes_are_the_processors_to_the_last_row_of_tokens() -> None:
    """Also where a rounding of the last bit decides: 19 x 19 grown to 56 x 56 pixels or more, by tokens of 28."""
    sides = [*range(1, 50), 56, 96, 100, 192, 224, 257, 333, 448, 640, 720, 1080, 1333, 1920]
    for factor in (28, 32):
        for least, most in ((56 * 56, 28 * 28 * 1280), (1024, 4096), (4096, 32 * 32 * 256), (131072, 786432)):
            for height in sides:
                for width in sides:
                    if max(height, width) <= 200 * min(height, width):
                        want = smart_resize(height, width, factor, least, most)
                        assert fit(height, width, factor, least, most) == want, (height, width, factor, least, most)
    assert fit(19, 19, 28, 56 * 56, 10**6) == (84, 84) and fit(25, 25, 28, 56 * 56, 10**6) == (56, 56)


SIZES = [(448, 448), (1, 1), (16, 16), (27, 257), (1, 200), (100, 33), (767, 431), (1280, 720), (57, 1999)]


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_and_pixels_are_the_processors(settings: Settings, patch: int, size: tuple[int, int]) -> None:
    budget = (56 * 56, 28 * 28 * 1280)
    processor = Processor(replace(settings, patch=patch, image_pixels=budget))
    medium = of(picture(*size))
    theirs = Qwen2VLImageProcessorPil(
        patch_size=patch,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": budget[0], "longest_edge": budget[1]},
    )([Pictures.fromarray(medium.data)], return_tensors="np")
    ours = processor.features(medium)
    np.testing.assert_array_equal(ours["grid"], theirs["image_grid_thw"][0])
    np.testing.assert_array_equal(ours["pixels"], theirs["pixel_values"])
    assert processor.plan(ours).tokens == theirs["image_grid_thw"][0].prod() // 4


def test_a_square_of_448(settings: Settings) -> None:
    """16 patches of 28 pixels a side, or 14 of 32."""
    budget = (1, 10**9)
    for patch, side in ((14, 16), (16, 14)):
        processor = Processor(replace(settings, patch=patch, image_pixels=budget))
        assert tokens(processor, of(picture(448, 448))) == side**2


@pytest.mark.parametrize("size", [(10, 2276), (2276, 10), (1, 500)])
def test_a_picture_too_long_is_a_row_error_with_its_file(size: tuple[int, int], tmp_path: Path) -> None:
    from relax_core.media import MediaStore
    from relax_modalities.image import Image as ImageModality

    path = tmp_path / "thin.png"
    Pictures.fromarray(of(picture(*size)).data).save(path)
    adapter = tiny_omni()
    adapter.media = MediaStore({"image": ImageModality(ImageModality.Config())}, 10**8)
    with pytest.raises(
        DataError, match=r"image .*thin\.png: a picture of .* one side is more than 200 times the other"
    ):
        adapter.encode([user(Image(path))])


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temporal", [2, 4])
@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 17])
def test_videos_are_filled_up_to_whole_temporal_patches(settings: Settings, temporal: int, frames: int) -> None:
    processor = Processor(replace(settings, temporal=temporal))
    medium = of(film(frames, size=(32, 32)))
    filled = -(-frames // temporal) * temporal
    if (frames, temporal) == (17, 4):
        assert filled == 20
    padded = np.concatenate([medium.data, np.repeat(medium.data[-1:], filled - frames, axis=0)])
    found, whole = processor.features(medium), processor.features(Decoded("video", padded, medium.rate))
    assert found["grid"].tolist() == [filled // temporal, 2, 2]
    np.testing.assert_array_equal(found["pixels"], whole["pixels"])
    assert found["pixels"].shape == (filled // temporal * 4, 3 * temporal * 16 * 16)


def test_clips_of_very_different_length_keep_their_own_features() -> None:
    """Of one size, 76 and 12 frames, in one batch, in both orders, beside other media and rows without any."""
    adapter = tiny_omni()
    model = adapter.load("cpu", torch.float32)
    content: list[tuple[Any, ...]] = [
        ("which way ?", film(76, size=(32, 32), seed=1)),
        ("which way ?", film(12, size=(32, 32), seed=2)),
        ("sum 1 + 2 = ?",),
        (picture(seed=3), sound(9000), film(12, size=(32, 32), seed=2), "?"),
    ]
    rows = [adapter.encode([user(*parts)]) for parts in content]
    alone = [logits(adapter, model, [segment(row)])[0].detach() for row in rows]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0], [2, 1]):
        got = logits(adapter, model, [segment(rows[i]) for i in order]).detach()
        for i, found in zip(order, got, strict=True):
            assert float((found[: len(rows[i].ids)] - alone[i]).abs().max()) < 1e-4


# --- budgets of tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 16, 100, 256])
def test_images_stay_within_their_tokens(settings: Settings, budget: int) -> None:
    processor = Processor(replace(settings, image_pixels=(32 * 32, 10**9), image_tokens=budget))
    for size in ((448, 448), (1280, 720), (33, 31), (90, 400)):
        assert 1 <= tokens(processor, of(picture(*size))) <= budget
    assert tokens(processor, of(picture(2000, 2000))) > budget // 2


@pytest.mark.parametrize(
    ("size", "grid"),
    [((64, 64), (8, 8)), ((60, 70), (6, 8)), ((20, 30), (6, 8)), ((600, 400), (8, 6))],
)
def test_the_least_size_gives_way_to_the_budget_of_an_image(
    settings: Settings, size: tuple[int, int], grid: tuple[int, int]
) -> None:
    """Grown to the largest size in proportion that has at most 16 tokens, not beyond it."""
    processor = Processor(replace(settings, image_pixels=(512 * 512, 10**9), image_tokens=16))
    assert processor.features(of(picture(*size)))["grid"].tolist() == [1, *grid]


def test_an_image_that_cannot_be_that_small_is_an_error(settings: Settings) -> None:
    processor = Processor(replace(settings, image_pixels=(32 * 32, 10**9), image_tokens=4))
    with pytest.raises(
        DataError, match=r"an image of 20 x 3000 pixels takes \d+ tokens .* image_tokens allows 4: crop it"
    ):
        processor.features(of(picture(20, 3000)))


@pytest.mark.parametrize("frames", [1, 4, 9, 40])
def test_frames_of_a_video_share_its_tokens(settings: Settings, frames: int) -> None:
    processor = Processor(replace(settings, video_pixels=(32 * 32, 10**9), video_tokens=80))
    found = processor.features(of(film(frames, size=(320, 320))))
    t, h, w = found["grid"].tolist()
    assert t == -(-frames // 2) and processor.plan(found).tokens <= 80
    assert h * w // 4 > 80 // t // 2  # no smaller than it must be
    unlimited = Processor(replace(settings, video_pixels=(32 * 32, 10**9)))
    assert tokens(unlimited, of(film(frames, size=(320, 320)))) == t * 100


def test_a_video_of_too_many_frames_is_an_error_that_says_what_to_do(settings: Settings) -> None:
    processor = Processor(replace(settings, video_pixels=(64 * 64, 10**6), video_tokens=30))
    assert tokens(processor, of(film(14, size=(64, 64)))) == 28
    with pytest.raises(
        DataError,
        match=r"a video of 16 frames takes 32 tokens at its least size, 64 x 64 pixels each; video_tokens allows 30: "
        "lower fps or max_frames of the modality video",
    ):
        processor.features(of(film(16, size=(64, 64))))


def test_budgets_are_part_of_the_features_names_and_of_the_run_file() -> None:
    one, other = tiny_omni(), tiny_omni(video_tokens=8, image_tokens=2)
    assert one.processor.digest != other.processor.digest
    row: Encoded = other.encode([user(film(8), picture(64, 64))])
    assert [ref.length for ref in row.media] == [4, 2] or sum(ref.length for ref in row.media) <= 10
    with pytest.raises(ValidationError, match="image_tokens"):
        tiny_omni(image_tokens=0)


@pytest.mark.parametrize(
    ("budgets", "problem"),
    [
        ({"video_tokens": 3, "video_pixels": [4096, 4096]}, r"model\.video_tokens: found 3, .* 4096 or more in each"),
        ({"image_tokens": 3, "image_pixels": [4096, 8192]}, r"model\.image_tokens: found 3, .* lower the other"),
        ({"image_pixels": [1, 1000]}, r"model\.image_pixels: found .1, 1000.; one token is 32 x 32 pixels"),
        ({"video_pixels": [1, 1000]}, r"model\.video_pixels: found .1, 1000.; one token is 32 x 32 pixels"),
    ],
)
def test_budgets_that_nothing_can_keep_are_refused(budgets: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tiny_omni(**budgets)


# --- rows that were tampered with -------------------------------------------------------------------------------------


def test_what_a_policy_may_not_sample() -> None:
    adapter: OmniAdapter = tiny_omni()
    word = adapter.tokenizer.get_vocab()
    for name in ("<|image_pad|>", "<|audio_pad|>", "<|video_pad|>", "<|vision_start|>", "<|audio_start|>"):
        assert word[name] in adapter.banned_token_ids


@pytest.mark.parametrize("name", ["<|image_pad|>", "<|audio_pad|>", "<|video_pad|>"])
def test_a_sampled_placeholder_is_an_error_of_its_row(name: str) -> None:
    """An engine that does not keep the ban must not shift the features of what follows."""
    adapter = tiny_omni()
    row = adapter.encode([user("what colour ?", picture())])
    ids = [*row.ids, adapter.tokenizer.get_vocab()[name]]
    with pytest.raises(DataError, match=r"a row holds \d+ (image|audio|video) placeholders"):
        adapter.forward_inputs([Segment(ids, row.media)], len(ids))


def test_a_row_cut_through_a_medium_is_an_error() -> None:
    adapter = tiny_omni()
    row = adapter.encode([user("what colour", picture(), sound(), film(), "?")])
    inside = {at for ref in row.media for at in range(ref.start + 1, ref.start + ref.length)}
    for end in range(1, len(row.ids) + 1):
        media = [ref for ref in row.media if ref.start < end]
        cut = Segment(row.ids[:end], media)
        if end in inside:
            with pytest.raises(DataError, match="placeholders"):
                adapter.forward_inputs([cut], end)
        else:
            adapter.forward_inputs([cut], end)
    for ref in row.media:  # and from the left
        start = ref.start + 1
        rest = [replace(r, start=r.start - start) for r in row.media if r.start >= start]
        with pytest.raises(DataError, match="placeholders"):
            adapter.forward_inputs([Segment(row.ids[start:], rest)], len(row.ids))
