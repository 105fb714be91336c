"""Ogg: every page must be whole and undamaged, and the last one must end its stream.

A decoder leaves damaged pages out in silence.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO

_LAST = 0x04
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""Each byte with its bits the other way round."""


def check(file: BinaryIO, size: int) -> str | None:
    start, ended = 0, False
    while start < size:
        file.seek(start)
        head = file.read(27)
        if head[:4] != b"OggS":
            return None if ended else f"damaged: no page begins at byte {start}"  # tags of players may stand behind
        table = file.read(head[26]) if len(head) == 27 else b""
        length = 27 + len(table) + sum(table)
        if len(head) < 27 or len(table) < head[26] or start + length > size:
            return "truncated: ends inside a page"
        page = head[:22] + b"\0\0\0\0" + head[26:] + table + file.read(sum(table))
        if _checksum(page) != int.from_bytes(head[22:26], "little"):
            return f"damaged: the page at byte {start} has a wrong checksum"
        start, ended = start + length, bool(head[5] & _LAST)
    return None if ended else "truncated: has no last page"


def _checksum(page: bytes) -> int:
    """The CRC of Ogg, which takes bits from the other end: zlib's, of reversed bytes, without its inversions."""
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{found:032b}"[::-1], 2)
