"""Sounds through libsndfile: wav, flac, ogg, mp3 and others. The fast path."""

from __future__ import annotations

import io

import soundfile

from relax_core.errors import DataError
from relax_core.media import describe
from relax_modalities.decoder import AudioBackend, Sound, Source, reason_of, too_long


class SoundfileAudio(AudioBackend):
    def read(self, source: Source, max_seconds: float) -> Sound:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            seconds = file.frames / file.samplerate
            if seconds > max_seconds:
                raise too_long("audio", source, seconds, max_seconds)
            try:
                return Sound(file.read(dtype="float32", always_2d=True), file.samplerate)
            except Exception as error:
                raise DataError(f"audio {describe(source)}: soundfile: {reason_of(error)}") from error
