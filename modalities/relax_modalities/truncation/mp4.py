"""MP4 and QuickTime: boxes up to their ends, and sample tables that can be true.

A table may claim far more samples than the file has bytes; a reader that believes it fills the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from relax_modalities.truncation.chunks import short

_MANY = 200_000
"""Boxes of one level that are looked at."""
_NEEDED = (b"moov", b"moof", b"mdat")
_INSIDE = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_PER_BYTE = 16
"""More samples than this for each byte of the file are a lie; old QuickTime counts several samples of sound a byte."""

Box = tuple[bytes, int, int, int]
"""Name, start, start of the content, end as it says."""


def check(file: BinaryIO, size: int) -> str | None:
    names = set()
    for name, start, content, end in _boxes(file, 0, size):
        names.add(name)
        if end > size and name in _NEEDED:
            return short(f"its {name.decode()} box", size - start, end - start)
        if name in _INSIDE and (found := _tables(file, content, end, size, name)):
            return found
    if not names & {b"moov", b"moof"}:
        return "truncated: has no moov box, the index that is often written last"
    return None


def _boxes(file: BinaryIO, start: int, stop: int) -> Iterator[Box]:
    for _ in range(_MANY):
        file.seek(start)
        head = file.read(16)
        if start + 8 > stop or len(head) < 8 or not head[4:8].strip(b"\xa9 ").isalnum():
            return
        length, name = struct.unpack(">I4s", head[:8])
        content = start + 8
        if length == 1 and len(head) == 16:
            length, content = struct.unpack(">Q", head[8:])[0], start + 16
        end = start + length if length else stop
        if end < content:
            return
        yield name, start, content, end
        start = end


def _tables(file: BinaryIO, start: int, stop: int, size: int, parent: bytes) -> str | None:
    for name, _, content, end in _boxes(file, start, stop):
        if name in _INSIDE and name != parent:  # none of them lies inside its like
            found = _tables(file, content, end, size, name)
        elif name in (b"stsz", b"stz2", b"trun"):
            found = _count(file, content, size, name)
        elif name == b"stts":
            found = _durations(file, content, end)
        elif name == b"mdhd":
            found = _timescale(file, content)
        elif name in (b"stco", b"co64"):
            found = _offsets(file, content, end, size, 4 if name == b"stco" else 8)
        else:
            continue
        if found:
            return found
    return None


def _count(file: BinaryIO, content: int, size: int, name: bytes) -> str | None:
    file.seek(content + (4 if name == b"trun" else 8))
    count = int.from_bytes(file.read(4), "big")
    if count > _PER_BYTE * size:
        return f"broken: its index claims {count} samples in {size} bytes"
    return None


def _durations(file: BinaryIO, content: int, end: int) -> str | None:
    """How long samples last: pairs of a number of samples and the duration of each."""
    file.seek(content + 4)
    pairs = min(int.from_bytes(file.read(4), "big"), (end - content - 8) // 8)
    numbers = struct.unpack(f">{'Ii' * pairs}", file.read(pairs * 8).ljust(pairs * 8, b"\0"))
    samples, total = sum(numbers[::2]), sum(n * d for n, d in zip(numbers[::2], numbers[1::2], strict=True))
    return f"broken: its {samples} samples last no time" if samples > 1 and total <= 0 else None


def _timescale(file: BinaryIO, content: int) -> str | None:
    file.seek(content)
    file.seek(content + (20 if file.read(1) == b"\1" else 12))
    return None if any(file.read(4)) else "broken: its header counts no time units a second"


def _offsets(file: BinaryIO, content: int, end: int, size: int, width: int) -> str | None:
    """Where chunks of samples begin: all must lie in the file."""
    file.seek(content + 4)
    count = int.from_bytes(file.read(4), "big")
    if count * width > end - content - 8:
        return f"broken: its index claims {count} chunks and has no room for them"
    places = struct.unpack(f">{count}{'I' if width == 4 else 'Q'}", file.read(count * width).ljust(count * width))
    if places and max(places) >= size:
        return f"truncated: its index points to byte {max(places)} of {size}"
    return None
