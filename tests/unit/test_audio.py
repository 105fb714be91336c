"""Sounds: mono at one rate, equal to librosa's, whatever container; loud about what is broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_core.errors import DataError
from relax_core.testing.media_files import stripes, tone, write_sound, write_video
from relax_core.types import Decoded
from relax_modalities.audio import Audio


def decode(source: Path | bytes, **settings: Any) -> Decoded:
    return Audio(Audio.Config(**settings)).decode(source)


@pytest.mark.parametrize(("rate", "channels"), [(16000, 1), (16000, 2), (22050, 1), (44100, 2), (8000, 1), (11025, 3)])
def test_equals_librosa(rate: int, channels: int, tmp_path: Path) -> None:
    import librosa

    path = tmp_path / "sound.wav"
    noise = np.random.default_rng(rate).uniform(-0.5, 0.5, (rate // 3 + 1, channels)).astype(np.float32)
    write_sound(path, noise, rate)
    found = decode(path)
    expected, _ = librosa.load(path, sr=16000)
    assert found.rate == 16000.0 and found.data.dtype == np.float32
    np.testing.assert_array_equal(found.data, expected)


def test_another_rate(tmp_path: Path) -> None:
    found = decode(write_sound(tmp_path / "sound.wav", tone(0.5, 16000), 16000), rate=24000)
    assert found.rate == 24000.0 and found.data.shape == (12000,)


@pytest.mark.parametrize("suffix", [".flac", ".ogg", ".mp3", ".m4a"])
def test_compressed_formats(suffix: str, tmp_path: Path) -> None:
    found = decode(write_sound(tmp_path / f"sound{suffix}", tone(1.0, 44100, 2), 44100))
    assert 0.95 < len(found.data) / 16000 < 1.1
    spectrum = np.abs(np.fft.rfft(found.data[2000:10000]))
    loudest = sorted(np.argsort(spectrum)[-2:] * 16000 / 8000)
    np.testing.assert_allclose(loudest, [300, 600], atol=3)


def test_stereo_keeps_its_loudness_in_every_container(tmp_path: Path) -> None:
    both = np.repeat(tone(1.0, 16000), 2, axis=1)
    for suffix in (".wav", ".m4a"):
        found = decode(write_sound(tmp_path / f"sound{suffix}", both, 16000)).data
        assert np.abs(found[4000:12000]).max() == pytest.approx(0.5, abs=0.02), suffix


def test_a_video_without_sound(tmp_path: Path) -> None:
    silent = write_video(tmp_path / "silent.mp4", stripes(3))
    with pytest.raises(DataError, match=r"silent\.mp4: pyav: holds no audio stream: give a file with sound"):
        decode(silent)


def test_the_first_backend_that_can_is_taken(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "sound.m4a", tone(0.3, 16000), 16000)
    with pytest.raises(DataError, match=r"sound\.m4a: no backend .*\(soundfile: .*not recognised"):
        decode(path, backends=("soundfile",))
    assert len(decode(path, backends=("soundfile", "pyav")).data)


def test_truncated_wav(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "cut.wav", tone(0.5, 16000), 16000)
    content = path.read_bytes()
    path.write_bytes(content[:20000])
    with pytest.raises(DataError, match=r"cut\.wav: truncated: \d+ of 32000 bytes"):
        decode(path)


def test_wav_from_a_pipe_has_no_sizes_and_is_fine(tmp_path: Path) -> None:
    content = write_sound(tmp_path / "sound.wav", tone(0.5, 16000), 16000).read_bytes()
    place = content.index(b"data") + 4
    piped = content[:4] + struct.pack("<I", 0xFFFFFFFF) + content[8:place]
    piped += struct.pack("<I", 0xFFFFFFFF) + content[place + 4 :]
    np.testing.assert_array_equal(decode(piped).data, tone(0.5, 16000)[:, 0])


def test_nothing_in_it_and_not_a_number(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"empty\.wav: holds no samples"):
        decode(write_sound(tmp_path / "empty.wav", np.zeros((0, 1), np.float32), 16000))
    bad = tone(0.1, 16000)
    bad[7] = np.nan
    with pytest.raises(DataError, match=r"nan\.wav: holds NaN or inf"):
        decode(write_sound(tmp_path / "nan.wav", bad, 16000))


@pytest.mark.parametrize("backend", ["soundfile", "pyav"])
@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_what_lasts_two_minutes_stays_two_minutes(backend: str, suffix: str, tmp_path: Path) -> None:
    path = write_sound(tmp_path / f"long{suffix}", tone(121.0, 16000), 16000, subtype="PCM_16")
    found = decode(path, backends=(backend,)).data
    assert found.shape == (121 * 16000,)
    np.testing.assert_allclose(found[-16000:], tone(121.0, 16000)[-16000:, 0], atol=2**-14)


def test_a_header_cannot_make_memory_be_reserved(tmp_path: Path) -> None:
    """A FLAC file may claim 2**36 samples; what fits max_seconds is still read in blocks."""
    content = bytearray(write_sound(tmp_path / "sound.flac", tone(0.5, 16000), 16000).read_bytes())
    content[21] |= 0x0F
    content[22:26] = b"\xff" * 4
    with pytest.raises(DataError, match=r"max_seconds allows 1800: cut it"):
        decode(bytes(content))
    content[21] &= 0xF0
    content[22:26] = struct.pack(">I", 1790 * 16000)
    with pytest.raises(DataError, match=r"soundfile: "):
        decode(bytes(content))


def test_a_length_that_no_header_tells(tmp_path: Path) -> None:
    content = bytearray(write_sound(tmp_path / "sound.flac", tone(0.5, 16000), 16000).read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)  # as an encoder leaves it that writes to a pipe
    np.testing.assert_allclose(decode(bytes(content)).data, tone(0.5, 16000)[:, 0], atol=2**-14)


def test_values_that_overflow_when_resampled(tmp_path: Path) -> None:
    huge = np.full((5000, 1), 3e38, np.float32)
    huge[::2] *= -1
    with pytest.raises(DataError, match=r"huge\.wav: its values are too large to be resampled"):
        decode(write_sound(tmp_path / "huge.wav", huge, 44100))


@pytest.mark.parametrize("channels", [6, 8])
@pytest.mark.parametrize("suffix", [".wav", ".m4a"])
def test_many_channels_through_pyav(channels: int, suffix: str, tmp_path: Path) -> None:
    """PyAV itself reads past the end of eight planes; what it reads there brings the process down."""
    codec = {".wav": "pcm_s16le", ".m4a": "alac" if channels == 6 else "aac"}[suffix]
    form = {".wav": "wav", ".m4a": "mp4"}[suffix]
    samples = tone(0.5, 48000, channels)
    path = write_sound(tmp_path / f"many{suffix}", samples, 48000, codec=codec, form=form)
    found = decode(path, backends=("pyav",), rate=48000).data
    assert len(found) >= 24000
    if codec != "aac":
        np.testing.assert_allclose(found, samples.mean(axis=1), atol=1e-4)


def test_the_default_track_is_heard(tmp_path: Path) -> None:
    import av

    path = tmp_path / "two.mkv"
    for default in (0, 1):
        with av.open(str(path), "w") as container:
            streams: Any = [container.add_stream("pcm_s16le", rate=16000, layout="mono") for _ in range(2)]
            streams[default].disposition = 1
            for level, stream in zip((1000, 2000), streams, strict=True):
                pixels = np.full((1, 1600), level, np.int16)
                frame = av.AudioFrame.from_ndarray(pixels, format="s16", layout="mono")
                frame.sample_rate, frame.pts = 16000, 0
                container.mux(stream.encode(frame))
        expected = (1000, 2000)[default] / 32768
        np.testing.assert_allclose(decode(path).data, np.full(1600, expected), atol=1e-6)


def test_too_long(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "long.wav", tone(2.0, 8000), 8000)
    with pytest.raises(DataError, match=r"long\.wav: 2\.0 s long; max_seconds allows 1\.5"):
        decode(path, max_seconds=1.5)


@pytest.mark.parametrize("rate", [16000, 8000.0, 44100])
def test_dump_restores_exactly(rate: float) -> None:
    audio = Audio(Audio.Config())
    samples = np.random.default_rng(0).normal(0, 2, 333).astype(np.float32)  # beyond full scale too
    decoded = Decoded("audio", samples, rate)
    suffix, content = audio.dump(decoded)
    assert suffix == ".wav" and content == audio.dump(decoded)[1]
    restored = audio.restore(content)
    assert restored.hash == decoded.hash and restored.rate == float(rate)
    with pytest.raises(DataError, match="cannot be restored"):
        audio.restore(content[:20])


def test_what_wav_cannot_hold() -> None:
    with pytest.raises(DataError, match=r"rate 0\.5"):
        Audio(Audio.Config()).dump(Decoded("audio", np.zeros(3, np.float32), 0.5))


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValidationError, match=r"'torchaudio'.*known are soundfile, pyav, librosa"):
        Audio.Config(backends=("torchaudio",))
