"""MP3 and AAC streams: the length that an encoder noted in the first frame, or else that the last frame is whole."""

from __future__ import annotations

import struct
from typing import BinaryIO

from relax_modalities.truncation.chunks import short

_MANY = 3_000_000
"""Frames that are looked at."""
_SEARCH = 65_536
"""How far the first frame may be from the beginning."""
_TAGS = (b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"ID3", b"\0")
"""What may stand behind the last frame."""

_RATES = (44_100, 48_000, 32_000)
_BITS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Kilobits per second, by version (1, or 2 and 2.5) and layer."""


def check(file: BinaryIO, size: int) -> str | None:
    start = _skip_tags(file)
    file.seek(start)
    head = file.read(_SEARCH)
    first = next((i for i in range(len(head) - 4) if _two_frames(head, i)), None)
    if first is None:
        return None  # the decoders will say what it is not
    start += first
    noted = _noted_bytes(head[first:])
    return short("frames", size - start, noted) if noted else _last_frame(file, start, size)


def _skip_tags(file: BinaryIO) -> int:
    start = 0
    for _ in range(8):
        file.seek(start)
        head = file.read(10)
        if len(head) < 10 or head[:3] != b"ID3":
            break
        length = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        start += 10 + length + (10 if head[5] & 0x10 else 0)
    return start


def frame_length(head: bytes) -> int:
    """Bytes of the frame that begins with these, 7 for AAC and 4 for MP3; 0 if none does, or its length is not told."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    layer = 4 - (head[1] >> 1 & 3)
    if layer == 4:  # AAC
        if head[1] & 0xF0 != 0xF0 or len(head) < 6:
            return 0
        return (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
    version, bits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or bits in (0, 15) or rate == 3:
        return 0
    speed = _RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    kilobits = _BITS[1 if version == 3 else 2, layer][bits - 1]
    padding = head[2] >> 1 & 1
    if layer == 1:
        return (12_000 * kilobits // speed + padding) * 4
    return (72_000 if layer == 3 and version != 3 else 144_000) * kilobits // speed + padding


def _two_frames(head: bytes, start: int) -> bool:
    """Whether a frame begins here, followed by another one or by the end."""
    length = frame_length(head[start : start + 7])
    behind = head[start + length : start + length + 7]
    return length > 7 and (len(behind) < 7 or frame_length(behind) > 0)


def _noted_bytes(frame: bytes) -> int:
    """Bytes of all frames as the encoder noted them in the first one (Xing, Info or VBRI); 0 if it did not."""
    place = max(frame.find(b"Xing", 0, 64), frame.find(b"Info", 0, 64))
    if place > 0:
        flags = int.from_bytes(frame[place + 4 : place + 8], "big")
        at = place + 8 + (4 if flags & 1 else 0)
        return int.from_bytes(frame[at : at + 4], "big") if flags & 2 else 0
    if frame[36:40] == b"VBRI":
        return int(struct.unpack(">I", frame[46:50])[0])
    return 0


def _last_frame(file: BinaryIO, start: int, size: int) -> str | None:
    for _ in range(_MANY):
        file.seek(start)
        head = file.read(7)
        length = frame_length(head)
        if not length:
            known = not head or head.startswith(_TAGS) or any(tag.startswith(head) for tag in _TAGS)
            return None if known or len(head) == 7 else "truncated: ends inside a frame"
        if start + length > size:
            return "truncated: ends inside a frame"
        start += length
    return None
