"""Sounds through librosa, which adds what audioread's own backends can read. Its first use compiles for seconds."""

from __future__ import annotations

import io

import librosa
import numpy as np

from relax_modalities.decoder import AudioBackend, Sound, Source, too_long


class LibrosaAudio(AudioBackend):
    def read(self, source: Source, max_seconds: float) -> Sound:
        samples, rate = librosa.load(io.BytesIO(source) if isinstance(source, bytes) else source, sr=None, mono=False)
        samples_NC = np.atleast_2d(samples).T
        if len(samples_NC) > max_seconds * rate:
            raise too_long("audio", source, len(samples_NC) / rate, max_seconds)
        return Sound(samples_NC.astype(np.float32, copy=False), int(rate))
