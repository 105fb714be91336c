"""Images: upright, composited, scaled and never clipped; limits; dumps that restore exactly."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from pydantic import ValidationError

from relax_core.errors import DataError
from relax_core.types import Decoded
from relax_modalities.image import Image


def decode(source: Path | bytes, **settings: Any) -> np.ndarray:
    return Image(Image.Config(**settings)).decode(source).data


def encoded(image: Pillow.Image, form: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def of_mode(mode: str, colour: Any, size: tuple[int, int] = (4, 3)) -> Pillow.Image:
    image = Pillow.new(mode, size, colour)
    if mode in ("P", "PA"):
        image.putpalette([level * 10 for level in range(12)])
    return image


def test_orientation_6_comes_out_upright() -> None:
    pixels = np.zeros((100, 200, 3), np.uint8)
    pixels[:, :100] = (250, 0, 0)  # the left half as stored is the top half as seen
    exif = Pillow.Exif()
    exif[0x0112] = 6
    found = decode(encoded(Pillow.fromarray(pixels), "JPEG", exif=exif, quality=95))
    assert found.shape == (200, 100, 3)
    assert found[:90, :, 0].min() > 200 and found[110:, :, 0].max() < 50


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (of_mode("RGBA", (10, 20, 30, 0)), {}),
        (of_mode("LA", (10, 0)), {}),
        (of_mode("L", 7), {"transparency": 7}),
        (of_mode("RGB", (7, 8, 9)), {"transparency": (7, 8, 9)}),
        (of_mode("P", 3), {"transparency": 3}),
        (of_mode("P", 3), {"transparency": bytes([255, 255, 255, 0])}),
    ],
    ids=["RGBA", "LA", "L-tRNS", "RGB-tRNS", "P-tRNS", "P-alphas"],
)
def test_hidden_colours_stay_hidden(image: Pillow.Image, options: Any) -> None:
    assert (decode(encoded(image, **options)) == 255).all()
    assert (decode(encoded(image, **options), background=(1, 2, 3)) == (1, 2, 3)).all()


def test_half_transparent_is_mixed() -> None:
    found = decode(encoded(of_mode("RGBA", (0, 100, 200, 128))))
    np.testing.assert_allclose(found[0, 0], [127, 177, 227], atol=1)


def test_palette_with_alpha(tmp_path: Path) -> None:
    of_mode("PA", (3, 0)).save(tmp_path / "pa.tiff")
    with Pillow.open(tmp_path / "pa.tiff") as written:
        assert written.mode == "PA"
    assert (decode(tmp_path / "pa.tiff") == 255).all()


@pytest.mark.parametrize(("value", "grey"), [(0, 0), (128, 0), (129, 1), (256, 1), (40000, 156), (65535, 255)])
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bits_are_scaled(value: int, grey: int, form: str) -> None:
    found = decode(encoded(Pillow.fromarray(np.full((2, 3), value, np.uint16)), form))
    assert found.shape == (2, 3, 3) and (found == grey).all()


def test_big_endian_and_32_bit_greys() -> None:
    assert (decode(encoded(Pillow.fromarray(np.full((2, 2), 40000, ">u2")), "TIFF")) == 156).all()
    assert (decode(encoded(Pillow.fromarray(np.full((2, 2), 40000, np.int32)), "TIFF")) == 156).all()
    with pytest.raises(DataError, match="mode I with values from 70000 to 70000: 0 to 65535"):
        decode(encoded(Pillow.fromarray(np.full((2, 2), 70000, np.int32)), "TIFF"))


def test_floats_are_scaled() -> None:
    values = np.array([[0.0, 0.25], [0.5, 1.0]], np.float32)
    assert decode(encoded(Pillow.fromarray(values), "TIFF"))[:, :, 0].tolist() == [[0, 64], [128, 255]]
    with pytest.raises(DataError, match="from 0 to 200: 0 to 1 are allowed"):
        decode(encoded(Pillow.fromarray(values * 200), "TIFF"))
    with pytest.raises(DataError, match="NaN"):
        decode(encoded(Pillow.fromarray(values * np.nan), "TIFF"))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB"])
def test_other_colour_spaces_become_rgb(mode: str) -> None:
    image = of_mode("RGB", (120, 130, 90)).convert(mode)
    found = decode(encoded(image, "TIFF"))
    np.testing.assert_allclose(found[0, 0], [120, 130, 90], atol=3)


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_shallow_modes(mode: str) -> None:
    assert (decode(encoded(of_mode("L", 255).convert(mode))) == 255).all()


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (257, 27), (2276, 10)])
def test_odd_sizes_are_kept(size: tuple[int, int]) -> None:
    assert decode(encoded(of_mode("RGB", (9, 8, 7), size))).shape == (size[1], size[0], 3)


def test_truncated(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for form in ("PNG", "JPEG"):
        path = tmp_path / f"cut.{form.lower()}"
        content = encoded(Pillow.fromarray(noise), form)
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=rf"image .*cut\.{form.lower()}: pillow: OSError: .*truncated"):
            decode(path)


def test_too_many_pixels_is_an_error_before_they_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Pillow.new("1", (9000, 9000)).save(path)
    with pytest.raises(DataError, match=r"bomb\.png: 9000x9000 pixels; max_pixels allows 67108864"):
        decode(path)
    with pytest.raises(DataError, match="max_pixels allows 11"):
        decode(encoded(of_mode("RGB", 0)), max_pixels=11)
    assert decode(encoded(of_mode("RGB", 0)), max_pixels=12).shape == (3, 4, 3)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [of_mode("RGB", (200, 0, 0)), of_mode("RGB", (0, 200, 0))]
    found = decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found[0, 0, 0] > 150 > found[0, 0, 1]


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("HSV", (0, 255, 255), (255, 0, 0)),
        ("RGBX", (1, 2, 3, 0), (1, 2, 3)),
        ("RGBa", (100, 0, 0, 128), (227, 127, 127)),  # the colour is multiplied by its alpha already
        ("RGBa", (0, 0, 0, 0), (255, 255, 255)),
        ("La", (0, 0), (255, 255, 255)),
        ("La", (100, 255), (100, 100, 100)),
        ("PA", (3, 0), (255, 255, 255)),
        ("I;16L", 40000, (156, 156, 156)),
        ("I;16B", 40000, (156, 156, 156)),
        ("I", 65535, (255, 255, 255)),
        ("F", 0.5, (128, 128, 128)),
    ],
)
def test_modes_that_no_file_has(mode: str, colour: Any, expected: tuple[int, int, int]) -> None:
    from relax_modalities.backends.pillow_image import pixels_of

    found = pixels_of(of_mode(mode, colour), (255, 255, 255))
    assert found.shape == (3, 4, 3) and found.dtype == np.uint8
    assert np.abs(found.astype(int) - expected).max() <= 1, found[0, 0]


def test_metadata_decides_nothing_but_the_orientation() -> None:
    """Colour profiles and gamma are not applied, as the processors of models do not apply them."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add(b"gAMA", (100_000).to_bytes(4, "big"))
    picture = of_mode("RGB", (100, 150, 200))
    expected = decode(encoded(picture))
    np.testing.assert_array_equal(decode(encoded(picture, pnginfo=info)), expected)
    np.testing.assert_array_equal(decode(encoded(picture, icc_profile=b"no profile at all")), expected)


