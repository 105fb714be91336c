"""Images that are decoded: orientations, modes, depths, formats, animations, sizes.

Shape legend: H height, W width.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from relax_core.testing.media_cases import raw
from relax_core.testing.media_cases.case import Case, Check, Write
from relax_core.types import Decoded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

BACKGROUND = (255, 255, 255)
LOSSLESS, LOSSY = 0, 14
"""Tolerances of a value, on average over the picture for LOSSY."""

LETTER = ("#......", "#......", "#####..", "#......", "#######")
"""A picture that looks different in each of its eight orientations."""

_TURNS = (
    None,
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_90",
    "TRANSVERSE",
    "ROTATE_270",
)
"""How an upright picture is stored under EXIF orientations 1 to 8."""


def letter(scale: int = 8) -> Image.Image:
    """The letter, dark on light, 7 x 5 squares."""
    import numpy as np
    from PIL import Image

    dark_HW = np.array([[mark == "#" for mark in line] for line in LETTER]).repeat(scale, 0).repeat(scale, 1)
    return Image.fromarray(np.where(dark_HW[:, :, None], (20, 40, 160), (240, 230, 200)).astype(np.uint8))


def equals(expected_HW3: NDArray[np.uint8], tolerance: float = LOSSLESS) -> Check:
    """A check for these very pixels; with a tolerance, on average."""
    import numpy as np

    def check(decoded: Decoded) -> None:
        assert decoded.data.shape == expected_HW3.shape, f"{decoded.data.shape}, not {expected_HW3.shape}"
        error = np.abs(decoded.data.astype(int) - expected_HW3)
        found = error.mean() if tolerance else error.max()
        assert found <= tolerance, f"pixels are {found} off; {tolerance} are allowed"

    return check


def colour(expected: tuple[int, int, int], size: tuple[int, int] | None = None, tolerance: int = 1) -> Check:
    """A check for a picture of one colour. ``size``: (H, W)."""
    import numpy as np

    def check(decoded: Decoded) -> None:
        assert size is None or decoded.data.shape == (*size, 3), f"{decoded.data.shape}, not {size}"
        assert np.abs(decoded.data.astype(int) - expected).max() <= tolerance, f"{decoded.data[0, 0]}, not {expected}"

    return check


def saved(picture: Callable[[], Image.Image], form: str, **options: Any) -> Write:
    return lambda path: picture().save(path, form, **options)


def content(make: Callable[[], bytes]) -> Write:
    return lambda path: path.write_bytes(make())


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:
    target = io.BytesIO()
    picture.save(target, form, **options)
    return target.getvalue()


def plain(mode: str, value: Any, size: tuple[int, int] = (6, 4)) -> Callable[[], Image.Image]:
    """A picture of one colour; palettes hold greys of ten times their index."""
    from PIL import Image

    def make() -> Image.Image:
        picture = Image.new(mode, size, value)
        if mode in ("P", "PA"):
            picture.putpalette([level // 3 * 10 for level in range(75)])
        return picture

    return make


def cases() -> Iterator[Case]:
    for part in (_orientations, _modes, _depths, _forms, _animations, _sizes):
        yield from part()


def _orientations() -> Iterator[Case]:
    import numpy as np
    from PIL import Image

    upright = np.asarray(letter())
    for form, tolerance in (("JPEG", LOSSY), ("PNG", LOSSLESS), ("WEBP", LOSSY), ("TIFF", LOSSLESS)):
        for orientation, turn in enumerate(_TURNS, 1):

            def stored(turn: str | None = turn) -> Image.Image:
                return letter().transpose(Image.Transpose[turn]) if turn else letter()

            exif = Image.Exif()
            exif[0x0112] = orientation
            name = f"orientation-{orientation}.{form.lower()}"
            yield Case("image", name, saved(stored, form, exif=exif), equals(upright, tolerance))
    for name, exif_bytes in (
        ("garbage", b"Exif\0\0garbage"),
        ("cut", b"Exif\0\0II*\0"),
        ("far", b"Exif\0\0II*\0\xff\xff\xff\xff"),
        ("nine", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09\0\0\0\0\0\0\0"),
    ):
        for form, tolerance in (("JPEG", LOSSY), ("PNG", LOSSLESS)):
            write = saved(letter, form, exif=exif_bytes)
            yield Case("image", f"exif-{name}.{form.lower()}", write, equals(upright, tolerance))


def _modes() -> Iterator[Case]:
    made: list[tuple[str, Any, str, tuple[int, int, int], dict[str, Any]]] = [
        ("1", 1, "PNG", (255, 255, 255), {}),
        ("L", 77, "PNG", (77, 77, 77), {}),
        ("L", 77, "PNG", BACKGROUND, {"transparency": 77}),
        ("LA", (77, 255), "PNG", (77, 77, 77), {}),
        ("LA", (77, 0), "PNG", BACKGROUND, {}),
        ("P", 7, "PNG", (70, 70, 70), {}),
        ("P", 7, "GIF", (70, 70, 70), {}),
        ("P", 7, "PNG", BACKGROUND, {"transparency": 7}),
        ("P", 7, "GIF", BACKGROUND, {"transparency": 7}),
        ("P", 3, "PNG", BACKGROUND, {"transparency": bytes([255, 255, 255, 0])}),
        ("P", 2, "PNG", (20, 20, 20), {"transparency": bytes([255, 255, 255, 0])}),
        ("PA", (7, 255), "TIFF", (70, 70, 70), {}),
        ("PA", (7, 0), "TIFF", BACKGROUND, {}),
        ("RGB", (1, 2, 3), "PNG", (1, 2, 3), {}),
        ("RGB", (1, 2, 3), "PNG", BACKGROUND, {"transparency": (1, 2, 3)}),
        ("RGBA", (10, 20, 30, 0), "PNG", BACKGROUND, {}),
        ("RGBA", (0, 100, 200, 128), "PNG", (127, 177, 227), {}),
        ("RGBA", (10, 20, 30, 0), "WEBP", BACKGROUND, {"lossless": True, "exact": True}),
        ("RGBA", (10, 20, 30, 0), "TIFF", BACKGROUND, {}),
        ("RGBA", (10, 20, 30, 0), "TGA", BACKGROUND, {}),
        ("RGBA", (10, 20, 30, 0), "AVIF", BACKGROUND, {}),
        ("RGBX", (1, 2, 3, 0), "TIFF", (1, 2, 3), {}),
        ("CMYK", (55, 155, 205, 0), "TIFF", (200, 100, 50), {}),
        ("CMYK", (55, 155, 205, 0), "JPEG", (200, 100, 50), {"quality": 95}),
        ("YCbCr", (124, 86, 182), "TIFF", (200, 100, 49), {}),
        ("YCbCr", (124, 86, 182), "JPEG", (200, 100, 49), {"quality": 95}),
        ("LAB", (128, 128, 128), "TIFF", (119, 119, 119), {}),
    ]
    for number, (mode, value, form, expected, options) in enumerate(made):
        name = f"mode-{mode}-{number}.{form.lower()}"
        lossy = 4 if form in ("JPEG", "AVIF", "LAB") else 1
        yield Case("image", name, saved(plain(mode, value), form, **options), colour(expected, (4, 6), lossy))


def _depths() -> Iterator[Case]:
    import numpy as np
    from PIL import Image

    def grey(values: Any, kind: str) -> Callable[[], Image.Image]:
        return lambda: Image.fromarray(np.full((2, 3), values, kind))

    for value, level in ((0, 0), (128, 0), (129, 1), (256, 1), (40000, 156), (65535, 255)):
        for kind, form in (("<u2", "PNG"), ("<u2", "TIFF"), (">u2", "TIFF"), ("i4", "TIFF")):
            name = f"deep-{value}-{kind.replace('<', 'l').replace('>', 'b')}.{form.lower()}"
            yield Case("image", name, saved(grey(value, kind), form), colour((level,) * 3, (2, 3), 0))
    for number, level in ((0.0, 0), (0.25, 64), (0.5, 128), (1.0, 255)):
        yield Case("image", f"float-{number}.tiff", saved(grey(number, "f4"), "TIFF"), colour((level,) * 3, (2, 3), 0))
    bytes_of: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
        "rgb16.png": (partial(raw.png16, 2, (40000, 128, 65535)), (156, 0, 255)),
        "la16.png": (partial(raw.png16, 4, (40000, 65535)), (156, 156, 156)),
        "la16-clear.png": (partial(raw.png16, 4, (40000, 0)), BACKGROUND),
        "rgba16.png": (partial(raw.png16, 6, (40000, 0, 65535, 65535)), (156, 0, 255)),
        "rgba16-clear.png": (partial(raw.png16, 6, (40000, 0, 65535, 0)), BACKGROUND),
        "l16-clear.png": (partial(raw.png16, 0, (40000,), raw.png_chunk(b"tRNS", b"\x9c\x40")), BACKGROUND),
        "l16-not-clear.png": (partial(raw.png16, 0, (40000,), raw.png_chunk(b"tRNS", b"\x9c\x41")), (156,) * 3),
        "12-bit.tiff": (partial(raw.tiff, 2, 12, 1, b"\x80\x08\x00"), (128, 128, 128)),
        "white-is-0.tiff": (partial(raw.tiff, 1, 16, 0, b"\x40\x9c"), (99, 99, 99)),
        "8-bit-white-is-0.tiff": (partial(raw.tiff, 1, 8, 0, b"\xff"), (0, 0, 0)),
        "pgm16.pgm": (lambda: b"P5 1 1 65535\n\x9c\x40", (156, 156, 156)),
        "pgm-1000.pgm": (lambda: b"P5 1 1 1000\n\x01\xf4", (128, 128, 128)),
    }
    for bits, shades in ((1, 1), (2, 3), (4, 15), (8, 255)):
        level = 255 // shades * (shades // 2)
        bytes_of[f"grey-{bits}-clear.png"] = (partial(raw.png_grey, bits, shades // 2, shades // 2), BACKGROUND)
        bytes_of[f"grey-{bits}.png"] = (partial(raw.png_grey, bits, shades // 2, shades), (level, level, level))
    for name, (make, expected) in bytes_of.items():
        yield Case("image", name, content(make), colour(expected))


def _forms() -> Iterator[Case]:
    import numpy as np

    upright = np.asarray(letter())
    for suffix, form, tolerance, options in (
        ("bmp", "BMP", 0, {}),
        ("ppm", "PPM", 0, {}),
        ("tga", "TGA", 0, {}),
        ("rle.tga", "TGA", 0, {"compression": "tga_rle"}),
        ("qoi", "QOI", 0, {}),
        ("pcx", "PCX", 0, {}),
        ("sgi", "SGI", 0, {}),
        ("dds", "DDS", 0, {}),
        ("jp2", "JPEG2000", 0, {}),
        ("avif", "AVIF", LOSSY, {}),
        ("lossless.webp", "WEBP", 0, {"lossless": True}),
        ("progressive.jpg", "JPEG", LOSSY, {"progressive": True}),
        ("444.jpg", "JPEG", LOSSY, {"subsampling": 0}),
        ("lzw.tiff", "TIFF", 0, {"compression": "tiff_lzw"}),
        ("deflate.tiff", "TIFF", 0, {"compression": "tiff_adobe_deflate"}),
        ("jpeg.tiff", "TIFF", LOSSY, {"compression": "jpeg"}),
    ):
        yield Case("image", f"form.{suffix}", saved(letter, form, **options), equals(upright, tolerance))

    def square() -> Image.Image:
        return letter().resize((32, 32), 0)

    for name, options in (("png.ico", {}), ("bmp.ico", {"bitmap_format": "bmp"})):
        yield Case("image", name, saved(square, "ICO", sizes=[(32, 32)], **options), equals(np.asarray(square())))
    yield Case("image", "jpeg-called.png", saved(letter, "JPEG"), equals(upright, LOSSY))
    yield Case("image", "png-called.mp4", saved(letter, "PNG"), equals(upright))


def _animations() -> Iterator[Case]:
    for form, options in (
        ("GIF", {}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
    ):
        more = [plain("RGB", (0, 200, 0))()]
        write = saved(plain("RGB", (200, 0, 0)), form, save_all=True, append_images=more, **options)
        yield Case("image", f"animated.{form.lower()}", write, colour((200, 0, 0), (4, 6)))
    clear = [plain("P", 2)()]
    write = saved(plain("P", 1), "GIF", save_all=True, append_images=clear, transparency=1)
    yield Case("image", "animated-clear.gif", write, colour(BACKGROUND, (4, 6)))


def _sizes() -> Iterator[Case]:
    for width, height in ((1, 1), (1, 500), (500, 1), (16, 16), (257, 27), (2276, 10), (63, 129)):
        for form, tolerance in (("PNG", 0), ("JPEG", 4)):
            write = saved(plain("RGB", (200, 100, 50), (width, height)), form)
            name = f"size-{width}x{height}.{form.lower()}"
            yield Case("image", name, write, colour((200, 100, 50), (height, width), tolerance))
