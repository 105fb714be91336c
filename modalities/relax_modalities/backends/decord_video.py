"""Videos through the decord API (distribution decord2). Frames come upright: decord applies the rotation itself.

decord tells neither a frame's size before it is decoded, nor transparency, nor frames that are not to be shown, nor
damage that its decoder has painted over. The first three are read from the container through PyAV, and what decord
would get wrong is left to other backends.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import decord
import numpy as np
from numpy.typing import NDArray

from relax_modalities.backends.timeline import Timeline, read_timeline
from relax_modalities.decoder import Clip, Colour, Source, VideoBackend, broken

_FORMATS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi")
_CODECS = ("h264", "hevc", "mpeg4", "vp9", "av1", "libdav1d")
_CHUNK = 16
"""Frames held at full size at once."""


class DecordVideo(VideoBackend):
    @contextmanager
    def open(self, source: Source, max_pixels: int, background: Colour) -> Iterator[Clip]:
        timeline = read_timeline(source, max_pixels)
        kind = timeline.kind
        if kind.format not in _FORMATS or kind.codec not in _CODECS or kind.deep or kind.alpha or kind.streams > 1:
            raise ValueError(f"{kind.codec} in {kind.format}, which it does not read reliably")
        # One thread: decoding is spread over media, not inside one. fault_tol: no broken frame is replaced by a copy of
        # another. The bridge is a setting of the whole process and stays as it is: arrays are taken by asnumpy().
        content = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        yield DecordClip(decord.VideoReader(content, num_threads=1, fault_tol=1e-9), timeline, source)


class DecordClip(Clip):
    def __init__(self, reader: decord.VideoReader, timeline: Timeline, source: Source) -> None:
        self._reader, self._source = reader, source
        if len(reader) != len(timeline.stamps):
            raise ValueError(f"finds {len(reader)} frames where the container shows {len(timeline.stamps)}")
        # A width whose rows FFmpeg pads by whole pixels comes out broken (dmlc/decord#336): seen here, before any use.
        first = reader.get_batch([0]).asnumpy()
        self.height, self.width = first.shape[1:3]
        self.starts_N, self.end = timeline.starts_N, timeline.end

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        for start in range(0, len(indices), _CHUNK):
            try:
                chunk = self._reader.get_batch(list(indices[start : start + _CHUNK])).asnumpy()
            except Exception as error:
                raise broken("video", self._source, "decord", error) from error
            yield from chunk
