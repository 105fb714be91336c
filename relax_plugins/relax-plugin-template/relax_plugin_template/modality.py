"""A modality: a decoder for one kind of medium."""

from __future__ import annotations

from pathlib import Path

from relax_core.errors import DataError
from relax_core.interfaces import Modality
from relax_core.types import Decoded


class PortablePixmap(Modality):
    """Reads and writes binary PPM pictures (magic number P6, 8 bits a channel) with nothing but numpy."""

    kind = "image"

    def decode(self, source: Path | bytes) -> Decoded:
        import numpy as np

        content = source if isinstance(source, bytes) else source.read_bytes()
        name = "a picture given as bytes" if isinstance(source, bytes) else str(source)
        fields = content.split(maxsplit=4)
        if len(fields) < 5 or fields[0] != b"P6" or fields[3] != b"255":
            raise DataError(f"{name}: no binary PPM picture with 8 bits a channel: convert it, or use modality image")
        width, height = int(fields[1]), int(fields[2])
        pixels = content[len(content) - width * height * 3 :]
        return Decoded("image", np.frombuffer(pixels, np.uint8).reshape(height, width, 3))

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        height, width, _ = decoded.data.shape
        return ".ppm", b"P6\n%d %d\n255\n" % (width, height) + decoded.data.tobytes()

    def restore(self, content: bytes) -> Decoded:
        return self.decode(content)
