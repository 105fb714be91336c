"""Videos that are decoded: containers, codecs, pixel formats, lengths, uneven times, rotations, sizes, transparency.

Shape legend: H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.testing.media_cases.case import Case, Check, Write
from relax_core.testing.media_files import stripe_number, stripes, tone, write_video
from relax_core.types import Decoded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COUNT = 12
NATIVE = (("fps", 24.0),)
"""Settings by which every frame of a video at 24 frames a second is taken."""


def shows(
    numbers: Sequence[int],
    times: Sequence[float] | None = None,
    rate: float = 24,
    tolerance: float = 3,
    of: int = COUNT,
) -> Check:
    """A check for these frames of ``stripes(of)``, on average within ``tolerance``; by default 24 a second."""

    def check(decoded: Decoded) -> None:
        import numpy as np

        found = [stripe_number(frame, of) for frame in decoded.data]
        assert found == list(numbers), f"frames {found}, not {list(numbers)}"
        assert decoded.rate is not None and abs(decoded.rate - rate) < 0.01 * rate, f"rate {decoded.rate}, not {rate}"
        expected = np.stack([stripes(of)[number] for number in numbers])
        assert decoded.data.shape == expected.shape, f"{decoded.data.shape}, not {expected.shape}"
        error = np.abs(decoded.data.astype(int) - expected).mean()
        assert error <= tolerance, f"pixels are {error} off on average; {tolerance} are allowed"
        moments = times if times is not None else [i / rate for i in range(len(numbers))]
        assert decoded.times is not None
        late = max(abs(a - b) for a, b in zip(decoded.times, moments, strict=True))
        assert late < 0.002, f"times {decoded.times}, not {moments}"

    return check


def colour(
    expected: tuple[int, int, int], size: tuple[int, int], count: int = 3, tolerance: int = 4, last: Any = None
) -> Check:
    """A check for frames of one colour. ``size``: (H, W); ``last``: the last one's, if another."""
    import numpy as np

    def check(decoded: Decoded) -> None:
        assert decoded.data.shape == (count, *size, 3), f"{decoded.data.shape}, not {(count, *size, 3)}"
        for frame, wanted in ((decoded.data[0], expected), (decoded.data[-1], last or expected)):
            found = frame.reshape(-1, 3)
            assert np.abs(found.astype(int) - wanted).max() <= tolerance, f"{found[0]}, not {wanted}"

    return check


def one_colour(value: tuple[int, ...], height: int, width: int, count: int = 3) -> list[NDArray[np.uint8]]:
    import numpy as np

    return [np.full((height, width, len(value)), value, np.uint8)] * count


def film(frames: Callable[[], list[NDArray[np.uint8]]], **options: Any) -> Write:
    return lambda path: write_video(path, frames(), **options)


def cases() -> Iterator[Case]:
    for part in (_forms, _lengths, _times, _turned, _sizes, _clear, _animations):
        yield from part()


