"""Images through Pillow: upright, 8-bit RGB, alpha composited; deeper modes are scaled, never clipped.

Values are taken as sRGB: colour profiles and gamma are not applied, as models' own processors do not apply them.

Shape legend: H height, W width.
"""

from __future__ import annotations

import io
import struct

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.backends.compositing import composited
from relax_modalities.decoder import Colour, ImageBackend, Source, broken, too_large

_FORMATS = (
    *("PNG", "JPEG", "WEBP", "GIF", "AVIF", "BMP", "DIB", "TIFF", "JPEG2000", "PPM"),
    *("ICO", "TGA", "QOI", "DDS", "PCX", "SGI", "XBM", "MSP"),
)
"""Pillow also knows formats that run other programs (EPS), or that it can only name."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its EXIF orientation."""

_BITS, _PHOTOMETRIC = 258, 262
"""TIFF tags. Photometric 0 means that 0 is white."""


class PillowImage(ImageBackend):
    def __init__(self) -> None:
        Image.init()
        self._formats = [name for name in _FORMATS if name in Image.OPEN]  # a build may lack some

    def read(self, source: Source, max_pixels: int, background: Colour) -> NDArray[np.uint8]:
        try:
            content = io.BytesIO(source) if isinstance(source, bytes) else source
            image = Image.open(content, formats=self._formats)
        except Image.DecompressionBombError as error:
            limit = f"max_pixels allows {max_pixels}: scale it down"
            raise DataError(f"image {describe(source)}: {error}; {limit}") from error
        with image:
            for width, height in _sizes(image):
                if width * height > max_pixels:
                    raise too_large("image", source, width, height, max_pixels)
                if not width * height:
                    raise broken("image", source, "pillow", f"{width}x{height} pixels: nothing to see")
            try:
                stored = [str(tile[3]) for tile in getattr(image, "tile", ())]  # forgotten by load()
                image.load()  # open() only reads the header: a truncated file shows here
                _adjust_transparency(image, stored[0] if stored else "")
                return pixels_of(_upright(image), background)
            except Exception as error:
                raise broken("image", source, "pillow", error) from error


def _sizes(image: Image.Image) -> list[tuple[int, int]]:
    """The size as the header says, and as the picture inside an icon says of itself."""
    sizes = [image.size]
    icon = getattr(image, "ico", None)
    if icon is not None and image.fp is not None:  # type: ignore[attr-defined]
        image.fp.seek(icon.entry[icon.getentryindex(image.size)].offset)  # type: ignore[attr-defined]
        head = image.fp.read(24).ljust(24, b"\0")  # type: ignore[attr-defined]
        sizes.append(struct.unpack(">16xII", head) if head.startswith(b"\x89PNG") else struct.unpack("<4xII12x", head))
    return sizes


def _adjust_transparency(image: Image.Image, stored: str) -> None:
    """PNG names the transparent colour in the bits that are ``stored``; Pillow compares it with 8 bits."""
    if isinstance(colour := image.info.get("transparency"), int):
        image.info["transparency"] = colour * {"L;2": 85, "L;4": 17}.get(stored, 1)
    elif colour is not None and stored.startswith("RGB;16"):
        raise ValueError("one of its 16-bit colours is transparent, which 8 bits do not tell: save alpha")


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # Pillow raises whatever its parser stumbles on; broken notes beside a picture do not break it
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def pixels_of(image: Image.Image, background: Colour) -> NDArray[np.uint8]:
    """RGB uint8 (H, W, 3) of an image in any of Pillow's modes. Raises ValueError where the scale is not known."""
    if image.mode.startswith("I") or image.mode == "F":
        return _deep(image, background)
    if image.mode == "La":
        image = image.convert("LA")  # the one mode without a direct way to RGBA
    if image.has_transparency_data:
        image = composited(image.convert("RGBA"), background)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _deep(image: Image.Image, background: Colour) -> NDArray[np.uint8]:
    """Grey images of modes that Pillow's own conversion to 8 bits would clip at 255."""
    values_HW = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS, (16,))[0]
    top = 1.0 if image.mode == "F" else float((1 << min(bits, 16)) - 1)  # mode I is how some 16-bit files open
    if not np.isfinite(values_HW).all():
        raise ValueError("holds NaN or inf")
    low, high = float(values_HW.min()), float(values_HW.max())
    if low < 0 or high > top:
        values = f"mode {image.mode} with values from {low:g} to {high:g}"
        raise ValueError(f"{values}: 0 to {top:g} are allowed; save as 8-bit")
    levels_HW = np.rint(values_HW.astype(np.float32) * np.float32(255.0 / top)).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == 0:
        levels_HW = 255 - levels_HW
    pixels_HW3 = np.repeat(levels_HW[:, :, None], 3, axis=2)
    if (hidden := image.info.get("transparency")) is not None:
        pixels_HW3[values_HW == hidden] = background
    return pixels_HW3
