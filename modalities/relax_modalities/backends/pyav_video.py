"""Videos through PyAV: everything that FFmpeg reads. Frames are found by their timestamps.

Shape legend: H height, W width.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from numpy.typing import NDArray
from PIL import Image

from relax_modalities.backends.compositing import composited
from relax_modalities.backends.ffmpeg import decoded, open_video
from relax_modalities.backends.timeline import Timeline, is_transparent, read_timeline
from relax_modalities.decoder import Clip, Colour, Source, VideoBackend, broken, too_large

_FAR = 12
"""So many frames are decoded rather than jumped over."""
_JUMP_FORMATS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
_JUMP_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d")
"""Where key frames are told apart, and a decoder refuses to begin with another one."""

_EXACT = (
    Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP | Interpolation.FULL_CHR_H_INT
)
"""How more than 8 bits become 8; the fast way is right for 8 bits only."""


class PyavVideo(VideoBackend):
    @contextmanager
    def open(self, source: Source, max_pixels: int, background: Colour) -> Iterator[Clip]:
        with ExitStack() as stack:
            yield PyavClip(source, read_timeline(source, max_pixels), max_pixels, background, stack)


class PyavClip(Clip):
    """Decodes forwards; opens the source anew to go back, since not every container can."""

    def __init__(
        self, source: Source, timeline: Timeline, max_pixels: int, background: Colour, stack: ExitStack
    ) -> None:
        self._source, self._timeline, self._stack = source, timeline, stack
        self._max_pixels, self._background = max_pixels, background
        self.starts_N, self.end = timeline.starts_N, timeline.end
        self._before = -1 if timeline.counted else -(1 << 63)
        """Less than any timestamp; numbers count from 0."""
        self._may_jump = timeline.kind.format in _JUMP_FORMATS and timeline.kind.codec in _JUMP_CODECS
        self._stamp, self._jumped = self._before, False
        self._rewind()
        first = self._next()
        if first is None:
            raise broken("video", source, "pyav", "damaged: no frame can be decoded")
        self._turns = round(first.rotation / 90) % 4  # degrees counter-clockwise, as a phone writes them
        self._stored = (first.height, first.width)
        self.height, self.width = self._stored[::-1] if self._turns % 2 else self._stored
        self._kept: VideoFrame | None = first

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        last, pixels = -1, np.empty(0, np.uint8)
        for index in indices:
            if index != last:
                last, pixels = index, self._pixels(self._find(index))
            yield pixels

    # --- finding a frame ----------------------------------------------------------------------------------------------

    def _find(self, index: int) -> VideoFrame:
        wanted = self._timeline.stamps[index]
        self._jump(index)
        while True:
            frame, self._kept = self._kept or self._next(), None
            if frame is not None and self._stamp == wanted:
                self._index = index
                return frame
            if frame is None or self._stamp > wanted:
                if not self._jumped:
                    raise broken("video", self._source, "pyav", f"damaged: frame {index} is missing")
                self._may_jump = False  # it landed badly: go the long way
                self._rewind()

    def _next(self) -> VideoFrame | None:
        """The next frame, or None at the end, and where damage may only mean that a jump landed badly."""
        timeline = self._timeline
        while True:
            try:
                frame = next(self._decoding, None)
                if frame is None:
                    return None
                before = self._stamp
                self._stamp = before + 1 if timeline.counted or frame.pts is None else frame.pts
                if self._stamp < timeline.stamps[0] and (frame.is_corrupt or not timeline.whole):
                    continue  # it belongs to what was cut off
                if frame.is_corrupt:
                    raise ValueError("damaged: a frame cannot be decoded in full")
                if self._stamp < timeline.stamps[0] or self._stamp <= before:
                    raise ValueError("damaged: its times run backwards")
            except (av.FFmpegError, ValueError) as error:
                if self._jumped:
                    return None
                raise broken("video", self._source, "pyav", error) from error
            if frame.width * frame.height > self._max_pixels:
                raise too_large("video", self._source, frame.width, frame.height, self._max_pixels)
            return frame

    def _rewind(self) -> None:
        self._stack.close()
        self._container, self._stream = self._stack.enter_context(open_video(self._source, self._max_pixels))
        self._decoding: Iterator[VideoFrame] = decoded(self._container, self._stream)
        self._kept, self._index, self._stamp, self._jumped = None, -1, self._before, False

    def _jump(self, index: int) -> None:
        """Go to the last key frame that is not behind this frame, if that saves enough."""
        if not self._may_jump:
            return
        keys = self._timeline.keys
        place = bisect.bisect_right(keys, index) - 1
        if place < 0 or keys[place] - self._index <= _FAR:
            return
        self._container.seek(self._timeline.places[place], stream=self._stream)
        self._decoding = decoded(self._container, self._stream)
        self._kept, self._stamp, self._jumped = None, self._before, True

    # --- its pixels ---------------------------------------------------------------------------------------------------

    def _pixels(self, frame: VideoFrame) -> NDArray[np.uint8]:
        """Upright RGB (H, W, 3). Raises DataError where the proportions are not those of the first frame."""
        if is_transparent(frame.format):
            picture = Image.fromarray(frame.to_ndarray(format="rgba", threads=1))
            pixels_HWC = np.asarray(composited(picture, self._background))
        else:
            way = _EXACT if any(c.bits > 8 for c in frame.format.components) else None
            pixels_HWC = frame.to_ndarray(format="rgb24", threads=1, interpolation=way).astype(np.uint8, copy=False)
        if (frame.height, frame.width) != self._stored:
            pixels_HWC = self._like_first(pixels_HWC)
        return np.rot90(pixels_HWC, self._turns)

    def _like_first(self, pixels_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A stream may change its resolution on the way, as calls over a network do; not its proportions."""
        (height, width), found = self._stored, pixels_HWC.shape[:2]
        if abs(found[0] * width - found[1] * height) > max(height, width, *found):
            change = f"{width}x{height} to {found[1]}x{found[0]}"
            raise broken("video", self._source, "pyav", f"changes from {change} pixels: encode it in one size")
        return np.asarray(Image.fromarray(pixels_HWC).resize((width, height), Image.Resampling.BICUBIC))
