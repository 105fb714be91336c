"""Transparent pictures in front of a background."""

from __future__ import annotations

from PIL import Image

from relax_modalities.decoder import Colour


def composited(picture: Image.Image, background: Colour) -> Image.Image:
    """An RGBA picture as RGB, with ``background`` where it is transparent."""
    if picture.getchannel("A").getextrema() == (255, 255):
        return picture.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", picture.size, (*background, 255)), picture).convert("RGB")
