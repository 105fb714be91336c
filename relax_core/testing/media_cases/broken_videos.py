"""Videos that must be refused: cut off, damaged, without pictures, too large, too long, or with false claims."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.testing.media_cases.broken_images import OTHERS
from relax_core.testing.media_cases.case import Case, Write
from relax_core.testing.media_cases.videos import COUNT, film, joined, one_colour
from relax_core.testing.media_files import stripes, tone, write_sound, write_video

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SETTINGS = (("fps", 24.0),)


def cases() -> Iterator[Case]:
    for part in (_cut, _damaged, _lies, _limits, _others):
        yield from part()


def _changed(change: Callable[[bytes], bytes], **options: Any) -> Write:
    """Writes a video full of detail, and then what ``change`` makes of it."""
    return lambda path: path.write_bytes(change(write_video(path, _detailed(), **options).read_bytes()))


def _detailed() -> list[NDArray[np.uint8]]:
    import numpy as np

    wide = np.random.default_rng(0).integers(0, 256, (64, 128 + 8 * COUNT, 3), dtype=np.uint8)
    return [np.ascontiguousarray(wide[:, 8 * i : 8 * i + 128]) for i in range(COUNT)]


def _cut() -> Iterator[Case]:
    first = {"movflags": "faststart"}
    for file, options, words in (
        ("h264.mp4", {}, ("truncated",)),
        ("index-first.mp4", {"container_options": first}, ("truncated",)),
        ("fragments.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov"}, "options": {"g": "4"}}, ()),
        ("h264.mkv", {}, ("truncated",)),
        ("vp9.webm", {"codec": "libvpx-vp9"}, ("truncated",)),
        ("mpeg4.avi", {"codec": "mpeg4"}, ("truncated",)),
        ("flv.flv", {"codec": "flv"}, ("truncated",)),
        ("mpeg2.ts", {"codec": "mpeg2video", "form": "mpegts"}, ("truncated",)),
        ("wmv.wmv", {"codec": "wmv2", "form": "asf"}, ("truncated",)),
        ("gif.gif", {"codec": "gif", "pixels": "rgb8", "fps": 10}, ("truncated",)),
        ("apng.apng", {"codec": "apng", "pixels": "rgb24", "form": "apng"}, ("truncated",)),
    ):
        for part in (0.4, 0.85):

            def cut(whole: bytes, part: float = part) -> bytes:
                return whole[: int(len(whole) * part) | 1]

            write = _changed(cut, **options)
            yield Case("video", f"cut-{part}-{file}", write, refused=words, settings=SETTINGS)
    no_index = _changed(lambda whole: whole[: whole.index(b"moov") - 4])
    yield Case("video", "no-index.mp4", no_index, refused=("has no moov box",), settings=SETTINGS)


def _damaged() -> Iterator[Case]:
    def in_the_middle(whole: bytes) -> bytes:
        place = len(whole) * 3 // 5
        return whole[:place] + bytes(byte ^ 0x5A for byte in whole[place : place + 60]) + whole[place + 60 :]

    for file, options in (
        ("h264.mp4", {"container_options": {"movflags": "faststart"}}),
        ("h264.mkv", {}),
        ("mpeg4.avi", {"codec": "mpeg4"}),
        ("mpeg2.ts", {"codec": "mpeg2video", "form": "mpegts"}),
        ("apng.apng", {"codec": "apng", "pixels": "rgb24", "form": "apng"}),
    ):
        write = _changed(in_the_middle, **options)
        yield Case("video", f"damaged-{file}", write, refused=("damaged",), settings=SETTINGS)


def _lies() -> Iterator[Case]:
    def patched(box: bytes, at: int, *numbers: int) -> Callable[[bytes], bytes]:
        def change(whole: bytes) -> bytes:
            place = whole.index(box) + 4 + at
            return whole[:place] + struct.pack(f">{len(numbers)}I", *numbers) + whole[place + 4 * len(numbers) :]

        return change

    for file, change, words in (
        ("a-billion-samples.mp4", patched(b"stsz", 4, 1, 1_000_000_000), ("its index claims 1000000000 samples",)),
        ("a-billion-listed.mp4", patched(b"stsz", 8, 1_000_000_000), ("claims 1000000000 samples",)),
        ("a-billion-chunks.mp4", patched(b"stco", 4, 1_000_000_000), ("claims 1000000000 chunks",)),
        ("chunk-far-away.mp4", patched(b"stco", 8, 2_000_000_000), ("truncated", "points to byte 2000000000")),
        ("no-duration.mp4", patched(b"stts", 12, 0), ("samples last no time",)),
        ("no-time-units.mp4", patched(b"mdhd", 12, 0), ("no time units a second",)),
        ("lasts-for-days.mp4", patched(b"stts", 12, 2_000_000_000), ("s long; max_seconds allows 14400",)),
    ):
        yield Case("video", file, _changed(change), refused=words, settings=SETTINGS)


def _limits() -> Iterator[Case]:
    large = film(partial(one_colour, (200, 30, 30), 64, 128))
    yield Case("video", "large.mp4", large, refused=("128x64 pixels; max_pixels",), settings=(("max_pixels", 8000),))
    grown = joined(one_colour((200, 30, 30), 64, 128), one_colour((200, 30, 30), 640, 1280, 2))
    limit = (("max_pixels", 10_000), ("fps", 60.0))
    yield Case("video", "becomes-large.h264", grown, refused=("1280x640 pixels; max_pixels",), settings=limit)
    other = joined(one_colour((200, 30, 30), 64, 128), one_colour((200, 30, 30), 128, 128))
    yield Case("video", "becomes-square.h264", other, refused=("changes from 128x64 to 128x128",), settings=limit[1:])
    long = film(partial(stripes, 3), times_ms=[0, 1000, 20_000_000])
    yield Case("video", "long.mp4", long, refused=("s long; max_seconds allows 14400: cut it",))


def _others() -> Iterator[Case]:
    from PIL import Image

    def cover(path: Path) -> None:
        import av

        with av.open(str(path), "w", format="mp4") as container:
            track: Any = container.add_stream("aac", rate=16000, layout="mono")
            picture: Any = container.add_stream("mjpeg", rate=1, options={"strict": "unofficial"})
            picture.height, picture.width, picture.pix_fmt, picture.disposition = 64, 128, "yuvj420p", 1024
            container.mux(picture.encode(av.VideoFrame.from_ndarray(stripes(1)[0], format="rgb24")))
            container.mux(picture.encode())
            frame = av.AudioFrame.from_ndarray(tone(0.5, 16000).T.copy(), format="fltp", layout="mono")
            frame.sample_rate = 16000
            container.mux(track.encode(frame))
            container.mux(track.encode())

    def still(path: Path) -> None:
        Image.fromarray(stripes(1)[0]).save(path)

    def playlist(path: Path) -> None:
        path.write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{path}\n")

    none = ("holds no video stream",)
    for suffix in ("m4a", "wav", "mp3", "ogg", "flac"):
        write = partial(write_sound, samples_NC=tone(0.5, 16000), rate=16000)
        yield Case("video", f"sound.{suffix}", write, refused=none)
    yield Case("video", "cover-only.mp4", cover, refused=none)
    for suffix in ("png", "jpg", "webp"):
        yield Case("video", f"still.{suffix}", still, refused=("give it as image",))
    for suffix in ("mp4", "m3u8"):
        yield Case("video", f"playlist.{suffix}", playlist, refused=("a list of other files",))
    for name in ("empty", "zeros", "text", "html", "lfs", "json", "svg", "heic"):
        what, words = OTHERS[name]
        yield Case("video", f"{name}.mp4", partial(Path.write_bytes, data=what), refused=words[:1])
