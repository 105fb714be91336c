"""The wav container, written for dumps."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FLOAT = 3
"""The format number of IEEE floats."""


def wav_bytes(samples_N: NDArray[np.float32], rate: int) -> bytes:
    """A mono wav file of the very floats; equal samples give equal bytes (libsndfile would add the time of day)."""
    samples = samples_N.astype("<f4", copy=False).tobytes()
    form = struct.pack("<HHIIHHH", _FLOAT, 1, rate, rate * 4, 4, 32, 0)
    body = b"WAVE" + b"".join(
        name + struct.pack("<I", len(content)) + content
        for name, content in ((b"fmt ", form), (b"fact", struct.pack("<I", len(samples_N))), (b"data", samples))
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body
