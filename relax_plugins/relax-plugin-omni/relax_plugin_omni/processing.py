"""Media to what the thinker's towers read, and how many tokens they become; needs no torchvision.

Images and videos are scaled to multiples of a merged patch within a budget of pixels (bicubic), normalised, and cut
into patches in the order of the Qwen2-VL family. Audio becomes a log-mel spectrogram (Whisper's) of 16 kHz mono.

Shape legend: F frames, H height, W width, C channels, N patches, D values of a patch, P pixels of one in a frame, M mel
bins, S spectrogram frames.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relax_core.errors import DataError
from relax_core.types import Decoded
from relax_plugin_omni.spectrogram import LogMel

Features = dict[str, NDArray[Any]]
T = TypeVar("T", bound=np.generic)

_MOST_ELONGATED = 200
"""Beyond this ratio of sides the model's own processor refuses an image."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that shapes features. Pixels: least and most of an image, and of one frame of a video."""

    patch: int
    merge: int
    temporal: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_pixels: tuple[int, int]
    video_pixels: tuple[int, int]
    image_tokens: int | None
    """Most tokens of an image; None: as many as its pixels allow."""
    video_tokens: int | None
    """The same for a whole video."""
    mel_bins: int
    rate: int
    hop: int
    fft: int
    window: int
    """Half the spectrogram frames that the audio tower reads as one chunk."""
    positions_per_second: int

    @property
    def factor(self) -> int:
        """Sides of scaled pictures are multiples of it: one merged patch, one token."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class Plan:
    """What a medium becomes: ``tokens`` placeholders; for pictures the patch grid (time, height, width)."""

    tokens: int
    grid: tuple[int, int, int] | None = None
    step: float = 1.0
    """Positions from one time index of a video to the next."""
    sound: NDArray[np.bool_] | None = None
    """(tokens,) of a video that is read with its sound: which placeholders are those of the sound."""

    def places(self, of: Literal["vision", "audio"]) -> NDArray[np.int64]:
        """Which of the placeholders belong to pictures, or to sound, counted from the medium's first."""
        if self.sound is not None:
            return np.flatnonzero(self.sound if of == "audio" else ~self.sound)
        return np.arange(self.tokens if (self.grid is None) == (of == "audio") else 0)


class Processor:
    """Features of decoded media. Raises DataError for what the model cannot read."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.digest = hashlib.sha256(repr(asdict(settings)).encode()).hexdigest()[:8]
        """Names the settings in the keys of features."""
        self._mel = LogMel(settings.mel_bins, settings.rate, settings.hop, settings.fft)
        levels = (np.arange(256) * (1 / 255)).astype(np.float32)
        mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
        self._normalised = ((levels[:, None] - mean) / std).astype(np.float32)

    def features(self, medium: Decoded, sound: Decoded | None = None) -> Features:
        """``pixels`` (N, D) float32 and ``grid`` (3,) int64 of pictures; ``mel`` (M, S) float32 of audio.

        ``step`` (float64) is beside the grid of a video; one that is read with its ``sound`` has ``mel``, too.
        """
        if sound is not None:
            return self.features(medium) | self.features(sound)
        if medium.kind == "audio":
            return {"mel": self._spectrogram(medium)}
        s = self.settings
        frames, height, width = self._size(medium)
        grid = np.array((frames // s.temporal, height // s.patch, width // s.patch), np.int64)
        found: Features = {"pixels": self._patches(medium), "grid": grid}
        if medium.kind == "video":
            found["step"] = np.array(s.temporal / _rate(medium) * s.positions_per_second)
        return found

    def plan(self, features: Features) -> Plan:
        """What a medium with these features becomes in a row."""
        heard = audio_tokens(features["mel"].shape[1], self.settings.window) if "mel" in features else 0
        if "grid" not in features:
            return Plan(heard)
        t, h, w = (int(n) for n in features["grid"].tolist())
        step = features["step"].item() if "step" in features else 1.0
        seen = t * h * w // self.settings.merge**2
        if not heard:
            return Plan(seen, (t, h, w), step)
        return Plan(seen + heard, (t, h, w), step, interleaved(t, seen // t, step, heard))

    def _size(self, medium: Decoded) -> tuple[int, int, int]:
        """Frames (filled up to whole temporal patches), height and width after scaling.

        One token is ``factor**2`` pixels of one step in time (an image, ``temporal`` frames). A budget of tokens lowers
        the most pixels to ``tokens // steps * factor**2``. The least pixels of an image give way to it; those of frames
        stand. Raises DataError when the budget cannot be kept.
        """
        s = self.settings
        still = medium.kind == "image"
        frames, height, width = (1, *medium.data.shape[:2]) if still else medium.data.shape[:3]
        steps = -(-frames // s.temporal)
        least, most = s.image_pixels if still else s.video_pixels
        tokens = s.image_tokens if still else s.video_tokens
        if tokens is not None:
            most = min(most, tokens // steps * s.factor**2)
        size = fit(height, width, s.factor, least, max(least, most))
        if tokens is not None and still and size[0] * size[1] > most:
            size = within(height, width, s.factor, most)
        if tokens is not None and (found := steps * size[0] * size[1] // s.factor**2) > tokens:
            least_size = f"{found} tokens at its least size, {size[0]} x {size[1]} pixels"
            raise DataError(
                f"an image of {height} x {width} pixels takes {least_size}; image_tokens allows {tokens}: crop it"
                if still
                else f"a video of {frames} frames takes {least_size} each; video_tokens allows {tokens}: lower fps or "
                "max_frames of the modality video, or the least of video_pixels"
            )
        return steps * s.temporal, *size

    def _patches(self, medium: Decoded) -> NDArray[np.float32]:
        """Bytes are cut and sorted, and only then become floats, which take four times the memory traffic.

        A single picture is one frame seen ``temporal`` times: it is sorted once.
        """
        s = self.settings
        _, height, width = self._size(medium)
        scaled = [
            _scaled(picture, height, width) for picture in ([medium.data] if medium.kind == "image" else medium.data)
        ]
        seen = 1 if len(scaled) == 1 else s.temporal
        scaled += [scaled[-1]] * (-len(scaled) % seen)
        levels_NCFP = patches(np.stack(scaled), s.patch, s.merge, seen).reshape(-1, 3, seen, s.patch**2)
        values_NCFP = np.empty((len(levels_NCFP), 3, s.temporal, s.patch**2), np.float32)
        for c in range(3):
            values_NCFP[:, c] = self._normalised[:, c].take(levels_NCFP[:, c])
        return values_NCFP.reshape(len(values_NCFP), -1)

    def _spectrogram(self, medium: Decoded) -> NDArray[np.float32]:
        wave = np.asarray(medium.data, np.float32)
        if round(_rate(medium)) != self.settings.rate:
            import soxr

            wave = soxr.resample(wave, _rate(medium), self.settings.rate).astype(np.float32)
        if len(wave) <= self.settings.fft // 2:
            least = self.settings.fft // 2 / self.settings.rate
            raise DataError(f"audio of {len(wave) / self.settings.rate:.4f} s: too short; it must last over {least} s")
        return self._mel(wave)


def fit(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The size nearest to ``height`` x ``width`` whose sides are multiples of ``factor`` and whose area is in bounds.

    The rule of the Qwen2-VL family, so that token counts equal those of other programs. Raises DataError beyond a ratio
    of sides of 200.
    """
    if max(height, width) > _MOST_ELONGATED * min(height, width):
        raise DataError(
            f"a picture of {height} x {width} pixels: one side is more than {_MOST_ELONGATED} times the other; crop it"
        )
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        return within(height, width, factor, most)
    if tall * wide < least:
        grow = math.sqrt(least / (height * width))
        tall, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return tall, wide


