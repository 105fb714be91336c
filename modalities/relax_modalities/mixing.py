"""A sound put together from blocks of samples: mixed to mono as they come, so that memory follows the limits.

Shape legend: N samples, C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.decoder import Sound, Source, too_long

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_HIGHEST = 1_000_000
_FASTEST = 192_000
"""A faster sound may have no more samples than one of this rate that lasts max_seconds: memory is bounded by that."""


class Mixer:
    """Collects blocks of one sound. Raises DataError for one that is too long, or not made of finite numbers."""

    def __init__(self, source: Source, rate: int, max_seconds: float) -> None:
        if not 1 <= rate <= _HIGHEST:
            allowed = f"1 to {_HIGHEST} are allowed"
            raise DataError(f"audio {describe(source)}: {rate} samples per second; {allowed}: write its header again")
        self._source, self.rate = source, rate
        self._limit = max_seconds * min(rate, _FASTEST)
        self._parts: list[NDArray[np.float32]] = []
        self.length = 0

    def expect(self, length: int) -> None:
        """Refuse a sound that says in its header that it is too long, before anything is read."""
        if length > self._limit:
            raise too_long("audio", self._source, length / self.rate, self._limit / self.rate)

    def add(self, block_NC: NDArray[np.float32]) -> None:
        """The next samples, any number, full scale is [-1, 1]. The block belongs to the mixer from now on."""
        if not len(block_NC):
            return
        self.length += len(block_NC)
        self.expect(self.length)
        self._parts.append(_mean(block_NC))

    def sound(self) -> Sound:
        """All blocks. Raises DataError if there were none."""
        import numpy as np

        if not self._parts:
            raise DataError(f"audio {describe(self._source)}: holds no samples: write or download it again")
        mono_N = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        self._parts = []
        if not np.isfinite(mono_N).all():
            raise DataError(f"audio {describe(self._source)}: holds NaN or inf: write it again")
        return Sound(mono_N, self.rate)


def _mean(block_NC: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean of the channels, added in the order in which numpy (and so librosa) adds them: equal to the last bit."""
    import numpy as np

    channels = block_NC.shape[1]
    if channels == 1:
        return np.ascontiguousarray(block_NC[:, 0])
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is found and named in the end
        if channels >= 8:
            wide_N: NDArray[np.float32] = np.ascontiguousarray(block_NC).mean(axis=1)
            return wide_N
        mono_N = block_NC[:, 0] + block_NC[:, 1]
        for c in range(2, channels):
            mono_N += block_NC[:, c]
        mono_N /= np.float32(channels)
    return mono_N
