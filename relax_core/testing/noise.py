"""Media of noise, decoded already: what tests of model adapters give to them."""

from __future__ import annotations

from relax_core.types import Audio, Decoded, Image, Video


def picture(height: int = 64, width: int = 64, seed: int = 0) -> Image:
    """An image of so many pixels."""
    import numpy as np

    return Image(Decoded("image", np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)))


def sound(samples: int = 8000, rate: float = 16000.0, seed: int = 0) -> Audio:
    """Mono sound, half a second of it if nothing else is said."""
    import numpy as np

    wave = 0.1 * np.random.default_rng(seed).standard_normal(samples)
    return Audio(Decoded("audio", wave.astype(np.float32), rate))


def film(frames: int = 4, rate: float = 2.0, size: tuple[int, int] = (64, 64), seed: int = 0) -> Video:
    """A video of so many frames, ``rate`` of them a second."""
    import numpy as np

    return Video(Decoded("video", np.random.default_rng(seed).integers(0, 256, (frames, *size, 3), np.uint8), rate))
