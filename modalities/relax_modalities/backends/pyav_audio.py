"""Sounds through PyAV: the containers that libsndfile does not read (mp4, m4a, webm, the sound of a video)."""

from __future__ import annotations

import io

import av
import numpy as np

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.decoder import AudioBackend, Sound, Source, reason_of, too_long


class PyavAudio(AudioBackend):
    def read(self, source: Source, max_seconds: float) -> Sound:
        with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source), "r") as container:
            if not container.streams.audio:
                raise ValueError("holds no audio stream")
            rate = container.streams.audio[0].rate
            # Only the sample format changes here. FFmpeg's own way to mono scales by sqrt(2) and may exceed full scale.
            resampler = av.AudioResampler(format="fltp")
            parts, length = [], 0
            try:
                for frame in container.decode(audio=0):
                    for converted in resampler.resample(frame):
                        parts.append(converted.to_ndarray())
                        length += converted.samples
                    if length > max_seconds * rate:
                        raise too_long("audio", source, length / rate, max_seconds)
                parts += [rest.to_ndarray() for rest in resampler.resample(None)]
            except av.FFmpegError as error:
                raise DataError(f"audio {describe(source)}: pyav: {reason_of(error)}") from error
        if not parts:
            raise ValueError("holds no samples")
        return Sound(np.concatenate(parts, axis=1).T.astype(np.float32, copy=False), rate)
