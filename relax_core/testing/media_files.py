"""Small media files for tests, written by real encoders, so that no binary file lies in the repository.

Shape legend: N samples or frames, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def write_video(
    path: Path,
    frames: Sequence[NDArray[np.uint8]],
    fps: int = 24,
    times_ms: Sequence[int] | None = None,
    rotation: int = 0,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    form: str | None = None,
    options: Mapping[str, str] | None = None,
    container_options: Mapping[str, str] | None = None,
    sound: tuple[NDArray[np.float32], int] | None = None,
) -> Path:
    """Encode frames (H, W, 3) or, with alpha, (H, W, 4).

    ``times_ms``: when each is shown; ``rotation``: degrees counter-clockwise; ``pixels``: FFmpeg's pixel format;
    ``form``: its name of the container, where the suffix does not tell; ``options``: of the encoder; ``sound``:
    samples (N, C) and their rate, a track behind that of the pictures.
    """
    import av

    with av.open(str(path), "w", format=form, options=dict(container_options or {})) as container:
        stream: Any = container.add_stream(codec, rate=fps, options=dict(options or {}))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        if rotation:
            stream.set_display_rotation(rotation)
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        track = _sound_track(container, "aac", *sound) if sound else iter(())
        for i, picture in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgba" if picture.shape[2] == 4 else "rgb24")
            frame.pts = i if times_ms is None else times_ms[i]
            if times_ms is not None:
                frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        for packets in track:
            container.mux(packets)
    return path


def write_sound(
    path: Path,
    samples_NC: NDArray[np.float32],
    rate: int,
    codec: str | None = None,
    form: str | None = None,
    subtype: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:
    """Encode sound (N, C).

    By libsndfile what it can write (wav as float32, unless ``subtype`` says otherwise; ``form``: its name of the
    container), m4a and mp4 as AAC by PyAV. With ``codec`` by PyAV, in the container of the suffix or of ``form``.
    """
    if codec is None and path.suffix not in (".m4a", ".mp4"):
        import soundfile

        usual = "FLOAT" if path.suffix == ".wav" else None
        soundfile.write(path, samples_NC, rate, subtype=subtype or usual, format=form)
        return path
    import av

    form = form or ("mp4" if path.suffix == ".m4a" else None)
    with av.open(str(path), "w", format=form, options=dict(options or {})) as container:
        for packets in _sound_track(container, codec or "aac", samples_NC, rate):
            container.mux(packets)
    return path


def _sound_track(container: Any, codec: str, samples_NC: NDArray[np.float32], rate: int) -> Iterator[Any]:
    """A new stream of the container, made at once, and its packets, encoded one by one."""
    import av

    layout = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}[samples_NC.shape[1]]
    stream = container.add_stream(codec, rate=rate, layout=layout)

    def packets() -> Iterator[Any]:
        import numpy as np

        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples_NC).reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        resampler = av.AudioResampler(format=stream.codec_context.format.name, layout=layout, rate=rate)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            yield stream.encode(part)
        yield stream.encode()

    return packets()


def stripes(count: int, height: int = 64, width: int = 128) -> list[NDArray[np.uint8]]:
    """Frames whose left bar grows with their number, so that each can be told from the others after encoding."""
    import numpy as np

    frames = []
    for i in range(count):
        pixels = np.full((height, width, 3), 30, np.uint8)
        pixels[:, : (i + 1) * width // (count + 1)] = 220
        frames.append(pixels)
    return frames


def stripe_number(pixels: NDArray[np.uint8], count: int) -> int:
    """Which of ``stripes(count)`` this decoded frame is."""
    bright = float((pixels[:, :, 1] > 125).mean())
    return round(bright * (count + 1)) - 1


def tone(seconds: float, rate: int, channels: int = 1) -> NDArray[np.float32]:
    """Sines (N, C) of 300 Hz, 600 Hz, ... at half scale."""
    import numpy as np

    time = np.arange(round(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * 300 * (c + 1) * time) for c in range(channels)], 1).astype(np.float32)
