"""Images that must be refused: cut off, no images, far too large, without a known scale."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial

from relax_core.testing.media_cases import raw
from relax_core.testing.media_cases.case import Case
from relax_core.testing.media_cases.images import content, encoded, letter

OTHERS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("is empty",)),
    "zeros": (bytes(5000), ("zero bytes",)),
    "text": (b"hello world, I am no picture " * 50, ("no backend can read it",)),
    "html": (b"<!doctype html><html><body>404</body></html>", ("an HTML page", "download it again")),
    "json": (b'{"error": "access denied"}', ("a JSON text",)),
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', ("an SVG drawing", "render it")),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200), ("a HEIC image", "convert it to PNG or JPEG")),
    "pdf": (b"%PDF-1.7\n" + bytes(100), ("a PDF document",)),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", ("a PostScript file",)),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", ("git lfs pull",)),
    "video": (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(200), ("an MP4", "give it as video")),
    "sound": (b"RIFF\x24\0\0\0WAVEfmt " + bytes(30), ("a WAV sound", "give it as audio")),
}
"""Files that are no images, and what an error says about them."""


def cases() -> Iterator[Case]:
    for name, (what, words) in OTHERS.items():
        yield Case("image", f"{name}.png", content(partial(bytes, what)), refused=words)
    yield from _cut()
    yield from _bombs()
    yield from _scales()


def _cut() -> Iterator[Case]:
    for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM", "QOI"):
        for part in (0.05, 0.5, 0.8):

            def make(form: str = form, part: float = part) -> bytes:
                whole = encoded(letter(), form)
                return whole[: int(len(whole) * part)]

            yield Case("image", f"cut-{part}.{form.lower()}", content(make), refused=("pillow",))


def _bombs() -> Iterator[Case]:
    def huge() -> bytes:
        row = bytes(1 + 9000 // 8)
        return raw.png(9000, 9000, 1, 0, row * 9000)

    bloated = zlib.compress(bytes(1 << 24), 9)
    made: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
        "huge.png": (huge, ("9000x9000 pixels; max_pixels allows 67108864: scale it down",)),
        "claims.png": (lambda: raw.png(1, 1, 8, 2, b"\0\1\2\3", claimed=(60000, 60000)), ("max_pixels allows",)),
        "claims-most.png": (lambda: raw.png(1, 1, 8, 2, b"\0\1\2\3", claimed=(2**31 - 1, 2**31 - 1)), ("max_pixels",)),
        "claims.bmp": (lambda: raw.bitmap(60000, 60000), ("max_pixels allows",)),
        "inside.ico": (lambda: raw.icon(16, 16, huge()), ("9000x9000 pixels; max_pixels allows",)),
        "frame.gif": (lambda: _frame(60000), ("max_pixels allows",)),
        "nothing.png": (lambda: raw.png(1, 1, 8, 2, b"", claimed=(0, 5))[:16] + bytes(8), ("pillow",)),
    }
    for name in (b"zTXt", b"iCCP"):
        chunk = raw.png_chunk(name, b"k\0\0" + bloated)
        make = partial(raw.png, 1, 1, 8, 2, b"\0\1\2\3", chunk)
        made[f"bloated-{name.decode()}.png"] = (make, ("too large",))
    for file, (write, words) in made.items():
        yield Case("image", file, content(write), refused=words)


def _frame(side: int) -> bytes:
    """A small GIF whose frame is larger than its screen."""
    whole = bytearray(encoded(letter().convert("P"), "GIF"))
    place = whole.index(b",", 13)
    whole[place + 5 : place + 9] = struct.pack("<HH", side, side)
    return bytes(whole)


def _scales() -> Iterator[Case]:
    hidden = raw.png_chunk(b"tRNS", struct.pack(">3H", 40000, 1, 2))
    made: dict[str, tuple[bytes, tuple[str, ...]]] = {
        "float-200.tiff": (raw.tiff(1, 32, 1, struct.pack("<f", 200), 3), ("mode F", "0 to 1 are allowed")),
        "float-below.tiff": (raw.tiff(1, 32, 1, struct.pack("<f", -0.5), 3), ("mode F", "0 to 1 are allowed")),
        "float-nan.tiff": (raw.tiff(1, 32, 1, struct.pack("<f", float("nan")), 3), ("NaN",)),
        "float-inf.tiff": (raw.tiff(1, 32, 1, struct.pack("<f", float("inf")), 3), ("NaN or inf",)),
        "int-70000.tiff": (raw.tiff(1, 32, 1, struct.pack("<I", 70000)), ("0 to 65535 are allowed",)),
        "int-below.tiff": (raw.tiff(1, 16, 1, struct.pack("<h", -5), 2), ("0 to 65535 are allowed",)),
        "rgb16-clear.png": (raw.png16(2, (40000, 1, 2), hidden), ("16-bit colours is transparent",)),
    }
    for name, (what, words) in made.items():
        yield Case("image", name, content(partial(bytes, what)), refused=words)
