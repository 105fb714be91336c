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
from relax_modalities.video import Taken, Video, choose, fitting


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
        (30, 29.97, 10.0, 99, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29], 10.0),
        (1, 0.1, 2.0, 99, [0], 0.1),  # one frame is one frame, however long it stays
    ],
)
def test_choose(count: int, native: float, fps: float, limit: int, indices: list[int], rate: float) -> None:
    taken = choose(starts(count, native), count / native, fps, limit)
    assert taken.indices == indices and taken.rate == pytest.approx(rate)
    assert taken.times == pytest.approx([i / native for i in indices], abs=1e-6)


def test_choose_follows_timestamps_not_numbers() -> None:
    uneven = np.array([0.0, 0.1, 0.2, 1.0, 1.1, 3.0])
    expected = Taken([0, 3, 4, 5], 1.0, (0.0, 1.0, 1.1, 3.0))
    assert choose(uneven, 3.5, 1.0, 99) == expected
    assert choose(uneven + 7.0, 10.5, 1.0, 99) == expected, "a stream need not start at 0"


def test_a_frame_that_stays_is_taken_again_at_its_own_moments() -> None:
    slides = np.array([0.0, 0.5, 3.0])
    taken = choose(slides, 3.5, 2.0, 99)
    assert taken.indices == [0, 1, 1, 1, 1, 1, 2]
    assert taken.times == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


def test_a_frame_between_two_steps_has_the_time_at_which_it_appears() -> None:
    taken = choose(np.array([0.0, 0.7, 1.6]), 2.0, 1.0, 99)
    assert (taken.indices, taken.times) == ([0, 1], (0.0, 0.7))


@pytest.mark.parametrize("fps", [24.0, 30.0, 60.0])
def test_times_rounded_to_milliseconds_lose_no_frame(fps: float) -> None:
    taken = choose(np.round(starts(50, fps), 3), 50 / fps, fps, 99)
    assert taken.indices == list(range(50))


@pytest.mark.parametrize(
    ("count", "fps", "least", "most", "indices"),
    [
        (17, 2.0, 4, 99, [0, 4, 8, 12]),
        (17, 2.0, 1, 99, [0, 12]),
        (3, 2.0, 4, 99, [0, 1, 2]),
        (48, 2.0, 4, 99, [0, 12, 24, 36]),
        (480, 2.0, 4, 4, [0, 120, 240, 360]),
    ],
)
def test_at_least_so_many_frames(count: int, fps: float, least: int, most: int, indices: list[int]) -> None:
    assert choose(starts(count, 24), count / 24, fps, most, least).indices == indices


def test_limits_must_fit_each_other() -> None:
    with pytest.raises(ValidationError, match="min_frames 5 is more than max_frames 4; lower it"):
        Video.Config(min_frames=5, max_frames=4)


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


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        ("narrow.mp4", {"width": 96}, "decord: "),  # rows padded to whole pixels: decord counts a fourth channel
        ("early.mp4", {"times_ms": [-300, -200, 0, 100, 200, 300]}, "finds 6 frames where the container shows 4"),
        ("clip.ts", {"form": "mpegts"}, "h264 in mpegts, which it does not read reliably"),
        ("deep.mp4", {"pixels": "yuv420p10le"}, "does not read reliably"),
        ("clear.webm", {"codec": "libvpx-vp9", "pixels": "yuva420p"}, "does not read reliably"),
    ],
)
def test_what_decord_would_get_wrong_goes_to_pyav(file: str, options: Any, words: str, tmp_path: Path) -> None:
    frames = stripes(6, width=options.pop("width", 128))
    path = write_video(tmp_path / file, frames, **options)
    assert decode(path, backends=("decord", "pyav")).hash == decode(path, backends=("pyav",)).hash
    with pytest.raises(DataError, match=rf"no backend can read it.*{words}"):
        decode(path, backends=("decord",))


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("b-frames.mp4", {"options": {"g": "24", "bf": "3"}}),
        ("open-gop.mp4", {"options": {"x264-params": "open-gop=1:keyint=12:bframes=3"}}),
        ("open-gop.mkv", {"options": {"x264-params": "open-gop=1:keyint=12:bframes=3"}}),
        ("refreshed.mp4", {"options": {"x264-params": "intra-refresh=1:keyint=24"}}),
        ("fragments.mp4", {"options": {"g": "24"}, "container_options": {"movflags": "frag_keyframe+empty_moov"}}),
        ("hidden.webm", {"codec": "libvpx", "options": {"g": "24", "auto-alt-ref": "1", "lag-in-frames": "16"}}),
        ("vp9.webm", {"codec": "libvpx-vp9", "options": {"g": "24"}}),
        ("clear.webm", {"codec": "libvpx-vp9", "pixels": "yuva420p", "options": {"g": "24"}}),
    ],
)
def test_frames_jumped_to_equal_frames_reached(file: str, options: Any, tmp_path: Path) -> None:
    """With few frames wanted the decoder goes from key frame to key frame; with all, it decodes forwards."""
    path = write_video(tmp_path / file, stripes(200), **options)
    all_ = decode(path, fps=24.0, max_frames=200)
    assert len(all_.data) == 200
    for count in (3, 7):
        few = decode(path, fps=24.0, max_frames=count)
        indices = [round(time * 24) for time in few.times or ()]
        np.testing.assert_array_equal(few.data, all_.data[indices])


