"""Parquet files for the data benchmark: rows of a prompt, a 448 x 448 JPEG and 10 seconds of sound, all different.

A row has the columns ``id``, ``prompt`` (with ``<image>`` and ``<audio>`` in it), ``answer``, ``images`` and ``audios``
(lists of ``{bytes, path}``, as Hugging Face data sets store media).
"""

from __future__ import annotations

import io
import math
import random
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORDS = tuple(f"w{i:02d}" for i in range(60))
PROMPT_WORDS = 40
SIDE, QUALITY = 448, 85
SECONDS = 10
ROW_GROUP = 100
"""What Hugging Face recommends for data sets with media."""
_NOISES = 16


def write(folder: Path, rows: int, rate: int, shards: int = 4, processes: int = 2) -> list[Path]:
    """Write ``rows`` rows with sound of ``rate`` samples a second into ``shards`` files; returns them in order."""
    each = math.ceil(rows / shards)
    starts = range(0, rows, each)
    files = [folder / f"{rate}-{i:02d}.parquet" for i in range(len(starts))]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        counts = [min(each, rows - start) for start in starts]
        list(pool.map(partial(_shard, rate=rate), files, starts, counts))
    return files


def _shard(file: Path, start: int, count: int, rate: int) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    medium = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    text = ((name, pa.string()) for name in ("id", "prompt", "answer"))
    schema = pa.schema([*text, ("images", medium), ("audios", medium)])
    maker = _Maker(rate)
    with ParquetWriter(file, schema, compression="none") as writer:  # media are compressed already
        for first in range(start, start + count, ROW_GROUP):
            made = [maker.row(i) for i in range(first, min(first + ROW_GROUP, start + count))]
            writer.write_table(pa.Table.from_pylist(made, schema), row_group_size=ROW_GROUP)


class _Maker:
    """Rows by number. Noise is cut from a few large pieces at other places: drawing it would take most of the time."""

    def __init__(self, rate: int) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        self.rate = rate
        place = np.arange(SIDE) / SIDE
        waves = np.sin(20 * place)[:, None] * np.cos(13 * place)
        scene = np.stack([200 * place + 30 + 40 * waves, 200 - 150 * place[:, None] + waves, 90 + 60 * waves], -1)
        self.scene = scene.astype(np.int16)
        self.grain = [rng.normal(0, 6, (SIDE + 64, SIDE + 64, 3)).astype(np.int16) for _ in range(_NOISES)]
        time = np.arange(SECONDS * rate + 512) / rate
        self.tones = [
            8000 * np.sin(2 * np.pi * (200 + 90 * i) * time) * np.sin(np.pi * (i + 1) * time / SECONDS)
            + rng.normal(0, 2, len(time))
            for i in range(_NOISES)
        ]

    def row(self, number: int) -> dict[str, Any]:
        draw = random.Random(number)
        words = " ".join(draw.choice(WORDS) for _ in range(PROMPT_WORDS))
        return {
            "id": str(number),
            "prompt": f"<image> <audio> {words}",
            "answer": draw.choice(WORDS),
            "images": [{"bytes": self._jpeg(draw), "path": None}],
            "audios": [{"bytes": self._flac(draw), "path": None}],
        }

    def _jpeg(self, draw: random.Random) -> bytes:
        import numpy as np
        from PIL import Image

        top, left = draw.randrange(64), draw.randrange(64)
        grain = draw.choice(self.grain)[top : top + SIDE, left : left + SIDE]
        tint = np.array([draw.randint(-20, 20) for _ in range(3)], np.int16)
        pixels = (self.scene + grain + tint).clip(0, 255).astype(np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "JPEG", quality=QUALITY)
        return content.getvalue()

    def _flac(self, draw: random.Random) -> bytes:
        import soundfile

        start, scale = draw.randrange(512), draw.uniform(0.5, 1.0)
        samples: NDArray[np.float64] = draw.choice(self.tones)[start : start + SECONDS * self.rate] * scale
        content = io.BytesIO()
        soundfile.write(content, samples.astype("int16"), self.rate, format="FLAC", subtype="PCM_16")
        return content.getvalue()
