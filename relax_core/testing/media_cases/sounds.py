"""Sounds: containers, codecs, depths, rates, channels and lengths, and what must be refused of each kind.

Shape legend: N samples, C channels.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.testing.media_cases.broken_images import OTHERS
from relax_core.testing.media_cases.case import Case, Check, Write
from relax_core.testing.media_files import stripes, tone, write_sound, write_video
from relax_core.types import Decoded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RATE = 16_000
"""What the sounds are decoded to."""
SECONDS = 0.6

Samples = Callable[[], "NDArray[np.float32]"]


def same(samples: Samples, rate: int, tolerance: float) -> Check:
    """A check for these samples (N, C), mixed and resampled: the exact length, rounded up, and each value."""

    def check(decoded: Decoded) -> None:
        import numpy as np
        import soxr

        mono_N = samples().mean(axis=1)
        expected_N = mono_N if rate == RATE else soxr.resample(mono_N, rate, RATE)
        length = -(-len(mono_N) * RATE // rate)
        assert decoded.rate == RATE and decoded.data.shape == (length,), f"{decoded.data.shape}, not {length} samples"
        common = min(length, len(expected_N))
        error = float(np.abs(decoded.data[:common] - expected_N[:common]).max())
        assert error <= tolerance, f"samples are {error} off; {tolerance} are allowed"

    return check


def sounds_like(tones: tuple[int, ...], seconds: float, more: float = 0.12, level: float = 0.25) -> Check:
    """A check for tones (in Hz) of equal loudness, and for a length that codecs may fill up by ``more`` seconds."""

    def check(decoded: Decoded) -> None:
        import numpy as np

        length = len(decoded.data) / RATE
        assert seconds - 0.03 <= length <= seconds + more, f"{length} s, not {seconds} to {seconds + more}"
        middle_N = decoded.data[RATE // 10 : RATE // 2]
        spectrum = np.abs(np.fft.rfft(middle_N * np.hanning(len(middle_N))))
        for frequency in tones:
            place = round(frequency * len(middle_N) / RATE)
            found = float(spectrum[place - 2 : place + 3].max()) * 4 / len(middle_N)
            assert abs(found - level) < 0.2 * level, f"{frequency} Hz has level {found}, not {level}"

    return check


def cases() -> Iterator[Case]:
    for part in (_depths, _rates, _channels, _lossy, _lossless, _lengths, _odd, _tracks, _cut, _refused):
        yield from part()


def _written(samples: Samples, rate: int, **options: Any) -> Write:
    return lambda path: write_sound(path, samples(), rate, **options)


def _stereo(rate: int = RATE) -> Samples:
    return partial(tone, SECONDS, rate, 2)


def _depths() -> Iterator[Case]:
    for suffix, form, subtype, tolerance in (
        ("wav", "WAV", "PCM_U8", 1 / 128),
        ("wav", "WAV", "PCM_16", 2**-15),
        ("wav", "WAV", "PCM_24", 2**-22),
        ("wav", "WAV", "PCM_32", 2**-22),
        ("wav", "WAV", "FLOAT", 0),
        ("wav", "WAV", "DOUBLE", 2**-22),
        ("wav", "WAV", "ULAW", 0.02),
        ("wav", "WAV", "ALAW", 0.02),
        ("wav", "WAVEX", "PCM_24", 2**-22),
        ("wav", "RF64", "PCM_16", 2**-15),
        ("w64", "W64", "PCM_16", 2**-15),
        ("aiff", "AIFF", "PCM_S8", 1 / 128),
        ("aiff", "AIFF", "PCM_16", 2**-15),
        ("aiff", "AIFF", "FLOAT", 0),
        ("au", "AU", "PCM_16", 2**-15),
        ("au", "AU", "FLOAT", 0),
        ("caf", "CAF", "PCM_24", 2**-22),
        ("caf", "CAF", "ALAC_16", 2**-14),
        ("voc", "VOC", "PCM_16", 2**-15),
        ("sph", "NIST", "PCM_16", 2**-15),
        ("flac", "FLAC", "PCM_S8", 1 / 128),
        ("flac", "FLAC", "PCM_16", 2**-14),
        ("flac", "FLAC", "PCM_24", 2**-22),
    ):
        write = _written(_stereo(), RATE, form=form, subtype=subtype)
        yield Case("audio", f"{form}-{subtype}.{suffix}", write, same(_stereo(), RATE, tolerance))


def _rates() -> Iterator[Case]:
    for rate in (8000, 11025, 12000, 22050, 24000, 32000, 44100, 48000, 96000, 192000):
        yield Case("audio", f"rate-{rate}.wav", _written(_stereo(rate), rate), same(_stereo(rate), rate, 1e-6))


def _channels() -> Iterator[Case]:
    for count in (1, 2, 3, 6, 8):
        samples = partial(tone, SECONDS, RATE, count)
        yield Case("audio", f"channels-{count}.wav", _written(samples, RATE), same(samples, RATE, 1e-6))
    for count in (6, 8):
        samples = partial(tone, SECONDS, 48000, count)
        heard = tuple(300 * c for c in range(1, count + 1) if c != 4)  # the fourth is for low frequencies only
        check = sounds_like(heard, SECONDS, level=0.5 / count)
        yield Case("audio", f"channels-{count}.m4a", _written(samples, 48000, codec="aac", form="mp4"), check)


def _lossy() -> Iterator[Case]:
    for file, rate, options in (
        ("vorbis.ogg", RATE, {}),
        ("opus.ogg", RATE, {"form": "OGG", "subtype": "OPUS"}),
        ("opus48.opus", 48000, {"codec": "libopus", "form": "ogg"}),
        ("opus.webm", 48000, {"codec": "libopus"}),
        ("opus.mp4", 48000, {"codec": "libopus"}),
        ("lame.mp3", 44100, {}),
        ("ffmpeg.mp3", 44100, {"codec": "libmp3lame"}),
        ("no-note.mp3", 44100, {"codec": "libmp3lame", "options": {"write_xing": "0"}}),
        ("low.mp3", RATE, {}),
        ("aac.m4a", 44100, {}),
        ("aac.aac", 44100, {"codec": "aac", "form": "adts"}),
        ("aac.mkv", 44100, {"codec": "aac"}),
        ("aac.3gp", RATE, {"codec": "aac"}),
        ("aac.flv", 44100, {"codec": "aac"}),
        ("aac.ts", 44100, {"codec": "aac", "form": "mpegts"}),
        ("mp3.avi", 44100, {"codec": "libmp3lame"}),
        ("mp3.mkv", 44100, {"codec": "libmp3lame"}),
        ("ac3.ac3", 48000, {"codec": "ac3"}),
        ("mp2.mp2", 48000, {"codec": "mp2"}),
        ("adpcm.wav", RATE, {"codec": "adpcm_ms"}),
    ):
        yield Case("audio", file, _written(_stereo(rate), rate, **options), sounds_like((300, 600), SECONDS))
    amr = partial(tone, SECONDS, 8000, 1)
    write = _written(amr, 8000, codec="libopencore_amrnb", form="amr")
    yield Case("audio", "amr.amr", write, sounds_like((300,), SECONDS, level=0.5))


def _lossless() -> Iterator[Case]:
    for file, codec, tolerance in (
        ("flac.mkv", "flac", 2**-14),
        ("pcm.mkv", "pcm_s16le", 2**-14),
        ("pcm.mov", "pcm_s24be", 2**-22),
        ("pcm.avi", "pcm_s16le", 2**-14),
        ("alac.mov", "alac", 2**-14),
        ("wavpack.wv", "wavpack", 2**-8),
        ("tta.tta", "tta", 2**-8),
        ("float.mov", "pcm_f32le", 0),
    ):
        yield Case("audio", file, _written(_stereo(), RATE, codec=codec), same(_stereo(), RATE, tolerance))


def _lengths() -> Iterator[Case]:
    for count, rate in ((1, RATE), (7, RATE), (999, 44100), (441, 44100), (RATE * 121, RATE)):
        samples = partial(tone, count / rate, rate, 1)
        write = _written(samples, rate, subtype="PCM_16")
        yield Case("audio", f"samples-{count}-{rate}.wav", write, same(samples, rate, 2e-4))


def _odd() -> Iterator[Case]:
    import numpy as np

    def loud() -> NDArray[np.float32]:
        return 3 * tone(SECONDS, RATE, 1)

    def constant() -> NDArray[np.float32]:
        return np.full((5000, 1), 0.25, np.float32)

    def silent() -> NDArray[np.float32]:
        return np.zeros((5000, 2), np.float32)

    yield Case("audio", "beyond-full-scale.wav", _written(loud, RATE), same(loud, RATE, 0))
    yield Case("audio", "constant.wav", _written(constant, RATE), same(constant, RATE, 0))
    yield Case("audio", "silent.flac", _written(silent, RATE), same(silent, RATE, 0))
    for length in (0xFFFFFFFF, 0x7FFFFFFF):

        def piped(path: Path, length: int = length) -> None:
            whole = write_sound(path, tone(SECONDS, RATE, 1), RATE).read_bytes()
            place = whole.index(b"data") + 4
            path.write_bytes(whole[:place] + struct.pack("<I", length) + whole[place + 4 :])

        yield Case("audio", f"piped-{length:x}.wav", piped, same(partial(tone, SECONDS, RATE, 1), RATE, 0))
    yield Case("audio", "wav-called.mp3", _called_otherwise, same(_stereo(), RATE, 0))


def _called_otherwise(path: Path) -> None:
    write_sound(path.with_suffix(".wav"), tone(SECONDS, RATE, 2), RATE).rename(path)


def _tracks() -> Iterator[Case]:
    for suffix, rate in (("mp4", 44100), ("mov", 48000), ("mkv", RATE), ("avi", 22050), ("flv", 44100)):

        def film(path: Path, rate: int = rate) -> None:
            write_video(
                path,
                stripes(15),
                codec="mpeg4" if path.suffix != ".flv" else "flv",
                sound=(tone(SECONDS, rate, 2), rate),
            )

        yield Case("audio", f"film.{suffix}", film, sounds_like((300, 600), SECONDS))
    silent = ("holds no audio stream",)
    yield Case("audio", "silent.mp4", lambda path: write_video(path, stripes(3)), refused=silent)
    yield Case("audio", "silent.mkv", lambda path: write_video(path, stripes(3)), refused=silent)


def _cut() -> Iterator[Case]:
    forms: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "pcm.wav": ({}, ("truncated",)),
        "rf64.wav": ({"form": "RF64"}, ("truncated",)),
        "pcm.aiff": ({}, ("truncated",)),
        "pcm.au": ({}, ("truncated",)),
        "pcm.caf": ({}, ("truncated",)),
        "pcm.w64": ({}, ("truncated",)),
        "whole.flac": ({}, ()),
        "vorbis.ogg": ({}, ("truncated",)),
        "opus.opus": ({"codec": "libopus", "form": "ogg"}, ("truncated",)),
        "noted.mp3": ({}, ("truncated",)),
        "no-note.mp3": ({"codec": "libmp3lame", "options": {"write_xing": "0"}}, ("truncated",)),
        "aac.m4a": ({}, ("truncated",)),
        "aac.aac": ({"codec": "aac", "form": "adts"}, ("truncated",)),
        "flac.mkv": ({"codec": "flac"}, ("truncated",)),
        "pcm.avi": ({"codec": "pcm_s16le"}, ("truncated",)),
        "tta.tta": ({"codec": "tta"}, ()),
        "wavpack.wv": ({"codec": "wavpack"}, ()),
    }
    for file, (options, words) in forms.items():
        for part in (0.3, 0.77):

            def cut(path: Path, options: dict[str, Any] = options, part: float = part) -> None:
                whole = write_sound(path, tone(SECONDS, 48000, 2), 48000, **options).read_bytes()
                path.write_bytes(whole[: int(len(whole) * part)])

            yield Case("audio", f"cut-{part}-{file}", cut, refused=words)

    def flipped(path: Path) -> None:
        whole = bytearray(write_sound(path, tone(SECONDS, 48000, 2), 48000).read_bytes())
        whole[len(whole) * 2 // 3] ^= 0x10
        path.write_bytes(whole)

    yield Case("audio", "flipped.ogg", flipped, refused=("damaged", "wrong checksum"))
    yield Case("audio", "flipped.flac", flipped, refused=("soundfile",))


def _refused() -> Iterator[Case]:
    import numpy as np

    def spoilt(value: float) -> NDArray[np.float32]:
        samples_NC = tone(SECONDS, RATE, 2)
        samples_NC[77, 1] = value
        return samples_NC

    def empty() -> NDArray[np.float32]:
        return np.zeros((0, 1), np.float32)

    def header(path: Path, at: int, value: int) -> None:
        whole = bytearray(write_sound(path, tone(SECONDS, RATE, 1), RATE, subtype="PCM_16").read_bytes())
        whole[at : at + 4] = struct.pack("<I", value)
        path.write_bytes(whole)

    def claims(path: Path) -> None:
        whole = bytearray(write_sound(path, tone(SECONDS, RATE, 1), RATE).read_bytes())
        whole[21:26] = bytes([whole[21] | 0x0F]) + b"\xff" * 4
        path.write_bytes(whole)

    for value in (float("nan"), float("inf"), float("-inf")):
        yield Case("audio", f"{value}.wav", _written(partial(spoilt, value), RATE), refused=("holds NaN or inf",))
    for suffix in ("wav", "flac", "aiff", "ogg"):
        yield Case("audio", f"no-samples.{suffix}", _written(empty, RATE), refused=())
    yield Case("audio", "head-only.wav", lambda path: path.write_bytes(b"RIFF\x24\0\0\0WAVE"), refused=("truncated",))
    yield Case("audio", "rate-0.wav", lambda path: header(path, 24, 0), refused=())
    yield Case("audio", "rate-4e9.wav", lambda path: header(path, 24, 4_000_000_000), refused=())
    yield Case("audio", "claims.flac", claims, refused=("max_seconds allows 1800: cut it",))
    long = _written(partial(tone, 3.0, 8000, 1), 8000)
    limit = (("max_seconds", 2.5),)
    yield Case("audio", "long.wav", long, refused=("3.0 s long; max_seconds allows 2.5: cut it",), settings=limit)
    for name in ("empty", "zeros", "text", "html", "lfs", "pdf"):
        what, words = OTHERS[name]
        yield Case("audio", f"{name}.wav", partial(Path.write_bytes, data=what), refused=words)
    picture = b"\x89PNG\r\n\x1a\n" + bytes(40)
    yield Case("audio", "image.wav", partial(Path.write_bytes, data=picture), refused=("give it as image",))