def test_key_frames_that_are_none_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """Without its table of key frames an MP4 file says that every frame is one."""
    path = write_video(tmp_path / "clip.mp4", stripes(100), options={"g": "1000", "bf": "2"})
    expected = decode(path, fps=24.0, max_frames=5).data
    path.write_bytes(path.read_bytes().replace(b"stss", b"skip"))
    np.testing.assert_array_equal(decode(path, fps=24.0, max_frames=5).data, expected)


@pytest.mark.parametrize(
    ("matrix", "width", "expected"),
    [(1, 128, (254, 0, 0)), (6, 128, (232, 0, 1)), (None, 128, (232, 0, 1)), (1, 1280, (254, 0, 0))],
)
def test_colours_follow_the_matrix_of_the_stream(
    matrix: int | None, width: int, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    """The same luma and chroma are another red under BT.709 (1) than under BT.601 (6, and where nothing is said)."""
    import av

    path = tmp_path / "red.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=24, options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = width // 2, width, "yuv420p"
        frame: Any = av.VideoFrame(width, width // 2, "yuv420p")
        for plane, level in zip(frame.planes, (63, 102, 240), strict=True):
            plane.update(bytes([level]) * plane.buffer_size)
        if matrix:
            stream.codec_context.colorspace = frame.colorspace = matrix
        frame.pts = 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = decode(path).data[0]
    assert np.abs(found.astype(int) - expected).max() <= 1, found[0, 0]


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
    with pytest.raises(DataError, match=r"sound\.m4a: pyav: holds no video stream: give a file with moving pictures"):
        decode(path)


@pytest.mark.parametrize("rate", [2.0, 29.97 / 7, 1000.0, 0.01])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("pattern", [[0], [0, 1, 2, 3], [0, 0, 0], [0, 0, 1, 1, 0, 2, 2, 2]])
def test_dump_restores_exactly(rate: float, pattern: list[int], timed: bool) -> None:
    video = Video(Video.Config())
    pictures = np.random.default_rng(0).integers(0, 256, (4, 9, 14, 3), dtype=np.uint8)
    pictures[1, 3:] = pictures[0, 3:]  # frames that differ in a part only
    times = tuple(i / rate + 1 / 7 * (i > 0) for i in range(len(pattern))) if timed else None
    decoded = Decoded("video", pictures[pattern], rate, times=times)
    suffix, content = video.dump(decoded)
    assert suffix == ".png" and content.startswith(b"\x89PNG")
    restored = video.restore(content)
    assert restored.hash == decoded.hash and restored.rate == rate and restored.times == times
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


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValidationError, match=r"'decord2'; did you mean 'decord'\?; known are pyav, pillow, decord"):
        Video.Config(backends=("decord2",))
