"""Spans of time as a model writes them: from [start, end] to a part of a recording, or an error that says why not.

Shape legend: F frames, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from relax_core.interfaces import ComponentConfig
from relax_core.types import Decoded
from relax_envs.tools.tool import ToolError


class SpanRules(ComponentConfig):
    outside: Literal["clip", "refuse"] = "clip"
    """What happens to a span that reaches beyond the recording. One that lies wholly outside is always refused."""
    least_seconds: Annotated[float, Field(gt=0)] = 0.1
    """A shorter span is grown about its middle, inside of the recording."""


def read_span(numbers: Sequence[float], seconds: float, rules: SpanRules) -> tuple[float, float]:
    """Start and end, in seconds from the recording's beginning. Raises ToolError, with what is allowed."""
    shown = f"[{', '.join(f'{number:g}' for number in numbers)}]"
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)):
        raise ToolError(f"The span {shown} is not two numbers [start, end].")
    start, end = numbers
    if start >= end:
        raise ToolError(f"The span {shown} is empty: write [start, end] in seconds with start < end.")
    beyond = start < 0 or end > seconds
    if end <= 0 or start >= seconds or (beyond and rules.outside == "refuse"):
        raise ToolError(f"The span {shown} lies outside: the recording lasts from 0 to {seconds:g} seconds.")
    start, end = max(0.0, start), min(seconds, end)
    if end - start >= rules.least_seconds:
        return start, end
    length = min(seconds, rules.least_seconds)
    start = min(max(0.0, (start + end - length) / 2), seconds - length)
    return start, start + length


def cut_sound(sound: Decoded, start: float, end: float, gain_db: float = 0.0) -> Decoded:
    """The samples from ``start`` to ``end`` seconds, louder by ``gain_db`` or by what their peak leaves room for."""
    assert sound.rate is not None
    wave = sound.data[round(start * sound.rate) : max(round(end * sound.rate), round(start * sound.rate) + 1)]
    peak = float(np.abs(wave).max(initial=0.0))
    gain = 10 ** (gain_db / 20)
    if gain > 1 and peak * gain > 1:
        gain = max(1.0, 1 / peak)
    return Decoded("audio", (wave * np.float32(gain)).astype(np.float32), sound.rate)


def cut_video(video: Decoded, start: float, end: float, speed: float = 1.0) -> Decoded:
    """All frames shown from ``start`` to ``end`` seconds (at least one), shown ``1 / speed`` times as long."""
    times_F = frame_times(video)
    found = np.flatnonzero((times_F >= start - 1e-6) & (times_F < end - 1e-6))
    if not len(found):
        found = np.array([max(0, int(np.searchsorted(times_F, start + 1e-6, side="right")) - 1)])
    frames_FHW3 = np.ascontiguousarray(video.data[found])
    assert video.rate is not None
    times = None
    if video.times is not None:
        times = tuple(((times_F[found] - times_F[found[0]]) / speed).tolist())
    return Decoded("video", frames_FHW3, video.rate * speed, times=times)


def frame_times(video: Decoded) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When each frame is shown: seconds from the first one on."""
    assert video.rate is not None
    if video.times is not None:
        return np.asarray(video.times, np.float64)
    return np.arange(len(video.data)) / video.rate


def duration(recording: Decoded) -> float:
    """Seconds of a sound or a video; its last frame lasts as long as the rate says."""
    assert recording.rate is not None
    if recording.kind == "video":
        return float(frame_times(recording)[-1]) + 1 / recording.rate
    return len(recording.data) / recording.rate
