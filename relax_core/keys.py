"""Keyed randomness: every draw is a pure function of (seed, task, attempt, member, turn, position).

No generator is shared and none has state, so a play that is interrupted, replayed or moved to another engine
draws the same numbers, whatever else runs beside it.

The stream of a key is SplitMix64 (Steele, Lea, Flood 2014) started from a BLAKE2b hash of the key.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.types import DrawKey

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def stream(seed: int, *parts: Any) -> int:
    """The 64-bit start of the stream that belongs to ``seed`` and ``parts`` (text and whole numbers)."""
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def draw_stream(seed: int, key: DrawKey) -> int:
    """The stream from which the tokens of one turn are drawn."""
    return stream(seed, "sample", key.task, key.attempt, key.member, key.turn)


def bits(start: int, position: int) -> int:
    """The 64 random bits at ``position`` of a stream."""
    z = (start + (position + 1) * _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(start: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (bits(start, position) >> 11) * 2.0**-53


def uniforms(starts: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """``uniform`` for many (start, position) pairs at once, bit for bit the same."""
    import numpy as np

    with np.errstate(over="ignore"):
        z = starts + (positions + np.uint64(1)) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    found: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def generator(seed: int, *parts: Any) -> np.random.Generator:
    """A numpy generator of its own for one thing that needs many draws, such as the making of a toy picture."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(stream(seed, *parts)))
