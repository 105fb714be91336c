"""Images: RGB uint8 (H, W, 3), upright, alpha composited on a background. Dumped as PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Modality
from relax_core.types import Decoded, MediaKind
from relax_modalities.decoder import Byte, Decoder, ImageBackend, check_names
from relax_modalities.forms import looks_like


class Image(Modality):
    """Decodes still images. An animation gives its first frame."""

    kind: ClassVar[MediaKind] = "image"

    class Config(ComponentConfig):
        backends: Annotated[
            tuple[str, ...], Field(min_length=1), AfterValidator(lambda names: check_names("image", names))
        ] = ("pillow",)
        """Tried in this order."""
        max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 67_108_864
        """An image with more is an error, before it is unpacked. Its adapter scales it to what the model takes."""
        background: tuple[Byte, Byte, Byte] = (255, 255, 255)
        """Red, green and blue behind transparent pixels."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._decoder: Decoder[ImageBackend] = Decoder("image", config.backends)

    def recognizes(self, source: Path | bytes) -> bool:
        return looks_like(source, self.kind)

    def decode(self, source: Path | bytes) -> Decoded:
        config = self.config
        return Decoded(
            "image", self._decoder.read(source, lambda b: b.read(source, config.max_pixels, config.background))
        )

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        from PIL import Image as Pillow

        content = io.BytesIO()
        Pillow.fromarray(decoded.data).save(content, "PNG", compress_level=1)
        return ".png", content.getvalue()

    def restore(self, content: bytes) -> Decoded:
        import numpy as np
        from PIL import Image as Pillow

        try:
            return Decoded("image", np.asarray(Pillow.open(io.BytesIO(content)).convert("RGB")))
        except OSError as error:
            raise DataError(f"image: stored content cannot be restored: {error}") from error
