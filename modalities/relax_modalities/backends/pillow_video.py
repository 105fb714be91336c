"""Animations through Pillow: WebP and AVIF, which FFmpeg does not play, and GIF and PNG.

Shape legend: N frames.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relax_modalities.backends.pillow_image import pixels_of
from relax_modalities.decoder import Clip, Colour, Source, VideoBackend, broken, too_large

_FORMATS = ("WEBP", "AVIF", "GIF", "PNG")
_MANY = 100_000
"""Frames of one animation."""
_SHORTEST, _USUAL = 10, 100
"""Milliseconds: players show a frame that stays for 10 or less for 100, since old files say 0 and do not mean it."""


class PillowVideo(VideoBackend):
    @contextmanager
    def open(self, source: Source, max_pixels: int, background: Colour) -> Iterator[Clip]:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise too_large("video", source, image.width, image.height, max_pixels)
            if getattr(image, "n_frames", 1) < 2:
                raise broken("video", source, "pillow", "is a still image: give it as image")
            yield PillowClip(image, source, background)


class PillowClip(Clip):
    def __init__(self, image: Image.Image, source: Source, background: Colour) -> None:
        self._image, self._source, self._background = image, source, background
        self.width, self.height = image.size
        durations = [self._show(i).info.get("duration") or 0 for i in range(self._count())]
        milliseconds = [d if d > _SHORTEST else _USUAL for d in durations]
        ends_N = np.cumsum(np.array(milliseconds, np.float64)) / 1000
        self.starts_N = np.concatenate([[0.0], ends_N[:-1]])
        self.end = float(ends_N[-1])

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        for index in indices:
            yield pixels_of(self._show(index), self._background)

    def _count(self) -> int:
        count = int(getattr(self._image, "n_frames", 1))
        if count > _MANY:
            raise broken("video", self._source, "pillow", f"{count} frames; {_MANY} are allowed: cut it")
        return count

    def _show(self, index: int) -> Image.Image:
        try:
            self._image.seek(index)
            self._image.load()  # only now is its duration known
        except Exception as error:
            raise broken("video", self._source, "pillow", error) from error
        return self._image
