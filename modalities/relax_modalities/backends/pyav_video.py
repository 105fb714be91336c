"""Videos through PyAV: everything that FFmpeg reads."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream
from numpy.typing import NDArray

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.decoder import Clip, Source, VideoBackend, reason_of


class PyavVideo(VideoBackend):
    @contextmanager
    def open(self, source: Source) -> Iterator[Clip]:
        yield PyavClip(source)


class PyavClip(Clip):
    """Opens the source anew for each pass: not every container can go back."""

    def __init__(self, source: Source) -> None:
        self._source = source
        with self._container() as (container, stream):
            shown = [(p.pts, p.duration or 0) for p in container.demux(stream) if p.size and not p.is_discard]
            base, average = float(stream.time_base or 0), float(stream.average_rate or 24)
        with self._container() as (container, stream):
            first = next(container.decode(stream), None)
            if first is None:
                raise ValueError("holds no frames")
            self._turns = first.rotation // 90 % 4  # degrees counter-clockwise, as a phone writes them
            sides = (first.height, first.width)
            self.height, self.width = sides[::-1] if self._turns % 2 else sides
        times = {pts: duration * base for pts, duration in shown if pts is not None}
        self._counted = len(times) < len(shown) or not base
        if self._counted:  # no timestamps, as in some avi files and raw streams: frames follow at the average rate
            with self._container() as (container, stream):
                times = {count: 1 / average for count, _ in enumerate(container.decode(stream))}
            base = 1 / average
        self._times = sorted(times)
        self.starts_N = np.array(self._times, np.float64) * base
        self.end = float(self.starts_N[-1]) + (times[self._times[-1]] or 1 / average)

    @contextmanager
    def _container(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        content = io.BytesIO(self._source) if isinstance(self._source, bytes) else str(self._source)
        with av.open(content, "r") as container:
            moving = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
            if not moving:
                raise ValueError("holds no video stream")
            yield container, moving[0]

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        wanted = list(indices)
        found = 0
        with self._container() as (container, stream):
            try:
                for count, frame in enumerate(container.decode(stream)):
                    time = count if self._counted else frame.pts
                    repeats = 0
                    while found + repeats < len(wanted) and self._times[wanted[found + repeats]] == time:
                        repeats += 1
                    if repeats:
                        pixels = np.rot90(frame.to_ndarray(format="rgb24"), self._turns).astype(np.uint8, copy=False)
                        yield from [pixels] * repeats
                        found += repeats
                    if found == len(wanted):
                        return
            except av.FFmpegError as error:
                raise DataError(f"video {describe(self._source)}: pyav: {reason_of(error)}") from error
        raise DataError(f"video {describe(self._source)}: pyav: {len(wanted) - found} frames are missing")