def within(height: int, width: int, factor: int, most: int) -> tuple[int, int]:
    """The largest size in proportion with an area of at most ``most``; more only where a side is shorter than a token.

    The order of operations is that of the model's own processor, since a last bit can decide on a whole row of tokens.
    """
    shrink = math.sqrt(height * width / most)
    tall, wide = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    return tall, wide


def interleaved(steps: int, patches: int, step: float, heard: int) -> NDArray[np.bool_]:
    """The order of a video's placeholders with those of its sound, by time: True where one of the sound stands.

    ``steps`` times with ``patches`` tokens each, ``step`` positions apart; ``heard`` tokens of sound, one position
    apart. Pictures come first where both have the same time (Qwen2.5-Omni, arXiv:2503.20215; Qwen3-Omni orders single
    tokens, not blocks of two seconds).
    """
    seen = np.repeat(np.arange(steps) * step, patches)
    order = np.argsort(np.concatenate([seen, np.arange(heard)]), kind="stable")
    return order >= len(seen)


def patches(values_FHWC: NDArray[T], patch: int, merge: int, temporal: int) -> NDArray[T]:
    """Patches (N, D) in reading order of merged patches, each ordered (channel, time, height, width)."""
    frames, height, width, channels = values_FHWC.shape
    cut = values_FHWC.reshape(
        frames // temporal,
        temporal,
        height // (patch * merge),
        merge,
        patch,
        width // (patch * merge),
        merge,
        patch,
        channels,
    )
    return np.ascontiguousarray(cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)).reshape(-1, channels * temporal * patch**2)


def audio_tokens(frames: int, window: int) -> int:
    """Tokens of a spectrogram: each chunk of ``2 * window`` frames is halved three times by the tower, rounding up."""
    full, rest = divmod(frames, 2 * window)
    return full * _halved(2 * window) + _halved(rest)


def audio_chunks(mels: Sequence[NDArray[np.float32]], window: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The chunks that the audio tower reads: features (chunks, M, width), and how many frames of each are real.

    The width makes a chunk's tokens independent of the other clips: the tower's convolutions see zeros beyond the end
    of a clip, and how many they see would otherwise depend on the longest chunk of the batch.
    """
    cuts = [mel[:, i : i + 2 * window] for mel in mels for i in range(0, mel.shape[1], 2 * window)]
    lengths = np.array([cut.shape[1] for cut in cuts], np.int64)
    width = min(2 * window, 8 * _halved(int(lengths.max())))
    chunks = np.zeros((len(cuts), cuts[0].shape[0], width), np.float32)
    for chunk, cut in zip(chunks, cuts, strict=True):
        chunk[:, : cut.shape[1]] = cut
    return chunks, lengths


def filled(mel: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """A spectrogram with the zeros behind its last chunk that the tower's convolutions see (see ``audio_chunks``).

    It has as many tokens as before, and they are the same, whatever other clips are in a batch.
    """
    rest = mel.shape[1] % (2 * window)
    missing = min(2 * window, 8 * _halved(rest)) - rest if rest else 0
    return np.pad(mel, ((0, 0), (0, missing)))


def audio_rows(lengths: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Which rows of the tower's (chunks x tokens) grid are real tokens."""
    per_chunk = _halved(width)
    real = np.array([_halved(int(n)) for n in lengths])
    return np.flatnonzero(np.arange(per_chunk) < real[:, None])


def _halved(frames: int) -> int:
    """Three convolutions of stride 2."""
    return -(-frames // 8)


def _rate(medium: Decoded) -> float:
    if not medium.rate or medium.rate <= 0:
        raise DataError(f"{medium.kind}: rate is {medium.rate}; it must be a positive number a second")
    return medium.rate


def _scaled(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
