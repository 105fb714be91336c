"""The wav container: written for dumps, and its header compared with the size of the file."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.errors import DataError
from relax_core.media import describe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FLOAT = 3
"""The format number of IEEE floats."""
_STREAMED = (0, 0xFFFFFFFF)
"""Sizes that a writer to a pipe leaves in the header, since it cannot go back."""


def wav_bytes(samples_N: NDArray[np.float32], rate: int) -> bytes:
    """A mono wav file of the very floats; equal samples give equal bytes (libsndfile would add the time of day)."""
    samples = samples_N.astype("<f4", copy=False).tobytes()
    form = struct.pack("<HHIIHHH", _FLOAT, 1, rate, rate * 4, 4, 32, 0)
    body = b"WAVE" + b"".join(
        name + struct.pack("<I", len(content)) + content
        for name, content in ((b"fmt ", form), (b"fact", struct.pack("<I", len(samples_N))), (b"data", samples))
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def refuse_truncated(source: Path | bytes) -> None:
    """Raises DataError for a wav file with fewer samples than its header says: decoders read the rest in silence."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(12)
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return
        while len(chunk := file.read(8)) == 8:
            name, length = struct.unpack("<4sI", chunk)
            if name == b"data":
                there = size - file.tell()
                if length not in _STREAMED and there < length:
                    raise DataError(f"audio {describe(source)}: truncated: {there} of {length} bytes of samples")
                return
            file.seek(length + length % 2, os.SEEK_CUR)
