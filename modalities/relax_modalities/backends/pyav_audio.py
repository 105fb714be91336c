"""Sounds through PyAV: the containers that libsndfile does not read (mp4, m4a, webm, the sound of a video).

Shape legend: N samples, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from relax_core.errors import MissingTrack
from relax_core.media import describe
from relax_modalities.backends.ffmpeg import only, open_media
from relax_modalities.decoder import AudioBackend, Sound, Source, broken
from relax_modalities.mixing import Mixer

_EXACT = ("flac", "tta", "wv")
"""Formats whose header states the number of samples, no more and no less."""
_PLANES = 8
_CHECKED = ("wav", "w64", "aiff", "au", "caf")
"""Formats whose last packet is short where a writer to a pipe could not note the length. Cut ones come not so far."""


class PyavAudio(AudioBackend):
    def read(self, source: Source, max_seconds: float) -> Sound:
        with open_media(source) as container:
            if not container.streams.audio:
                raise MissingTrack(f"audio {describe(source)}: pyav: holds no audio stream: give a file with sound")
            stream = only(container, container.streams.audio)
            try:
                mixer = Mixer(source, stream.rate, max_seconds)
                for frame in _frames(container, stream):
                    if frame.sample_rate != mixer.rate:
                        if mixer.length:
                            raise ValueError(f"changes from {mixer.rate} to {frame.sample_rate} samples per second")
                        mixer = Mixer(source, frame.sample_rate, max_seconds)  # some codecs show their rate only now
                    for part in _safe(frame):
                        mixer.add(_samples(part))
                _refuse_missing(container, stream, mixer)
            except (av.FFmpegError, ValueError) as error:
                raise broken("audio", source, "pyav", error) from error
        return mixer.sound()


def _frames(container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    for packet in container.demux(stream):
        if packet.is_corrupt and container.format.name not in _CHECKED:
            raise ValueError("truncated or damaged: a packet is not whole")
        for frame in packet.decode():
            if frame.is_corrupt:
                raise ValueError("damaged: a part cannot be decoded")
            yield frame


def _safe(frame: AudioFrame) -> list[AudioFrame]:
    """The frame; with channels side by side if there are many: PyAV reads past the end of eight planes."""
    if not frame.format.is_planar or frame.layout.nb_channels < _PLANES:
        return [frame]
    resampler = av.AudioResampler(format=frame.format.packed)
    return [*resampler.resample(frame), *resampler.resample(None)]


def _refuse_missing(container: InputContainer, stream: AudioStream, mixer: Mixer) -> None:
    said, base = stream.duration, stream.time_base
    if container.format.name in _EXACT and said and base and base * mixer.rate == 1 and mixer.length < said:
        raise ValueError(f"truncated: {mixer.length} of {said} samples")


def _samples(frame: AudioFrame) -> NDArray[np.float32]:
    """Float32 (N, C): FFmpeg's own way to floats and to mono would scale by sqrt(2), and may exceed full scale."""
    values = frame.to_ndarray()
    values_NC = values.T if frame.format.is_planar else values.reshape(-1, frame.layout.nb_channels)
    if values_NC.dtype.kind == "f":
        return values_NC.astype(np.float32, copy=False)
    if values_NC.dtype == np.uint8:
        return (values_NC.astype(np.float32) - 128) * np.float32(1 / 128)
    return values_NC.astype(np.float32) * np.float32(0.5 ** (8 * values_NC.dtype.itemsize - 1))
