"""Sounds through libsndfile: wav, flac, ogg, mp3 and others. The fast path."""

from __future__ import annotations

import io

import soundfile

from relax_modalities.decoder import AudioBackend, Sound, Source, broken
from relax_modalities.mixing import Mixer

_FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "VOC", "NIST", "FLAC", "OGG", "MP3")
"""libsndfile knows more, whose beginnings are easily mistaken and whose lengths cannot be checked."""
_UNKNOWN = 1 << 62
_BLOCK = 1 << 22
"""Values that are read at once: 16 MiB."""


class SoundfileAudio(AudioBackend):
    def read(self, source: Source, max_seconds: float) -> Sound:
        try:
            file = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source))
        except soundfile.LibsndfileError as error:
            raise ValueError(error.error_string) from error  # without the name of the file, which stands in front
        with file:
            if file.format not in _FORMATS:
                raise ValueError(f"{file.format_info} is not among {', '.join(_FORMATS)}")
            mixer = Mixer(source, file.samplerate, max_seconds)
            if file.frames >= _UNKNOWN:
                raise ValueError("its header does not say how long it is")
            said = file.frames if file.format != "MP3" else 0  # of an MP3 stream without a note of it, it is a guess
            mixer.expect(said)
            try:
                count = max(1, _BLOCK // file.channels)
                while len(block_NC := file.read(count, dtype="float32", always_2d=True)):
                    mixer.add(block_NC)
            except (soundfile.SoundFileError, ValueError) as error:
                raise broken("audio", source, "soundfile", error) from error
        if mixer.length < said:
            raise broken("audio", source, "soundfile", f"truncated or damaged: {mixer.length} of {said} samples")
        return mixer.sound()
