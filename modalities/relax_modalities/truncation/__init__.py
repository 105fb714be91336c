"""Cut files: what a container says about its own length, compared with what is there.

Decoders read what is left of a cut file in silence, so this is asked first. It can be known where a container states
a length or ends in a mark: WAV, Wave64, AIFF, AU, CAF, VOC, SPHERE, AVI, MP4 and QuickTime, Matroska and WebM, Ogg, MP3
and AAC streams (the last frame), Flash, Windows Media, GIF and PNG. It cannot be known of what has neither: raw and
MPEG streams cut between two packets, live WebM cut between two blocks, fragmented MP4 cut between two fragments.
Damage is found where there are checksums: Ogg, PNG and many Matroska files here, FLAC by its decoder.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from relax_core.errors import DataError
from relax_core.media import describe
from relax_core.types import MediaKind
from relax_modalities.forms import form_of_head
from relax_modalities.truncation import chunks, matroska, mp4, mpeg_audio, pages

Check = Callable[[BinaryIO, int], str | None]
"""Given an open file and its size: what is wrong, or None."""

_CHECKS: Mapping[str, Check] = {
    "wav": chunks.wav,
    "avi": chunks.avi,
    "w64": chunks.wave64,
    "aiff": chunks.aiff,
    "au": chunks.au,
    "caf": chunks.caf,
    "voc": chunks.voc,
    "nist": chunks.nist,
    "mpegts": chunks.mpegts,
    "asf": chunks.asf,
    "flv": chunks.flv,
    "gif": chunks.gif,
    "png": chunks.png,
    "mp4": mp4.check,
    "matroska": matroska.check,
    "ogg": pages.check,
    "mp3": mpeg_audio.check,
    "adts": mpeg_audio.check,
}
"""By the id of the form (see forms.py)."""


def refuse_truncated(source: Path | bytes, kind: MediaKind) -> None:
    """Raises DataError for a file that is shorter than it says, or whose index cannot be true."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        form = form_of_head(file.read(1024))
        other = form is None or (kind == "audio" and form.kind == "image")
        check = None if form is None or other else _CHECKS.get(form.id)
        try:
            reason = check(file, file.seek(0, os.SEEK_END)) if check else None
        except (ValueError, struct.error, OverflowError) as error:  # an absurd number where a length should stand
            reason = f"broken: its header cannot be read ({error})"
    if reason:
        raise DataError(f"{kind} {describe(source)}: {reason}: write or download it again")
