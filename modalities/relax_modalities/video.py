"""Videos: RGB uint8 (frames, H, W, 3), evenly spaced in time, at a known rate. Dumped as animated PNG.

Which frames are taken depends on timestamps alone, never on frame numbers, so variable frame rates come out right and
every backend takes the same ones. The sound of a video is a medium of its own: give the same file as audio.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Modality
from relax_core.types import Decoded, MediaKind
from relax_modalities.decoder import Byte, Decoder, Source, VideoBackend, check_names, too_large, too_long
from relax_modalities.forms import looks_like

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TEXT = "relax"
"""The PNG text chunk with what PNG itself cannot hold exactly: the rate, times, and how often each frame repeats."""


class Video(Modality):
    """Decodes videos into frames at a target rate."""

    kind: ClassVar[MediaKind] = "video"

    class Config(ComponentConfig):
        backends: Annotated[
            tuple[str, ...], Field(min_length=1), AfterValidator(lambda names: check_names("video", names))
        ] = ("pyav", "pillow")
        """Tried in this order. ``decord`` can be put in front: as fast, but blind to damage that FFmpeg paints over."""
        fps: Annotated[float, Field(gt=0)] = 2.0
        """Frames taken per second of video."""
        min_frames: PositiveInt = 1
        """A video that would give fewer is sampled at a higher rate, as far as it has frames."""
        max_frames: PositiveInt = 256
        """A video that would give more is sampled at a lower rate, over its whole length."""
        frame_pixels: PositiveInt = 401_408
        """Larger frames are scaled down to at most this many pixels, in proportion."""
        max_pixels: Annotated[int, Field(gt=0, le=178_956_970)] = 67_108_864
        """A video with larger frames is an error, before they are decoded."""
        max_seconds: Annotated[float, Field(gt=0)] = 14_400.0
        """A longer video is an error."""
        background: tuple[Byte, Byte, Byte] = (255, 255, 255)
        """Red, green and blue behind transparent pixels."""

        @model_validator(mode="after")
        def _limits(self) -> Self:
            if self.min_frames > self.max_frames:
                raise ValueError(f"min_frames {self.min_frames} is more than max_frames {self.max_frames}; lower it")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._decoder: Decoder[VideoBackend] = Decoder("video", config.backends)

    def recognizes(self, source: Path | bytes) -> bool:
        return looks_like(source, self.kind)

    def decode(self, source: Path | bytes) -> Decoded:
        frames, taken = self._decoder.read(source, lambda backend: self._frames(backend, source))
        return Decoded("video", frames, taken.rate, times=taken.times)

    def _frames(self, backend: VideoBackend, source: Source) -> tuple[NDArray[np.uint8], Taken]:
        import numpy as np

        config = self.config
        with backend.open(source, config.max_pixels, config.background) as clip:
            if clip.width * clip.height > config.max_pixels:
                raise too_large("video", source, clip.width, clip.height, config.max_pixels)
            if (seconds := clip.end - float(clip.starts_N[0])) > config.max_seconds:
                raise too_long("video", source, seconds, config.max_seconds)
            taken = choose(clip.starts_N, clip.end, config.fps, config.max_frames, config.min_frames)
            size = fitting(clip.height, clip.width, config.frame_pixels)
            frames_NHW3 = np.empty((len(taken.indices), *size, 3), np.uint8)
            for i, frame in enumerate(clip.frames(taken.indices)):
                again = i > 0 and taken.indices[i] == taken.indices[i - 1]
                frames_NHW3[i] = frames_NHW3[i - 1] if again else _resized(frame, size)
        return frames_NHW3, taken

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        from PIL import Image as Pillow
        from PIL.PngImagePlugin import PngInfo

        # Pillow's writer drops a frame that equals the one before: write each run of equal ones once, and its length.
        kept, runs = _runs(decoded.data)
        rate = decoded.rate or 1.0
        info = PngInfo()
        info.add_text(_TEXT, json.dumps({"rate": decoded.rate, "runs": runs, "times": decoded.times}))
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
            times = None if extra["times"] is None else tuple(extra["times"])
            return Decoded("video", np.repeat(np.stack(frames), extra["runs"], axis=0), extra["rate"], times=times)
        except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise DataError(f"video: stored content cannot be restored: {type(error).__name__}: {error}") from error


# --- what is taken ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """Frames of a video. ``rate``: how many a second are looked for. ``times``: when each is shown, in seconds.

    Times count from the video's first frame and ascend: when the frame appears in the source or, of a frame that is
    taken again because it stays, the moment for which it is taken.
    """

    indices: list[int]
    rate: float
    times: tuple[float, ...]


def choose(starts_N: NDArray[np.float64], end: float, fps: float, max_frames: int, min_frames: int = 1) -> Taken:
    """The frames that show every 1/fps seconds from the first on.

    Never closer than the closest two frames of the video, so that none is taken twice for the sake of ``fps`` alone;
    nor more than ``max_frames``: then they are spread evenly over the whole length. Where that gives fewer than
    ``min_frames``, as many as that, or as there are, are spread likewise. A frame that stays longer than a step is
    taken more than once: the frames keep their distances in time.
    """
    import numpy as np

    first, count = float(starts_N[0]), len(starts_N)
    duration = max(end - first, 1e-6)
    closest = float(np.diff(starts_N).min()) if count > 1 else duration
    step = max(1.0 / fps, closest)
    wanted = max(1, math.ceil(duration / step - 1e-6))
    number = min(max(wanted, min(min_frames, count)), max_frames)
    if number != wanted:
        step = duration / number
    # Containers round times to a millisecond: a frame that comes so little late is still the one to show.
    late = min(1e-3, closest / 4)
    moments_N = np.arange(number) * step
    indices = (np.searchsorted(starts_N, first + moments_N + late, side="right") - 1).tolist()
    times = [
        moment if i and indices[i] == indices[i - 1] else float(starts_N[indices[i]]) - first
        for i, moment in enumerate(moments_N.tolist())
    ]
    return Taken(indices, 1.0 / step, tuple(round(time, 6) for time in times))


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