def _forms() -> Iterator[Case]:
    made: dict[str, dict[str, Any]] = {
        "h264.mp4": {},
        "h264.mov": {},
        "h264.mkv": {},
        "h264.avi": {},
        "h264.ts": {"form": "mpegts"},
        "h264.flv": {},
        "h264.3gp": {},
        "b-frames.mp4": {"options": {"bf": "3", "g": "6"}},
        "b-frames.avi": {"options": {"bf": "2"}},
        "open-gop.mp4": {"options": {"x264-params": "open-gop=1:keyint=5:bframes=2"}},
        "refreshed.mp4": {"options": {"x264-params": "intra-refresh=1:keyint=5"}},
        "interlaced.mp4": {"options": {"flags": "+ildct+ilme"}},
        "fragments.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
        "index-first.mp4": {"container_options": {"movflags": "faststart"}},
        "444.mp4": {"pixels": "yuv444p"},
        "10-bit.mp4": {"pixels": "yuv420p10le"},
        "rgb.mp4": {"codec": "libx264rgb", "pixels": "rgb24"},
        "hevc.mp4": {"codec": "libx265", "options": {"x265-params": "log-level=none:pools=1"}},
        "hevc-10.mkv": {
            "codec": "libx265",
            "pixels": "yuv420p10le",
            "options": {"x265-params": "log-level=none:pools=1"},
        },
        "mpeg4.mp4": {"codec": "mpeg4", "options": {"bf": "2"}},
        "mpeg4.avi": {"codec": "mpeg4"},
        "mpeg4-b.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
        "vp9.webm": {"codec": "libvpx-vp9"},
        "vp9.ivf": {"codec": "libvpx-vp9", "form": "ivf"},
        "live.webm": {"codec": "libvpx-vp9", "container_options": {"live": "1"}},
        "vp8.webm": {"codec": "libvpx"},
        "vp8-hidden.webm": {"codec": "libvpx", "options": {"auto-alt-ref": "1", "lag-in-frames": "8"}},
        "av1.mkv": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "lp=1"}},
        "mpeg2.mpg": {"codec": "mpeg2video", "form": "mpeg"},
        "mpeg2.ts": {"codec": "mpeg2video", "form": "mpegts"},
        "mpeg1.mpg": {"codec": "mpeg1video"},
        "wmv.wmv": {"codec": "wmv2", "form": "asf"},
        "sorenson.flv": {"codec": "flv"},
        "jpeg.mov": {"codec": "mjpeg", "pixels": "yuvj444p"},
        "jpeg.avi": {"codec": "mjpeg", "pixels": "yuvj420p"},
        "prores.mov": {"codec": "prores_ks", "pixels": "yuv422p10le"},
        "lossless.mkv": {"codec": "ffv1", "pixels": "bgr0"},
        "huffyuv.avi": {"codec": "huffyuv", "pixels": "rgb24"},
        "raw.avi": {"codec": "rawvideo", "pixels": "bgr24"},
        "qtrle.mov": {"codec": "qtrle", "pixels": "rgb24"},
        "png.mov": {"codec": "png", "pixels": "rgb24"},
        "raw.y4m": {"codec": "wrapped_avframe", "form": "yuv4mpegpipe"},
    }
    everything = shows(range(COUNT))
    for file, options in made.items():
        yield Case("video", file, film(partial(stripes, COUNT), **options), everything, settings=NATIVE)
    sound = (tone(0.5, 16000), 16000)
    yield Case("video", "with-sound.mp4", film(partial(stripes, COUNT), sound=sound), everything, settings=NATIVE)
    raw = shows(range(COUNT), rate=25)
    for file, codec in (("raw.h264", "libx264"), ("raw.m2v", "mpeg2video")):
        check = raw if file == "raw.h264" else everything
        yield Case("video", file, film(partial(stripes, COUNT), codec=codec), check, settings=(("fps", 60.0),))


def _lengths() -> Iterator[Case]:
    for count in (1, 2, 3, 5, 17):
        write = film(partial(stripes, count))
        yield Case("video", f"frames-{count}.mp4", write, shows(range(count), of=count), settings=NATIVE)
    write = film(partial(stripes, 17))
    yield Case("video", "frames-17-of-2.mp4", write, shows([0, 12], rate=2, of=17))
    least = (("min_frames", 4),)
    yield Case("video", "at-least-4.mp4", write, shows([0, 4, 8, 12], _at(0, 4, 8, 12), 96 / 17, of=17), settings=least)
    most = (("fps", 24.0), ("max_frames", 3))
    yield Case("video", "at-most-3.mp4", write, shows([0, 5, 11], _at(0, 5, 11), 72 / 17, of=17), settings=most)
    few = (("fps", 60.0), ("min_frames", 50))
    yield Case("video", "no-more-than-there-are.mp4", film(partial(stripes, 3)), shows(range(3), of=3), settings=few)


def _at(*numbers: int) -> list[float]:
    return [number / 24 for number in numbers]


def _times() -> Iterator[Case]:
    uneven = [0, 100, 200, 1000, 1100, 3000]
    seen, times = [0, 2, 3, 4, 4, 4, 5], [0, 0.2, 1, 1.1, 2, 2.5, 3]
    for file, options in (
        ("uneven.mp4", {}),
        ("uneven.mkv", {}),
        ("uneven.webm", {"codec": "libvpx-vp9"}),
        ("uneven.ts", {"form": "mpegts"}),
        ("uneven.flv", {"codec": "flv"}),
    ):
        write = film(partial(stripes, 6), times_ms=uneven, **options)
        yield Case("video", file, write, shows(seen, times, 2, of=6))
    for start in (5000, 123_456):
        for suffix in ("mp4", "mkv"):
            write = film(partial(stripes, 6), times_ms=[start + time for time in uneven])
            yield Case("video", f"starts-at-{start}.{suffix}", write, shows(seen, times, 2, of=6))
    early = film(partial(stripes, 6), times_ms=[time - 300 for time in uneven])  # an edit list leaves three frames out
    yield Case("video", "starts-before.mp4", early, shows([3, 4, 4, 4, 5], [0, 0.1, 1, 1.5, 2], 2, of=6))
    slides = film(partial(stripes, 3), times_ms=[0, 500, 9000])  # the last slide must not be lost
    numbers = [0, *[1] * 17, 2]
    moments = [0, 0.5, *[1 + i / 2 for i in range(16)], 9]
    yield Case("video", "slides.mkv", slides, shows(numbers, moments, 2, of=3))


