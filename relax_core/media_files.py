"""Media as files: which format they have, and the bytes that they came from, or that their modality writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relax_core.errors import DataError
from relax_core.types import MEDIA_KINDS, MediaKind, MediaPart

if TYPE_CHECKING:
    from relax_core.interfaces import Modality


class Format(NamedTuple):
    """Of a file: its suffix, and what the web calls it."""

    suffix: str
    media_type: str


_BEGINNINGS = (
    (rb"\x89PNG", Format(".png", "image/png")),
    (rb"\xff\xd8\xff", Format(".jpg", "image/jpeg")),
    (rb"GIF8", Format(".gif", "image/gif")),
    (rb"RIFF....WEBP", Format(".webp", "image/webp")),
    (rb"BM", Format(".bmp", "image/bmp")),
    (rb"RIFF....WAVE", Format(".wav", "audio/wav")),
    (rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]", Format(".mp3", "audio/mpeg")),
    (rb"fLaC", Format(".flac", "audio/flac")),
    (rb"OggS", Format(".ogg", "audio/ogg")),
    (rb"....ftyp", Format(".mp4", "video/mp4")),
    (rb"\x1aE\xdf\xa3", Format(".webm", "video/webm")),
    (rb"RIFF....AVI ", Format(".avi", "video/x-msvideo")),
)
"""How files of the usual formats begin."""


def format_of(content: bytes) -> Format | None:
    """By how it begins; None for a format that is not among the usual ones."""
    return next((found for begin, found in _BEGINNINGS if re.match(begin, content, re.DOTALL)), None)


def file_of(part: MediaPart, modalities: Mapping[MediaKind, Modality] | Mapping[str, Modality]) -> tuple[str, bytes]:
    """File suffix and bytes of a medium: those that it came from, or what its modality writes of decoded content.

    Raises DataError for a file that is missing, and for a kind that no modality writes.
    """
    kind, source = MEDIA_KINDS[type(part)], part.source
    if isinstance(source, Path):
        try:
            return source.suffix, source.read_bytes()
        except OSError as error:
            raise DataError(f"{kind} {source}: {error.strerror or error}") from error
    if isinstance(source, bytes):
        found = format_of(source)
        return found.suffix if found else ".bin", source
    known: Mapping[str, Modality] = {str(name): modality for name, modality in modalities.items()}
    if kind not in known:
        raise DataError(f"{kind} that was made, not read: no modality is there that writes it; add a plugin")
    return known[kind].dump(source)
