"""What every decoder backend must do, run against each of them on files written by real encoders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from relax_core.errors import DataError
from relax_core.testing.media_files import stripe_number, stripes, tone, write_sound, write_video
from relax_modalities.audio import Audio
from relax_modalities.decoder import BACKENDS, PACKAGES, AudioBackend, Decoder, ImageBackend, VideoBackend
from relax_modalities.image import Image
from relax_modalities.video import Video

COMPONENTS: dict[str, Any] = {"image": Image, "audio": Audio, "video": Video}
EACH = [(kind, name) for kind, names in BACKENDS.items() for name in names]


def component(kind: str, name: str) -> Any:
    cls = COMPONENTS[kind]
    return cls(cls.Config(backends=(name,)))


def good_file(kind: str, folder: Path) -> Path:
    if kind == "image":
        path = folder / "good.png"
        Pillow.fromarray(stripes(1)[0]).save(path)
        return path
    if kind == "audio":
        return write_sound(folder / "good.wav", tone(0.25, 22050, 2), 22050)
    return write_video(folder / "good.mp4", stripes(12))


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_path_and_bytes_give_the_same(kind: str, name: str, tmp_path: Path) -> None:
    path = good_file(kind, tmp_path)
    decoder = component(kind, name)
    from_path, from_bytes = decoder.decode(path), decoder.decode(path.read_bytes())
    assert from_path.kind == kind and from_path.data.size > 0
    assert from_path.hash == from_bytes.hash == component(kind, name).decode(path).hash


@pytest.mark.parametrize(("kind", "name"), EACH)
@pytest.mark.parametrize("content", [b"", b"not a medium at all " * 40, "half"], ids=["empty", "garbage", "truncated"])
@pytest.mark.filterwarnings("ignore")  # librosa and audioread warn before they give up
def test_broken_content_is_one_line_with_file_and_backend(
    kind: str, name: str, content: bytes | str, tmp_path: Path
) -> None:
    path = tmp_path / f"broken{good_file(kind, tmp_path).suffix}"
    whole = good_file(kind, tmp_path).read_bytes()
    path.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    with pytest.raises(DataError) as error:
        component(kind, name).decode(path)
    text = str(error.value)
    assert str(path) in text and kind in text and "\n" not in text
    assert name in text or "truncated" in text


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_missing_file_and_folder(kind: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        component(kind, name).decode(tmp_path / "nowhere.bin")
    with pytest.raises(DataError, match="not a file"):
        component(kind, name).decode(tmp_path)


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_missing_library_is_named_with_what_to_install(
    kind: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = {"pillow": "PIL", "pyav": "av"}.get(name, name)
    path = good_file(kind, tmp_path)
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
    path = good_file("image", tmp_path)
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
    assert sound.rate == 22050 and sound.samples_NC.dtype == np.float32
    np.testing.assert_allclose(sound.samples_NC, samples, atol=0 if suffix == ".wav" else 2**-14)
    with pytest.raises(DataError, match=r"0\.2 s long; max_seconds allows 0\.1"):
        decoder.read(path, lambda backend: backend.read(path, 0.1))


@pytest.mark.parametrize("name", BACKENDS["video"])
def test_video_frames_and_times(name: str, tmp_path: Path) -> None:
    decoder: Decoder[VideoBackend] = Decoder("video", [name])
    times = [0, 100, 200, 1000, 1100, 3000]
    path = write_video(tmp_path / "uneven.mp4", stripes(6), times_ms=times)

    def look(backend: VideoBackend) -> None:
        with backend.open(path) as clip:
            assert (clip.height, clip.width) == (64, 128)
            np.testing.assert_allclose(clip.starts_N, np.array(times) / 1000, atol=1e-4)
            assert 3.0 < clip.end < 3.5
            frames = list(clip.frames([0, 2, 2, 3, 5]))
            assert {(f.dtype, f.shape) for f in frames} == {(np.dtype(np.uint8), (64, 128, 3))}
            assert [stripe_number(f, 6) for f in frames] == [0, 2, 2, 3, 5]

    decoder.read(path, look)


@pytest.mark.parametrize("name", BACKENDS["video"])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_video_is_upright(name: str, turns: int, tmp_path: Path) -> None:
    pixels = np.full((64, 128, 3), 20, np.uint8)
    pixels[:32, :64] = 230
    path = write_video(tmp_path / "turned.mp4", [pixels] * 3, rotation=90 * turns)
    frame = component("video", name).decode(path).data[0]
    upright = np.rot90(pixels, turns)
    assert frame.shape == upright.shape
    assert np.abs(frame.astype(int) - upright).mean() < 6


@pytest.mark.parametrize("name", BACKENDS["video"])
def test_one_frame(name: str, tmp_path: Path) -> None:
    found = component("video", name).decode(write_video(tmp_path / "one.mp4", stripes(1)))
    assert found.data.shape == (1, 64, 128, 3)


def test_all_video_backends_take_the_same_frames(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", stripes(30))
    assert len({component("video", name).decode(path).hash for name in BACKENDS["video"]}) == 1


def test_all_audio_backends_give_the_same_samples(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "sound.wav", tone(0.3, 44100, 2), 44100)
    assert len({component("audio", name).decode(path).hash for name in BACKENDS["audio"]}) == 1
