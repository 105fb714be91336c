"""Videos: which frames are taken, how large, at what rate; dumps that restore exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_core.errors import DataError
from relax_core.testing.media_files import stripe_number, stripes, write_video
from relax_core.types import Decoded
from relax_modalities.video import Video, choose, decord_conflict, fitting


def decode(source: Path | bytes, **settings: Any) -> Decoded:
    return Video(Video.Config(**settings)).decode(source)


def starts(count: int, fps: float) -> np.ndarray:
    return np.arange(count) / fps


@pytest.mark.parametrize(
    ("count", "native", "fps", "limit", "indices", "rate"),
    [
        (48, 24, 2.0, 99, [0, 12, 24, 36], 2.0),
        (49, 24, 2.0, 99, [0, 12, 24, 36, 48], 2.0),  # the rest of a step counts
        (1, 24, 2.0, 99, [0], 2.0),
        (3, 24, 2.0, 99, [0], 2.0),
        (4, 2, 2.0, 99, [0, 1, 2, 3], 2.0),
        (4, 2, 8.0, 99, [0, 1, 2, 3], 2.0),  # never more than there are
        (48, 24, 24.0, 4, [0, 12, 24, 36], 2.0),  # spread over the whole length
        (300, 30, 1.0, 5, [0, 60, 120, 180, 240], 0.5),
        (30, 29.97, 10.0, 99, [0, 2, 5, 8, 11, 14, 17, 20, 23, 26, 29], 10.0),
    ],
)
def test_choose(count: int, native: float, fps: float, limit: int, indices: list[int], rate: float) -> None:
    found, at = choose(starts(count, native), count / native, fps, limit)
    assert found == indices and at == pytest.approx(rate)


def test_choose_follows_timestamps_not_numbers() -> None:
    uneven = np.array([0.0, 0.1, 0.2, 1.0, 1.1, 3.0])
    assert choose(uneven, 3.5, 1.0, 99) == ([0, 3, 4, 5], 1.0)
    late = uneven + 7.0
    assert choose(late, 10.5, 1.0, 99) == ([0, 3, 4, 5], 1.0), "a stream need not start at 0"


def test_fitting() -> None:
    assert fitting(64, 128, 8192) == (64, 128)
    height, width = fitting(1080, 1920, 401_408)
    assert height * width <= 401_408 and abs(width / height - 16 / 9) < 0.01
    assert fitting(1, 10**6, 100) == (1, 100), "a side is never 0"
    assert fitting(10**6, 1, 100) == (100, 1)


def test_target_rate_and_frames(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", stripes(48), fps=24)
    found = decode(path, fps=4.0)
    assert found.rate == pytest.approx(4.0) and found.data.shape == (8, 64, 128, 3) and found.data.dtype == np.uint8
    assert [stripe_number(f, 48) for f in found.data] == pytest.approx(range(0, 48, 6), abs=1)
    assert decode(path, fps=24.0, max_frames=3).data.shape[0] == 3


def test_frames_are_scaled_down(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", stripes(4))
    assert decode(path, frame_pixels=2048).data.shape == (1, 32, 64, 3)
    with pytest.raises(DataError, match=r"clip\.mp4: 128x64 pixels; max_pixels allows 8000"):
        decode(path, max_pixels=8000)


def test_what_decord_cannot_read_goes_to_pyav(tmp_path: Path) -> None:
    """Rows of 96 pixels are padded by FFmpeg to a whole number of pixels, and decord counts a fourth channel."""
    path = write_video(tmp_path / "narrow.mp4", stripes(12, height=64, width=96))
    assert decode(path).hash == decode(path, backends=("pyav",)).hash
    with pytest.raises(DataError, match=r"narrow\.mp4: no backend can read it \(decord: "):
        decode(path, backends=("decord",))


def test_avi_and_webm(tmp_path: Path) -> None:
    for suffix, codec in ((".avi", "mpeg4"), (".webm", "libvpx-vp9"), (".mkv", "libx264")):
        found = decode(write_video(tmp_path / f"clip{suffix}", stripes(24), codec=codec))
        assert found.data.shape == (2, 64, 128, 3), suffix


def test_a_raw_stream_without_timestamps(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.h264", stripes(24))
    found = decode(path, fps=6.0)
    assert found.rate == pytest.approx(6.0)
    assert [stripe_number(f, 24) for f in found.data] == [0, 4, 8, 12, 16, 20]


def test_no_video_in_it(tmp_path: Path) -> None:
    from relax_core.testing.media_files import tone, write_sound

    path = write_sound(tmp_path / "sound.m4a", tone(0.5, 16000), 16000)
    with pytest.raises(DataError, match=r"sound\.m4a: no backend can read it \(decord: .*; pyav: .*no video stream"):
        decode(path)


@pytest.mark.parametrize("rate", [2.0, 29.97 / 7, 1000.0, 0.01])
@pytest.mark.parametrize("pattern", [[0], [0, 1, 2, 3], [0, 0, 0], [0, 0, 1, 1, 0, 2, 2, 2]])
def test_dump_restores_exactly(rate: float, pattern: list[int]) -> None:
    video = Video(Video.Config())
    pictures = np.random.default_rng(0).integers(0, 256, (4, 9, 14, 3), dtype=np.uint8)
    pictures[1, 3:] = pictures[0, 3:]  # frames that differ in a part only
    decoded = Decoded("video", pictures[pattern], rate)
    suffix, content = video.dump(decoded)
    assert suffix == ".png" and content.startswith(b"\x89PNG")
    restored = video.restore(content)
    assert restored.hash == decoded.hash and restored.rate == rate
    np.testing.assert_array_equal(restored.data, decoded.data)


def test_a_browser_plays_a_dump_at_its_rate() -> None:
    from io import BytesIO

    from PIL import Image as Pillow

    frames = np.stack(stripes(3))
    image = Pillow.open(BytesIO(Video(Video.Config()).dump(Decoded("video", frames[[0, 0, 1, 2]], 4.0))[1]))
    shown = []
    for i in range(image.n_frames):  # type: ignore[attr-defined]
        image.seek(i)
        shown.append(image.info["duration"])
    assert shown == [500, 250, 250]


def test_restore_refuses_another_png() -> None:
    from relax_modalities.image import Image

    _, content = Image(Image.Config()).dump(Decoded("image", stripes(1)[0]))
    with pytest.raises(DataError, match="cannot be restored"):
        Video(Video.Config()).restore(content)


def test_both_decord_distributions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decord_conflict() == []
    information = tmp_path / "decord-0.6.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: decord\nVersion: 0.6.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [line] = decord_conflict()
    assert line.startswith("modalities.video: decord 0.6.0 and decord2 ") and "pip uninstall" in line


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValidationError, match=r"'decord2'; did you mean 'decord'\?; known are decord, pyav"):
        Video.Config(backends=("decord2",))
