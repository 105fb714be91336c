"""Sounds through librosa, which adds what audioread's own backends can read. Its first use compiles for seconds."""

from __future__ import annotations

import io

import librosa
import numpy as np

from relax_modalities.decoder import AudioBackend, Sound, Source
from relax_modalities.mixing import Mixer


class LibrosaAudio(AudioBackend):
    def read(self, source: Source, max_seconds: float) -> Sound:
        content = io.BytesIO(source) if isinstance(source, bytes) else source
        samples, rate = librosa.load(content, sr=None, mono=False, duration=max_seconds + 1)
        mixer = Mixer(source, int(rate), max_seconds)
        mixer.add(np.atleast_2d(samples).T.astype(np.float32, copy=False))
        return mixer.sound()
