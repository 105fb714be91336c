"""Image files put together byte by byte: forms that Pillow does not write."""

from __future__ import annotations

import struct
import zlib


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(
    width: int, height: int, bits: int, colour: int, rows: bytes, before: bytes = b"", claimed: tuple[int, int] = (0, 0)
) -> bytes:
    """A PNG of ``rows``, each behind its filter. ``before``: chunks in front of the pixels; ``claimed``: its size."""
    head = struct.pack(">IIBBBBB", claimed[0] or width, claimed[1] or height, bits, colour, 0, 0, 0)
    chunks = png_chunk(b"IHDR", head) + before + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def png16(colour: int, values: tuple[int, ...], before: bytes = b"") -> bytes:
    """A PNG of 2 x 2 equal pixels with 16 bits a value. ``colour``: 0 grey, 2 RGB, 4 grey and alpha, 6 RGBA."""
    row = b"\0" + struct.pack(f">{len(values)}H", *values) * 2
    return png(2, 2, 16, colour, row * 2, before)


def png_grey(bits: int, value: int, transparent: int) -> bytes:
    """A PNG of one grey pixel with few bits, and the value that is transparent."""
    return png(1, 1, bits, 0, bytes([0, value << (8 - bits)]), png_chunk(b"tRNS", struct.pack(">H", transparent)))


def tiff(width: int, bits: int, photometric: int, content: bytes, sample_format: int = 1) -> bytes:
    """A TIFF of one row and one channel. ``photometric``: 0 where 0 is white; ``sample_format``: 2 signed, 3 float."""
    content += bytes(len(content) % 2)
    tags = {256: width, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: len(content)}
    tags[339] = sample_format
    body = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + struct.pack("<H", len(tags)) + body + bytes(4)


def icon(width: int, height: int, picture: bytes) -> bytes:
    """A Windows icon that claims a size of ``picture``, a PNG."""
    entry = struct.pack("<BBBBHHII", width % 256, height % 256, 0, 0, 1, 32, len(picture), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + picture


def bitmap(width: int, height: int) -> bytes:
    """The head of a BMP, without pixels."""
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
