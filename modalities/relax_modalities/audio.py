"""Sounds: float32 (samples,), mono, at one rate (16 kHz unless configured). Dumped as WAV of the same floats.

Mixing to mono (mean of the channels) and resampling (soxr, HQ) happen here, once for all backends, and give what
``librosa.load(file, sr=rate)`` gives, bit for bit.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PositiveInt

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Modality
from relax_core.media import describe
from relax_core.types import Decoded, MediaKind
from relax_modalities.decoder import AudioBackend, Decoder, Sound, check_names
from relax_modalities.forms import looks_like
from relax_modalities.wav import wav_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Audio(Modality):
    """Decodes sounds, also the sound of a video file."""

    kind: ClassVar[MediaKind] = "audio"

    class Config(ComponentConfig):
        backends: Annotated[
            tuple[str, ...], Field(min_length=1), AfterValidator(lambda names: check_names("audio", names))
        ] = ("soundfile", "pyav")
        """Tried in this order. ``librosa`` can be added: it reads nothing more, and takes seconds at its first use."""
        rate: PositiveInt = 16_000
        """Samples per second after decoding: what the model's feature extractor expects."""
        max_seconds: Annotated[float, Field(gt=0)] = 1800.0
        """A longer sound is an error, and so is one with more samples than 192,000 a second would be."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._decoder: Decoder[AudioBackend] = Decoder("audio", config.backends)

    def recognizes(self, source: Path | bytes) -> bool:
        return looks_like(source, self.kind)

    def decode(self, source: Path | bytes) -> Decoded:
        import numpy as np

        sound = self._decoder.read(source, lambda backend: backend.read(source, self.config.max_seconds))
        samples_N = _resampled(sound, self.config.rate)
        if samples_N is not sound.mono_N and not np.isfinite(samples_N).all():
            raise DataError(f"audio {describe(source)}: its values are too large to be resampled: scale it to [-1, 1]")
        return Decoded("audio", samples_N, float(self.config.rate))

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        rate = decoded.rate
        if rate is None or rate != int(rate) or decoded.data.ndim != 1:
            raise DataError(f"audio: cannot be written as wav: rate {rate}, shape {decoded.data.shape}")
        return ".wav", wav_bytes(decoded.data, int(rate))

    def restore(self, content: bytes) -> Decoded:
        import soundfile

        try:
            samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
        except RuntimeError as error:
            raise DataError(f"audio: stored content cannot be restored: {error}") from error
        return Decoded("audio", samples, float(rate))


def _resampled(sound: Sound, rate: int) -> NDArray[np.float32]:
    """Float32 (N,) at ``rate``: N is the exact length, rounded up."""
    import numpy as np
    import soxr

    if sound.rate == rate:
        return sound.mono_N
    resampled_N: NDArray[np.float32] = soxr.resample(sound.mono_N, sound.rate, rate)
    length = -(-len(sound.mono_N) * rate // sound.rate)
    return np.pad(resampled_N[:length], (0, max(0, length - len(resampled_N))))
