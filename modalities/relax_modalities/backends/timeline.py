"""When the frames of a video are shown, read from its packets without decoding them.

Shape legend: N frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.format import VideoFormat
from av.video.stream import VideoStream
from numpy.typing import NDArray

from relax_modalities.backends.ffmpeg import has_hidden_alpha, open_video
from relax_modalities.decoder import Source, broken

_MANY = 1_000_000
"""Frames of one video: nine hours at 30 a second. A small file can claim more than anyone can wait for."""
_REORDERED = 33
"""Frames by which the order of decoding may differ from that of showing: twice what any codec needs."""
_UNKNOWN_RATE = 24.0
"""Frames per second where no header tells a rate and no packet a time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """``deep``: whether colours have more than 8 bits; ``alpha``: whether pixels may be transparent.

    ``streams``: how many of video there are.
    """

    format: str
    codec: str
    deep: bool
    alpha: bool
    streams: int


@dataclass(slots=True)
class Timeline:
    """The frames of the default video stream, in the order in which they are shown.

    ``stamps``: the timestamp of each in the stream's own unit, or its number if ``counted``. ``starts_N``: the same in
    float64 seconds. ``end``: when the last one goes. ``keys``: numbers of the frames from which decoding can begin;
    ``places``: where to find them. ``whole``: whether the stream begins with a key frame.
    """

    stamps: list[int]
    starts_N: NDArray[np.float64]
    end: float
    counted: bool
    whole: bool = True
    keys: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    kind: Kind = field(default_factory=lambda: Kind("", "", False, False, 1))


def read_timeline(source: Source, max_pixels: int) -> Timeline:
    """Raises DataError for a video that is broken, endless or too large."""
    with open_video(source, max_pixels) as (container, stream):
        try:
            packets = _packets(source, container, stream)
        except (av.FFmpegError, ValueError) as error:
            raise broken("video", source, "pyav", error) from error
        if not packets:
            raise broken("video", source, "pyav", "holds no frames: write or download it again")
        rate = float(stream.average_rate or stream.guessed_rate or 0) or _UNKNOWN_RATE
        # AVI has no times, only an order: that of decoding.
        reordered = container.format.name == "avi" and stream.codec_context.has_b_frames
        timeline = None if reordered else _timed(packets, float(stream.time_base or 0), rate)
        layout = stream.codec_context.format
        kind = Kind(
            container.format.name,
            stream.codec_context.name,
            layout is not None and any(c.bits > 8 for c in layout.components),
            has_hidden_alpha(stream) or (layout is not None and is_transparent(layout)),
            len(container.streams.video),
        )
    timeline = timeline or _counted(source, max_pixels, rate)
    timeline.kind = kind
    return timeline


@dataclass(frozen=True, slots=True)
class _Shown:
    """One packet. ``duration``: 0 if unknown. ``discard``: decoded for the sake of others, never shown."""

    pts: int | None
    dts: int | None
    duration: int
    key: bool
    discard: bool


def _packets(source: Source, container: InputContainer, stream: VideoStream) -> list[_Shown]:
    found = []
    hides = stream.codec_context.name in ("vp8", "libvpx")
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise ValueError("truncated or damaged: a packet is not whole")
        if not packet.size or (hides and _is_hidden(packet)):
            continue
        found.append(_Shown(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, packet.is_discard))
        if len(found) > _MANY:
            raise ValueError(f"more than {_MANY} frames: cut it")
    return found


def _is_hidden(packet: Packet[VideoStream]) -> bool:
    """Whether a packet of VP8 only prepares others: such a packet has a time, and gives no frame."""
    return not memoryview(packet)[0] >> 4 & 1


def _timed(packets: list[_Shown], base: float, rate: float) -> Timeline | None:
    """The timeline by timestamps; None where they are missing, the same twice, or begin anew on the way.

    What comes before the first key frame, or is shown before it, cannot be decoded: the stream was cut out of a longer
    one, and begins for everyone with that frame.
    """
    cut = next((i for i, packet in enumerate(packets) if packet.key), 0)
    timed = [(p.pts, p) for p in packets[cut:] if p.pts is not None]
    if not base or len(timed) < len(packets) - cut:
        return None
    shown = [(pts, p) for pts, p in timed if not p.discard and pts >= timed[0][0]]
    stamps = sorted(pts for pts, _ in shown)
    place = {pts: i for i, pts in enumerate(stamps)}
    if not place or len(place) < len(shown) or any(abs(place[s] - i) > _REORDERED for i, (s, _) in enumerate(shown)):
        return None
    starts_N = np.array(stamps, np.float64) * base
    last = max(shown, key=lambda each: each[0])[1].duration * base or 1 / rate
    timeline = Timeline(stamps, starts_N, float(starts_N[-1]) + last, counted=False, whole=not cut)
    for stamp, packet in shown:
        if packet.key and packet.dts is not None:
            timeline.keys.append(place[stamp])
            timeline.places.append(packet.dts)
    return timeline


def _counted(source: Source, max_pixels: int, rate: float) -> Timeline:
    """Frames at the header's rate: for some AVI files and raw streams, whose packets have no times."""
    count = 0
    with open_video(source, max_pixels) as (container, stream):
        try:
            for _ in container.decode(stream):
                count += 1
        except av.FFmpegError as error:
            raise broken("video", source, "pyav", error) from error
    if not count:
        raise broken("video", source, "pyav", "damaged: no frame can be decoded")
    return Timeline(list(range(count)), np.arange(count) / rate, count / rate, counted=True)


def is_transparent(layout: VideoFormat) -> bool:
    """Whether a pixel format has alpha, or a palette that may have it."""
    return layout.has_palette or any(c.is_alpha for c in layout.components)
