"""What every decoder backend must do, run against each of them on files written by real encoders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from relax_core.errors import DataError
from relax_core.testing import modality
from relax_core.testing.media_files import stripe_number, stripes, tone, write_sound, write_video
from relax_core.testing.modality import check_modality
from relax_modalities.audio import Audio
from relax_modalities.decoder import BACKENDS, PACKAGES, AudioBackend, Decoder, ImageBackend, VideoBackend
from relax_modalities.image import Image
from relax_modalities.video import Video

COMPONENTS: dict[str, Any] = {"image": Image, "audio": Audio, "video": Video}
EACH = [(kind, name) for kind, names in BACKENDS.items() for name in names]
FILMS = [name for name in BACKENDS["video"] if name != "pillow"]
"""Backends that read films; Pillow reads animations."""


def component(kind: str, name: str, **settings: Any) -> Any:
    cls = COMPONENTS[kind]
    return cls(cls.Config(backends=(name,), **settings))


def good_files(kind: str, name: str, folder: Path) -> Iterator[Path]:
    """A file of each form that a backend reads."""
    if kind == "image":
        for suffix in (".png", ".jpg", ".webp", ".gif", ".tiff", ".bmp", ".avif", ".jp2", ".ico"):
            path = folder / f"good{suffix}"
            Pillow.fromarray(stripes(1)[0]).save(path)
            yield path
    elif kind == "audio":
        for suffix in (".wav", ".flac", ".mp3", ".ogg", ".aiff")[: 2 if name == "librosa" else None]:
            yield write_sound(folder / f"good{suffix}", tone(0.25, 22050, 2), 22050)
        if name == "pyav":
            yield write_sound(folder / "good.m4a", tone(0.25, 22050, 2), 22050)
            yield write_sound(folder / "good.mkv", tone(0.25, 22050, 2), 22050, codec="flac")
            yield write_sound(folder / "good.webm", tone(0.25, 48000, 2), 48000, codec="libopus")
            yield write_video(folder / "good.mp4", stripes(6), sound=(tone(0.25, 22050, 2), 22050))
    elif name == "pillow":
        first, *others = [Pillow.fromarray(frame) for frame in stripes(6)]
        for suffix in (".webp", ".gif", ".png", ".avif"):
            path = folder / f"good{suffix}"
            first.save(path, save_all=True, append_images=others, duration=250)
            yield path
    else:
        yield write_video(folder / "good.mp4", stripes(12), sound=(tone(0.5, 16000), 16000))
        yield write_video(folder / "good.mkv", stripes(12))
        yield write_video(folder / "good.webm", stripes(12), codec="libvpx-vp9")
        if name == "pyav":
            yield write_video(folder / "good.avi", stripes(12), codec="mpeg4")
            yield write_video(folder / "good.gif", stripes(12), codec="gif", pixels="rgb8", fps=10)
            yield write_video(folder / "good.mov", stripes(12), codec="qtrle", pixels="rgb24")


@pytest.mark.parametrize(("kind", "name"), EACH)
@pytest.mark.filterwarnings("ignore")  # librosa and audioread warn before they give up
def test_every_backend_keeps_the_promises_of_a_modality(kind: str, name: str, tmp_path: Path) -> None:
    files = list(good_files(kind, name, tmp_path))
    (tmp_path / "empty").mkdir()
    check_modality(component(kind, name), files, tmp_path / "empty")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda d, s: None if isinstance(s, bytes) else d, "from bytes"),
        (lambda d, s: d if not str(s).endswith(".txt") else None, "100%d.txt"),
    ],
)
def test_the_check_finds_faults(fault: Any, words: str, tmp_path: Path) -> None:
    class Faulty(Image):
        def decode(self, source: Path | bytes) -> Any:
            return fault(super().decode(source), source)

    [path, *_] = good_files("image", "pillow", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssertionError, match=words):
        check_modality(Faulty(Image.Config()), [path], tmp_path / "empty")


def test_the_check_finds_silent_cuts(tmp_path: Path) -> None:
    class Lenient(Audio):
        def decode(self, source: Path | bytes) -> Any:
            import soundfile

            from relax_core.types import Decoded

            if not isinstance(source, Path) or "cut" not in source.name:
                return super().decode(source)
            return Decoded("audio", soundfile.read(source, dtype="float32")[0], 16000.0)

    path = write_sound(tmp_path / "good.wav", tone(0.25, 16000), 16000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssertionError, match=r"cut at 10% is read as"):
        modality.check_modality(Lenient(Audio.Config()), [path], tmp_path / "empty")


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_missing_library_is_named_with_what_to_install(
    kind: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"pillow": "PIL", "pyav": "av"}.get(name, name)
    path = next(good_files(kind, name, tmp_path))
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, BACKENDS[kind][name].partition(":")[0], raising=False)
    decoder: Decoder[Any] = Decoder(kind, [name])
    with pytest.raises(DataError) as error:
        decoder.read(path, lambda backend: backend.read(path, 1, None))
    assert f"{name}: cannot be imported" in str(error.value)
    assert f"pip install {PACKAGES[name]}" in str(error.value)


@pytest.mark.parametrize("name", BACKENDS["image"])
def test_image_pixels(name: str, tmp_path: Path) -> None:
    decoder: Decoder[ImageBackend] = Decoder("image", [name])
    path = next(good_files("image", name, tmp_path))
    pixels = decoder.read(path, lambda backend: backend.read(path, 10**6, (0, 0, 0)))
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, stripes(1)[0])
    with pytest.raises(DataError, match=r"128x64 pixels; max_pixels allows 8191"):
        decoder.read(path, lambda backend: backend.read(path, 8191, (0, 0, 0)))


@pytest.mark.parametrize("name", BACKENDS["audio"])
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_audio_samples(name: str, suffix: str, tmp_path: Path) -> None:
    decoder: Decoder[AudioBackend] = Decoder("audio", [name])
    samples = tone(0.25, 22050, 2)
    path = write_sound(tmp_path / f"sound{suffix}", samples, 22050)
    sound = decoder.read(path, lambda backend: backend.read(path, 10.0))
    assert sound.rate == 22050 and sound.mono_N.dtype == np.float32
    np.testing.assert_allclose(sound.mono_N, samples.mean(axis=1), atol=0 if suffix == ".wav" else 2**-14)
    with pytest.raises(DataError, match=r"0\.2 s long; max_seconds allows 0\.1"):
        decoder.read(path, lambda backend: backend.read(path, 0.1))


@pytest.mark.parametrize("name", FILMS)
def test_video_frames_and_times(name: str, tmp_path: Path) -> None:
    decoder: Decoder[VideoBackend] = Decoder("video", [name])
    times = [0, 100, 200, 1000, 1100, 3000]
    path = write_video(tmp_path / "uneven.mp4", stripes(6), times_ms=times)

    def look(backend: VideoBackend) -> None:
        with backend.open(path, 10**6, (0, 0, 0)) as clip:
            assert (clip.height, clip.width) == (64, 128)
            np.testing.assert_allclose(clip.starts_N, np.array(times) / 1000, atol=1e-4)
            assert 3.0 < clip.end < 3.5
            frames = list(clip.frames([0, 2, 2, 3, 5]))
            assert {(f.dtype, f.shape) for f in frames} == {(np.dtype(np.uint8), (64, 128, 3))}
            assert [stripe_number(f, 6) for f in frames] == [0, 2, 2, 3, 5]

    decoder.read(path, look)


def test_animation_frames_and_times(tmp_path: Path) -> None:
    first, *others = [Pillow.fromarray(frame) for frame in stripes(4)]
    for suffix in (".webp", ".gif", ".png", ".avif"):
        path = tmp_path / f"uneven{suffix}"
        first.save(path, save_all=True, append_images=others, duration=[100, 300, 500, 0])
        found = component("video", "pillow", fps=10).decode(path)
        numbers = [stripe_number(frame, 4) for frame in found.data]
        assert numbers == [0, 1, 1, 1, 2, 2, 2, 2, 2, 3], suffix
        assert found.rate == pytest.approx(10), suffix
        np.testing.assert_allclose(found.times, np.arange(10) / 10, atol=1e-6, err_msg=suffix)


@pytest.mark.parametrize("name", FILMS)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_video_is_upright(name: str, turns: int, tmp_path: Path) -> None:
    pixels = np.full((64, 128, 3), 20, np.uint8)
    pixels[:32, :64] = 230
    path = write_video(tmp_path / "turned.mp4", [pixels] * 3, rotation=90 * turns)
    frame = component("video", name).decode(path).data[0]
    upright = np.rot90(pixels, turns)
    assert frame.shape == upright.shape
    assert np.abs(frame.astype(int) - upright).mean() < 6


@pytest.mark.parametrize("name", FILMS)
@pytest.mark.parametrize("count", [1, 3, 5, 17])
def test_short_videos(name: str, count: int, tmp_path: Path) -> None:
    found = component("video", name, fps=24).decode(write_video(tmp_path / "short.mp4", stripes(count)))
    assert [stripe_number(frame, count) for frame in found.data] == list(range(count))
    np.testing.assert_allclose(found.times, np.arange(count) / 24, atol=1e-5)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("settings", [{}, {"fps": 24}, {"fps": 30, "max_frames": 7}, {"frame_pixels": 999}], ids=str)
def test_all_film_backends_take_the_same_frames(suffix: str, settings: Any, tmp_path: Path) -> None:
    path = write_video(tmp_path / f"clip{suffix}", stripes(30), options={"bf": "2", "g": "10"})
    assert len({component("video", name, **settings).decode(path).hash for name in FILMS}) == 1


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_all_audio_backends_give_the_same_samples(channels: int, tmp_path: Path) -> None:
    path = write_sound(tmp_path / "sound.wav", tone(0.3, 44100, channels), 44100)
    assert len({component("audio", name).decode(path).hash for name in BACKENDS["audio"]}) == 1


@pytest.mark.parametrize("name", FILMS)
def test_what_is_too_large_or_too_long_is_refused(name: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", stripes(30))
    with pytest.raises(DataError, match=r"clip\.mp4: 128x64 pixels; max_pixels allows 8191: scale it down"):
        component("video", name, max_pixels=8191).decode(path)
    with pytest.raises(DataError, match=r"clip\.mp4: 1\.2 s long; max_seconds allows 1: cut it"):
        component("video", name, max_seconds=1).decode(path)