def test_what_runs_other_programs_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has Ghostscript draw an EPS file."""
    ran = tmp_path / "ran"
    script = tmp_path / "gs"
    script.write_text(f"#!/bin/sh\ntouch {ran}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DataError, match="it is a PostScript file, convert it to PNG or JPEG"):
        decode(encoded(of_mode("RGB", 0), "EPS"))
    assert not ran.exists()


def test_errors_say_the_same_each_time(tmp_path: Path) -> None:
    """Texts of libraries hold addresses in memory."""
    texts = set()
    for _ in range(3):
        with pytest.raises(DataError) as error:
            decode(b"no image " * 100)
        texts.add(str(error.value))
    assert texts == {
        "image 900 bytes: no backend can read it (pillow: UnidentifiedImageError: cannot identify image file)"
    }


def test_dump_restores_exactly() -> None:
    image = Image(Image.Config())
    decoded = Decoded("image", np.random.default_rng(1).integers(0, 256, (7, 13, 3), dtype=np.uint8))
    suffix, content = image.dump(decoded)
    assert suffix == ".png" and content.startswith(b"\x89PNG")
    assert image.restore(content).hash == decoded.hash == image.decode(content).hash
    with pytest.raises(DataError, match="cannot be restored"):
        image.restore(content[:50])


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValidationError, match=r"image backend 'pilow'; did you mean 'pillow'\?; known are pillow"):
        Image.Config(backends=("pilow",))
    with pytest.raises(ValidationError):
        Image.Config(backends=())


def test_a_backend_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_backend.py").write_text(
        "import numpy as np\n"
        "from relax_modalities.decoder import ImageBackend\n"
        "class Red(ImageBackend):\n"
        "    def read(self, source, max_pixels, background):\n"
        "        return np.full((2, 2, 3), (255, 0, 0), np.uint8)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert decode(b"anything", backends=("pillow", "my_backend:Red"))[0, 0].tolist() == [255, 0, 0]
    with pytest.raises(DataError, match=r"no_such_module:Thing: cannot be imported"):
        decode(b"anything", backends=("no_such_module:Thing",))