def _turned() -> Iterator[Case]:
    import numpy as np

    def corner() -> list[NDArray[np.uint8]]:
        pixels = np.full((64, 128, 3), 20, np.uint8)
        pixels[:32, :64] = 230
        return [pixels] * 3

    for turns in (1, 2, 3):
        for suffix in ("mp4", "mov"):

            def check(decoded: Decoded, turns: int = turns) -> None:
                upright = np.rot90(corner()[0], turns)
                assert decoded.data.shape == (3, *upright.shape), f"{decoded.data.shape}, not {upright.shape}"
                assert np.abs(decoded.data[0].astype(int) - upright).mean() < 4, "is not upright"

            write = film(corner, rotation=90 * turns)
            yield Case("video", f"turned-{turns}.{suffix}", write, check, settings=NATIVE)


def _sizes() -> Iterator[Case]:
    red = (200, 30, 30)
    for height, width in ((2, 2), (62, 130), (64, 98), (16, 2000), (126, 66)):
        write = film(partial(one_colour, red, height, width))
        yield Case("video", f"size-{width}x{height}.mp4", write, colour(red, (height, width)), settings=NATIVE)
    for height, width in ((1, 1), (63, 129), (1, 300)):
        write = film(partial(one_colour, red, height, width), codec="png", pixels="rgb24")
        yield Case("video", f"size-{width}x{height}.mov", write, colour(red, (height, width)), settings=NATIVE)
    small = (*NATIVE, ("frame_pixels", 2048))
    write = film(partial(one_colour, red, 64, 128))
    yield Case("video", "scaled-down.mp4", write, colour(red, (32, 64)), settings=small)
    check = colour(red, (64, 128), 6, last=(30, 200, 30))
    write = joined(one_colour(red, 64, 128), one_colour((30, 200, 30), 128, 256))
    yield Case("video", "grows.h264", write, check, settings=(("fps", 60.0),))


def joined(*parts: list[NDArray[np.uint8]]) -> Write:
    """Writes streams of different sizes one behind the other."""

    def write(path: Path) -> None:
        streams = [write_video(path, frames, options={"bf": "0"}).read_bytes() for frames in parts]
        path.write_bytes(b"".join(streams))

    return write


def _clear() -> Iterator[Case]:
    """Transparent pictures whose hidden colour is red."""
    hidden = partial(one_colour, (200, 30, 30, 0), 64, 128)
    for file, codec, pixels in (
        ("clear-qtrle.mov", "qtrle", "argb"),
        ("clear-png.mov", "png", "rgba"),
        ("clear.mkv", "ffv1", "bgra"),
        ("clear-prores.mov", "prores_ks", "yuva444p10le"),
        ("clear.webm", "libvpx-vp9", "yuva420p"),
    ):
        options = {"profile": "4444"} if "prores" in file else {}
        write = film(hidden, codec=codec, pixels=pixels, options=options)
        yield Case("video", file, write, colour((255, 255, 255), (64, 128)), settings=NATIVE)
        blue = (*NATIVE, ("background", (0, 0, 255)))
        yield Case("video", f"blue-{file}", write, colour((0, 0, 255), (64, 128)), settings=blue)


def _animations() -> Iterator[Case]:
    from PIL import Image

    def animated(path: Path) -> None:
        first, *others = [Image.fromarray(frame) for frame in stripes(6)]
        first.save(path, save_all=True, append_images=others, duration=250)

    def clear(path: Path) -> None:
        first, *others = [Image.new("RGBA", (32, 16), (200, 30, 30, 0)) for _ in range(3)]
        for i, picture in enumerate((first, *others)):
            picture.putpixel((i, 0), (255, 255, 255, 255))  # a writer leaves out what stays the same
        first.save(path, save_all=True, append_images=others, duration=500, disposal=2)

    for suffix, tolerance in (("gif", 1), ("png", 0), ("webp", 4), ("avif", 6)):
        check = shows(range(6), rate=4, tolerance=tolerance, of=6)
        yield Case("video", f"animated.{suffix}", animated, check, settings=(("fps", 4.0),))
    for suffix in ("gif", "png", "webp"):
        yield Case("video", f"animated-clear.{suffix}", clear, colour((255, 255, 255), (16, 32)))
