"""Small media files for tests, written by real encoders, so that no binary file lies in the repository.

Shape legend: N samples or frames, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
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
) -> Path:
    """Encode RGB frames (H, W, 3). ``times_ms``: when each is shown; ``rotation``: degrees counter-clockwise."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        if times_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = i if times_ms is None else times_ms[i]
            if times_ms is not None:
                frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path, samples_NC: NDArray[np.float32], rate: int) -> Path:
    """Encode sound (N, C): by libsndfile what it can write (wav as float32), m4a and mp4 as AAC by PyAV."""
    if path.suffix not in (".m4a", ".mp4"):
        import soundfile

        soundfile.write(path, samples_NC, rate, subtype="FLOAT" if path.suffix == ".wav" else None)
        return path
    import av
    import numpy as np

    with av.open(str(path), "w", format="mp4") as container:
        layout = "mono" if samples_NC.shape[1] == 1 else "stereo"
        stream: Any = container.add_stream("aac", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples_NC.T), format="fltp", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


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
