"""Images through Pillow: upright, 8-bit RGB, alpha composited; deeper modes are scaled, never clipped."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.decoder import ImageBackend, Source, reason_of, too_large


class PillowImage(ImageBackend):
    def read(self, source: Source, max_pixels: int, background: tuple[int, int, int]) -> NDArray[np.uint8]:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise too_large("image", source, width, height, max_pixels)
            if not width * height:
                raise DataError(f"image {describe(source)}: {width}x{height} pixels: nothing to see")
            try:
                image.load()  # open() only reads the header: a truncated file shows here
                return _pixels(ImageOps.exif_transpose(image), background)
            except Exception as error:
                raise DataError(f"image {describe(source)}: pillow: {reason_of(error)}") from error


def _pixels(image: Image.Image, background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """RGB uint8 (H, W, 3) of an image in any of Pillow's modes. Raises ValueError where the scale is not known."""
    if image.mode.startswith("I") or image.mode == "F":
        grey_HW = _deep_grey(np.asarray(image), image.mode)
        return np.repeat(grey_HW[:, :, None], 3, axis=2)
    if image.mode == "La":
        image = image.convert("LA")  # the one mode without a direct way to RGBA
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, (*background, 255)), over)
    return np.asarray(image.convert("RGB"))


def _deep_grey(values_HW: NDArray[np.generic], mode: str) -> NDArray[np.uint8]:
    """Grey values of modes that Pillow's own conversion to 8 bits would clip at 255."""
    values = values_HW.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("holds NaN or inf")
    low, high = float(values.min()), float(values.max())
    top = 1.0 if mode == "F" else 65535.0  # mode I is how some 16-bit files open
    if low < 0 or high > top:
        raise ValueError(f"mode {mode} with values from {low:g} to {high:g}: 0 to {top:g} are allowed; save as 8-bit")
    return np.rint(values * (255.0 / top)).astype(np.uint8)
