"""Omni features: equal to those of transformers' own processors, and refused with a reason where there are none.

Shape legend: F frames, H height, W width.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

from relax_core.errors import DataError
from relax_core.testing.noise import film, picture, sound
from relax_core.types import Decoded, MediaPart, user
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.processing import audio_chunks, audio_tokens, fit
from relax_plugin_omni.testing import tiny_omni

torch.set_num_threads(1)
WORDS = ["what", "colour", "?"]


@pytest.fixture(scope="module")
def adapter() -> OmniAdapter:
    return tiny_omni(WORDS)


SIZES = [(64, 64), (1, 1), (16, 16), (27, 257), (100, 40), (448, 448), (33, 31), (64, 32)]


@pytest.mark.parametrize("size", SIZES)
def test_images_equal_transformers_processor_bit_for_bit(adapter: OmniAdapter, size: tuple[int, int]) -> None:
    part = picture(*size)
    assert isinstance(part.source, Decoded)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
    )([Pictures.fromarray(part.source.data)], return_tensors="np")
    ours = adapter.processor.features(part.source)
    np.testing.assert_array_equal(ours["pixels"], theirs["pixel_values"])
    np.testing.assert_array_equal(ours["grid"], theirs["image_grid_thw"][0])


def test_a_still_video_equals_the_image(adapter: OmniAdapter) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    still = adapter.processor.features(Decoded("video", np.stack([frame] * 2), 2.0))
    np.testing.assert_array_equal(still["pixels"], adapter.processor.features(Decoded("image", frame))["pixels"])


@pytest.mark.parametrize(("frames", "filled"), [(1, 2), (3, 4), (4, 4), (5, 6)])
def test_videos_are_filled_up_with_their_last_frame(adapter: OmniAdapter, frames: int, filled: int) -> None:
    part = film(frames)
    assert isinstance(part.source, Decoded)
    data = part.source.data
    longer = np.concatenate([data, np.repeat(data[-1:], filled - frames, axis=0)])
    ours, whole = adapter.processor.features(part.source), adapter.processor.features(Decoded("video", longer, 2.0))
    assert ours["grid"].tolist() == [filled // 2, 4, 4]
    np.testing.assert_array_equal(ours["pixels"], whole["pixels"])


def test_every_size_fits_the_budget() -> None:
    for height, width in [*SIZES, (10, 1999), (3000, 17), (1080, 1920)]:
        tall, wide = fit(height, width, 32, 1024, 4096)
        assert tall % 32 == wide % 32 == 0 and tall > 0 < wide
        if max(height, width) <= 4 * min(height, width):
            assert 1024 <= tall * wide <= 4096


def test_audio_tokens_are_those_of_the_model() -> None:
    frames = np.arange(1, 401)
    theirs: Any = _get_feat_extract_output_lengths
    assert [audio_tokens(int(n), 50) for n in frames] == theirs(frames).tolist()
    assert [audio_tokens(n, 50) for n in (1, 8, 9, 50, 99, 100, 101, 200)] == [1, 1, 2, 7, 13, 13, 14, 26]


@pytest.mark.parametrize("samples", [201, 1600, 8000, 16123, 160_000, 16000 * 40])
def test_spectrograms_equal_transformers_extractor_bit_for_bit(adapter: OmniAdapter, samples: int) -> None:
    """Also of more than 30 seconds, which are not cut."""
    part = sound(samples)
    assert isinstance(part.source, Decoded)
    extractor: Any = WhisperFeatureExtractor(feature_size=128)  # type: ignore[no-untyped-call]
    theirs = extractor(part.source.data, sampling_rate=16000, padding="longest", truncation=False, return_tensors="np")[
        "input_features"
    ][0]
    ours = adapter.processor.features(part.source)["mel"]
    assert ours.dtype == np.float32 and ours.shape == (128, samples // 160)
    np.testing.assert_array_equal(ours, theirs)


def test_silence_is_read_as_such(adapter: OmniAdapter) -> None:
    """The logarithm of the floor, ten to the minus ten: (-10 + 4) / 4."""
    mel = adapter.processor.features(Decoded("audio", np.zeros(16000, np.float32), 16000.0))["mel"]
    assert mel.shape == (128, 100) and (mel == -1.5).all()


def test_threads_make_the_same_features(adapter: OmniAdapter) -> None:
    media = [p.source for i in range(4) for p in (picture(90, 70, i), sound(9000, seed=i), film(5, seed=i))]
    decoded = [medium for medium in media if isinstance(medium, Decoded)]
    alone = [adapter.processor.features(medium) for medium in decoded]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for one, other in zip(alone, pool.map(adapter.processor.features, decoded), strict=True):
                assert one.keys() == other.keys()
                assert all(np.array_equal(one[name], other[name]) for name in one)


def test_audio_is_resampled_to_the_models_rate(adapter: OmniAdapter) -> None:
    fast = sound(24000, 48000.0)
    assert isinstance(fast.source, Decoded)
    assert adapter.processor.features(fast.source)["mel"].shape == (128, 50)


UNREADABLE: list[tuple[MediaPart, str]] = [
    (picture(10, 2276), "image given in memory: a picture of 10 x 2276 pixels: .* crop it"),
    (sound(200), "audio given in memory: audio of 0.0125 s: too short"),
    (sound(8000, 0.0), "rate is 0.0; it must be a positive number"),
    (film(rate=0.0), "rate is 0.0; it must be a positive number"),
]


@pytest.mark.parametrize(("part", "problem"), UNREADABLE)
def test_unreadable_media_are_data_errors(adapter: OmniAdapter, part: MediaPart, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        adapter.encode([user(part)])


def test_features_are_made_once_for_equal_content(adapter: OmniAdapter) -> None:
    one, two = adapter.encode([user(picture(seed=5))]), adapter.encode([user("what", picture(seed=5))])
    assert one.media[0].key == two.media[0].key != adapter.encode([user(picture(seed=6))]).media[0].key
    other = tiny_omni(WORDS, image_pixels=[1024, 1024]).encode([user(picture(seed=5))])
    assert other.media[0].length == 1 and other.media[0].key != one.media[0].key


def test_chunks_hold_every_frame_once() -> None:
    mels = [np.random.default_rng(n).standard_normal((4, n)).astype(np.float32) for n in (3, 100, 250)]
    chunks, lengths = audio_chunks(mels, 50)
    assert lengths.tolist() == [3, 100, 100, 100, 50] and chunks.shape == (5, 4, 100)
    kept = np.concatenate([c[:, :n] for c, n in zip(chunks, lengths, strict=True)], axis=1)
    np.testing.assert_array_equal(kept, np.concatenate(mels, axis=1))
