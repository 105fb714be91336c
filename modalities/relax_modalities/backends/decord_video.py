"""Videos through the decord API (distribution decord2). Frames come upright: decord applies the rotation itself."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import decord
import numpy as np
from numpy.typing import NDArray

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.decoder import Clip, Source, VideoBackend, reason_of

_CHUNK = 16
"""Frames held at full size at once."""


class DecordVideo(VideoBackend):
    @contextmanager
    def open(self, source: Source) -> Iterator[Clip]:
        # One thread: decoding is spread over media, not inside one. fault_tol: no broken frame is replaced by a copy of
        # another. The bridge is a setting of the whole process and stays as it is: arrays are taken by asnumpy().
        content = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        reader = decord.VideoReader(content, num_threads=1, fault_tol=1e-9)
        yield DecordClip(reader, source)


class DecordClip(Clip):
    def __init__(self, reader: decord.VideoReader, source: Source) -> None:
        self._reader, self._source = reader, source
        # A width whose rows FFmpeg pads by whole pixels comes out broken (dmlc/decord#336): seen here, before any use.
        first = reader.get_batch([0]).asnumpy()
        self.height, self.width = first.shape[1:3]
        times_N2 = np.asarray(reader.get_frame_timestamp(list(range(len(reader)))), np.float64)
        self.starts_N = times_N2[:, 0]
        self.end = float(times_N2[-1, 1])
        if (np.diff(self.starts_N) < 0).any():
            raise ValueError("timestamps are not ascending")

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        for start in range(0, len(indices), _CHUNK):
            try:
                chunk = self._reader.get_batch(list(indices[start : start + _CHUNK])).asnumpy()
            except Exception as error:
                raise DataError(f"video {describe(self._source)}: decord: {reason_of(error)}") from error
            yield from chunk
