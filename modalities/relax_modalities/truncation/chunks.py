"""Containers of chunks, each with its length in front: is the chunk with the content there to its end?

Each check takes an open file and its size, and returns what is wrong or None.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

_MANY = 100_000
"""Chunks that are looked at."""
_UNKNOWN = 0x7FFF_0000
"""From here on a 32-bit length is what writers to a pipe leave in the header, since they cannot go back."""


def short(what: str, there: int, said: int) -> str | None:
    """The error, if there is less than was said."""
    return f"truncated: {max(there, 0)} of {said} bytes of {what}" if there < said else None


def _walk(file: BinaryIO, start: int, form: str, even: bool) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and length of each chunk from ``start`` on; a length may be more than there is."""
    head = struct.Struct(form)
    for _ in range(_MANY):
        file.seek(start)
        if len(read := file.read(head.size)) < head.size:
            return
        name, length = head.unpack(read)
        start += head.size
        yield name, start, length
        start += length + (length % 2 if even else 0)
        if length < 0:
            return


def _big_endian(file: BinaryIO, magic: bytes) -> bool:
    file.seek(0)
    return file.read(4) == magic


def wav(file: BinaryIO, size: int) -> str | None:
    """RIFF, RIFX, RF64 and BW64: the ``data`` chunk."""
    long_length = None
    for name, start, length in _walk(file, 12, ">4sI" if _big_endian(file, b"RIFX") else "<4sI", even=True):
        if name == b"ds64":
            file.seek(start)
            long_length = struct.unpack("<QQ", file.read(16).ljust(16, b"\0"))[1]
        if name == b"data":
            if length == 0xFFFF_FFFF and long_length is not None:
                return short("samples", size - start, long_length)
            return None if length >= _UNKNOWN else short("samples", size - start, length)
    return "truncated: has no samples chunk"


def avi(file: BinaryIO, size: int) -> str | None:
    """Each RIFF chunk, of which a large file has several, and in it the list of frames."""
    frames = False
    for name, start, length in _walk(file, 0, "<4sI", even=True):
        if name != b"RIFF":
            break
        if 0 < length < _UNKNOWN and (found := short("content", size - start, length)):
            return found
        for inner, begin, extent in _walk(file, start + 4, "<4sI", even=True):
            file.seek(begin)
            if inner == b"LIST" and file.read(4) == b"movi":
                frames = True
                if 0 < extent < _UNKNOWN and (found := short("frames", size - begin, extent)):
                    return found
                break
    return None if frames else "truncated: has no list of frames"


def wave64(file: BinaryIO, size: int) -> str | None:
    start = 40
    for _ in range(_MANY):
        file.seek(start)
        if len(head := file.read(24)) < 24:
            return "truncated: has no samples chunk"
        length = int(struct.unpack("<Q", head[16:])[0])  # counts the head, too
        if head[:4] == b"data":
            return short("samples", size - start, length)
        start += max(24, length + -length % 8)
    return None


def aiff(file: BinaryIO, size: int) -> str | None:
    for name, start, length in _walk(file, 12, ">4sI", even=True):
        if name == b"SSND":
            return None if length >= _UNKNOWN else short("samples", size - start, length)
    return None  # a sound without samples has no such chunk


def au(file: BinaryIO, size: int) -> str | None:
    file.seek(4)
    start, length = struct.unpack(">II", file.read(8).ljust(8, b"\0"))
    return None if length >= _UNKNOWN else short("samples", size - start, length)


def caf(file: BinaryIO, size: int) -> str | None:
    for name, start, length in _walk(file, 8, ">4sq", even=False):
        if name == b"data":
            return None if length < 0 else short("samples", size - start, length)
    return "truncated: has no samples chunk"


def voc(file: BinaryIO, size: int) -> str | None:
    """Blocks up to the one that ends the file, which may be left out."""
    file.seek(20)
    start = int.from_bytes(file.read(2), "little")
    for _ in range(_MANY):
        file.seek(start)
        head = file.read(4)
        if not head or head[0] == 0:
            return None
        length = int.from_bytes(head[1:], "little")
        if found := short("a block", size - start, length + 4):
            return found
        start += length + 4
    return None


def nist(file: BinaryIO, size: int) -> str | None:
    """A header of text: lines of name, type and value."""
    file.seek(8)
    length = int(file.read(8).strip() or 0)
    fields = {line[0]: line[2] for text in file.read(length).split(b"\n") if len(line := text.split()) == 3}
    if not {b"sample_count", b"sample_n_bytes"} <= fields.keys() or b"pcm" not in fields.get(b"sample_coding", b"pcm"):
        return None
    values = int(fields[b"sample_count"]) * int(fields.get(b"channel_count", 1))
    return short("samples", size - length, values * int(fields[b"sample_n_bytes"]))


def asf(file: BinaryIO, size: int) -> str | None:
    """Windows Media: the header object, and the data object behind it."""
    file.seek(16)
    start = int(struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0])
    file.seek(start)
    head = file.read(24)
    if len(head) < 24:
        return "truncated: ends in its header"
    length = int(struct.unpack("<Q", head[16:])[0])
    return short("packets", size - start, length) if length else None


def flv(file: BinaryIO, size: int) -> str | None:
    """Each tag is followed by its length: the last one must fit what is in front of it."""
    file.seek(max(0, size - 4))
    length = struct.unpack(">I", file.read(4).rjust(4, b"\0"))[0]
    start = size - 4 - length
    if start >= 9:
        file.seek(start)
        kind, inner = file.read(1), int.from_bytes(file.read(3), "big")
        if length == inner + 11 and kind in (b"\x08", b"\x09", b"\x12"):
            return None
    return "truncated: ends inside a tag"


def mpegts(file: BinaryIO, size: int) -> str | None:
    return "truncated: ends inside a packet" if size % 188 else None


def gif(file: BinaryIO, size: int) -> str | None:
    file.seek(max(0, size - 64))
    return None if file.read().rstrip(b"\0").endswith(b";") else "truncated: has no end mark"


def png(file: BinaryIO, size: int) -> str | None:
    """Chunks up to the one that ends an image or an animation; a chunk is followed by four bytes of checksum."""
    start = 8
    for _ in range(_MANY):
        file.seek(start)
        if len(head := file.read(8)) < 8:
            break
        length, name = struct.unpack(">I4s", head)
        if start + length + 12 > size:
            break
        if zlib.crc32(file.read(length), zlib.crc32(name)) != int.from_bytes(file.read(4), "big"):
            return f"damaged: its chunk {name!r} has a wrong checksum"
        if name == b"IEND":
            return None
        start += length + 12
    return "truncated: has no end mark"
