"""Matroska and WebM: elements, each with its length in front; a live recording leaves some lengths open.

Many writers begin the parts of a file with a checksum of the rest: a reader would skip damage in silence.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO

from relax_modalities.truncation.chunks import short

_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_KNOWN = (
    *(0x1A45DFA3, _SEGMENT, 0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367),
    *(_CLUSTER, 0xE7, 0x5854, 0xA7, 0xAB, 0xA3, 0xA0, 0xAF, 0xBF, 0xEC),
)
"""Files, segments, what is in a segment, and what is in a cluster: a flipped bit leads to anything else."""
_MANY = 2_000_000
"""Elements that are looked at: a live recording of hours has so many blocks."""
_BLOCK = 1 << 20
_CHECKSUM = b"\xbf\x84"
"""The head of an element that holds a CRC-32 of what follows it in its parent."""


def check(file: BinaryIO, size: int) -> str | None:
    start = 0
    for _ in range(_MANY):
        file.seek(start)
        head = file.read(12)
        if not head:
            return None
        name, name_bytes = _number(head, marker=True)
        length, length_bytes = _number(head[name_bytes:], marker=False) if name_bytes else (0, 0)
        if not length_bytes:
            return "truncated: ends inside an element" if len(head) < 12 else None
        start += name_bytes + length_bytes
        is_open = length == (1 << 7 * length_bytes) - 1
        if name not in (_SEGMENT, _CLUSTER) and is_open:
            return None
        if not is_open and start + length > size:
            return short("its segment" if name == _SEGMENT else "an element", size - start, length)
        if name not in _KNOWN:
            return f"damaged: the part at byte {start} is none that Matroska has"
        if is_open:
            continue  # what follows is inside
        right = _is_right(file, start, length)
        if right is False:
            return f"damaged: the part at byte {start} has a wrong checksum"
        if right or name not in (_SEGMENT, _CLUSTER):
            start += length
    return None


def _is_right(file: BinaryIO, start: int, length: int) -> bool | None:
    """Whether an element's checksum is right; None if it has none."""
    file.seek(start)
    head = file.read(6)
    if not head.startswith(_CHECKSUM) or length < 6:
        return None
    found, left = 0, length - 6
    while left and (block := file.read(min(left, _BLOCK))):
        found, left = zlib.crc32(block, found), left - len(block)
    return found == int.from_bytes(head[2:], "little")


def _number(head: bytes, marker: bool) -> tuple[int, int]:
    """A number of variable length, and its bytes: 0 if it is not whole. ``marker``: keep the bit that tells them."""
    if not head or not head[0]:
        return 0, 0
    count = 9 - head[0].bit_length()
    if len(head) < count:
        return 0, 0
    value = int.from_bytes(head[:count], "big")
    return (value if marker else value & ((1 << 7 * count) - 1)), count
