"""Videos: RGB uint8 (frames, H, W, 3), evenly spaced in time, at a known rate. Dumped as animated PNG.

Which frames are taken depends on timestamps alone, never on frame numbers, so variable frame rates come out right and
every backend takes the same ones. The sound of a video is a medium of its own: give the same file as audio.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PositiveInt

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Modality
from relax_core.types import Decoded, MediaKind
from relax_modalities.decoder import Decoder, Source, VideoBackend, check_names, too_large

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.config.schema import RunConfig

_TEXT = "relax"
"""The PNG text chunk with what PNG itself cannot hold exactly: the rate, and how often each frame repeats."""


class Video(Modality):
    """Decodes videos into frames at a target rate."""

    kind: ClassVar[MediaKind] = "video"

    class Config(ComponentConfig):
        backends: Annotated[
            tuple[str, ...], Field(min_length=1), AfterValidator(lambda names: check_names("video", names))
        ] = ("decord", "pyav")
        """Tried in this order."""
        fps: Annotated[float, Field(gt=0)] = 2.0
        """Frames taken per second of video."""
        max_frames: PositiveInt = 256
        """A video that would give more is sampled at a lower rate, over its whole length."""
        frame_pixels: PositiveInt = 401_408
        """Larger frames are scaled down to at most this many pixels, in proportion."""
        max_pixels: Annotated[int, Field(gt=0)] = 67_108_864
        """A video with larger frames is an error."""

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        return decord_conflict()

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._decoder: Decoder[VideoBackend] = Decoder("video", config.backends)

    def decode(self, source: Path | bytes) -> Decoded:
        frames, rate = self._decoder.read(source, lambda backend: self._frames(backend, source))
        return Decoded("video", frames, rate)

    def _frames(self, backend: VideoBackend, source: Source) -> tuple[NDArray[np.uint8], float]:
        import numpy as np

        config = self.config
        with backend.open(source) as clip:
            if clip.width * clip.height > config.max_pixels:
                raise too_large("video", source, clip.width, clip.height, config.max_pixels)
            indices, rate = choose(clip.starts_N, clip.end, config.fps, config.max_frames)
            size = fitting(clip.height, clip.width, config.frame_pixels)
            return np.stack([_resized(frame, size) for frame in clip.frames(indices)]), rate

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        from PIL import Image as Pillow
        from PIL.PngImagePlugin import PngInfo

        # Pillow's writer drops a frame that equals the one before: write each run of equal ones once, and its length.
        kept, runs = _runs(decoded.data)
        rate = decoded.rate or 1.0
        info = PngInfo()
        info.add_text(_TEXT, json.dumps({"rate": decoded.rate, "runs": runs}))
        first, *others = [Pillow.fromarray(decoded.data[i]) for i in kept]
        content = io.BytesIO()
        first.save(
            content,
            "PNG",
            save_all=True,
            append_images=others,
            duration=[1000 * run / rate for run in runs],
            loop=0,
            pnginfo=info,
            compress_level=1,
        )
        return ".png", content.getvalue()

    def restore(self, content: bytes) -> Decoded:
        import numpy as np
        from PIL import Image as Pillow
        from PIL import ImageSequence

        try:
            image = Pillow.open(io.BytesIO(content))
            frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
            extra = json.loads(image.text[_TEXT])  # type: ignore[attr-defined]
            return Decoded("video", np.repeat(np.stack(frames), extra["runs"], axis=0), extra["rate"])
        except (OSError, KeyError, AttributeError, ValueError) as error:
            raise DataError(f"video: stored content cannot be restored: {type(error).__name__}: {error}") from error


# --- what is taken ------------------------------------------------------


def choose(starts_N: NDArray[np.float64], end: float, fps: float, max_frames: int) -> tuple[list[int], float]:
    """Indices of the frames that show every 1/fps seconds from the first on, and the rate that they have.

    Never more than the video has, nor than ``max_frames``: then they are spread evenly over its whole length. A frame
    that stays longer than a step is taken more than once.
    """
    import numpy as np

    duration = max(end - float(starts_N[0]), 1e-6)
    step = 1.0 / fps
    count = max(1, math.ceil(duration / step - 1e-6))
    limit = min(max_frames, len(starts_N))
    if count > limit:
        count, step = limit, duration / limit
    times = starts_N[0] + np.arange(count) * step
    indices = np.searchsorted(starts_N, times + 1e-6, side="right") - 1
    return indices.tolist(), 1.0 / step


def fitting(height: int, width: int, limit: int) -> tuple[int, int]:
    """Height and width in the same proportion with at most ``limit`` pixels."""
    if height * width <= limit:
        return height, width
    scale = math.sqrt(limit / (height * width))
    height = min(max(1, math.floor(height * scale)), limit)
    return height, min(max(1, math.floor(width * scale)), limit // height)


def _resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    if frame.shape[:2] == size:
        return frame
    import numpy as np
    from PIL import Image as Pillow

    image = Pillow.fromarray(np.ascontiguousarray(frame))
    return np.asarray(image.resize(size[::-1], Pillow.Resampling.BICUBIC))


def _runs(frames: NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """Where each run of equal frames begins, and how long it is."""
    kept, runs = [0], [1]
    for i in range(1, len(frames)):
        if (frames[i] == frames[i - 1]).all():
            runs[-1] += 1
        else:
            kept.append(i)
            runs.append(1)
    return kept, runs


def decord_conflict() -> list[str]:
    """One line when both distributions of the decord module are installed: one has overwritten the other's files."""
    found = []
    for name in ("decord", "decord2"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if len(found) < 2:
        return []
    return [
        f"modalities.video: {' and '.join(found)} are both installed and overwrite each other; "
        "keep one: pip uninstall decord decord2, then pip install decord2"
    ]
