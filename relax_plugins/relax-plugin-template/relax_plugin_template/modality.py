"""A modality: a decoder for one kind of medium."""

from __future__ import annotations

import re
from pathlib import Path

from relax_core.errors import DataError
from relax_core.interfaces import Modality
from relax_core.types import Decoded


class PortablePixmap(Modality):
    """Reads and writes binary PPM pictures (magic number P6, 8 bits a channel) with nothing but numpy."""

    kind = "image"

    def decode(self, source: Path | bytes) -> Decoded:
        import numpy as np

        name = "a picture given as bytes" if isinstance(source, bytes) else str(source)
        try:
            content = source if isinstance(source, bytes) else source.read_bytes()
        except OSError as error:
            raise DataError(f"{name}: {error.strerror}: check the path") from error
        head = re.match(rb"P6\s+(\d+)\s+(\d+)\s+255\s", content)
        if head is None:
            raise DataError(f"{name}: no binary PPM picture with 8 bits a channel: convert it, or use modality image")
        width, height = int(head[1]), int(head[2])
        pixels = content[head.end() :]
        if not len(pixels) == width * height * 3 > 0:
            raise DataError(f"{name}: {len(pixels)} bytes of pixels for {width} x {height}: write it again")
        return Decoded("image", np.frombuffer(pixels, np.uint8).reshape(height, width, 3))

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        height, width, _ = decoded.data.shape
        return ".ppm", b"P6\n%d %d\n255\n" % (width, height) + decoded.data.tobytes()

    def restore(self, content: bytes) -> Decoded:
        return self.decode(content)
