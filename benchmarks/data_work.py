"""Relax's side of the data benchmark: rows of Parquet files through the feed of a rollout, with decoded media.

    python benchmarks/data_work.py --files 'DIR/*.parquet' --tokenizer DIR --workers 2 --out out.json

The environment ``single_turn``, the omni adapter and the feed are those of a run file; the model itself is never built.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.data_files import WORDS
from benchmarks.data_meter import Meter, arguments

if TYPE_CHECKING:
    from relax_core.interfaces import Environment
    from relax_core.run import Run

PIXELS = (56 * 56, 3584 * 3584)
"""The least and most pixels of Qwen3-Omni's own image processor."""
AHEAD = 8
"""Tasks made ready before they are asked for: as many as the peer's workers prefetch."""


def run_of(files: str, workers: int) -> Run:
    """A run of which only the data and the model's adapter are used."""
    from relax_core.config.schema import RunConfig
    from relax_core.plugins import activate
    from relax_core.run import Run

    config = RunConfig.model_validate(
        {
            "name": "data",
            "plugins": ("omni",),
            "steps": 1,
            "groups_per_step": AHEAD,
            "data": {"workers": workers, "ahead": AHEAD},
            "model": {"id": "qwen3-omni", "tiny": {"words": list(WORDS)}, "image_pixels": list(PIXELS)},
            "environments": ({"id": "single_turn", "data": files},),
            "rewards": ({"id": "exact"},),
            "algorithm": {"id": "grpo"},
        }
    )
    return Run(config, Path("runs/data"), activate(("omni",)))


async def feed_all(run: Run, environment: Environment, meter: Meter) -> None:
    from relax_core.feed import Feed
    from relax_core.prompts import Prompts
    from relax_core.run import build_adapter
    from relax_core.tasks import TaskStream

    adapter, media = build_adapter(run)
    stream = TaskStream({"single_turn": (environment, 1.0)}, run.config.seed)
    feed = Feed(stream, Prompts(adapter, run.config.data), run.config.data, run.config.groups_per_step)
    try:
        more, position = True, 0
        while more:
            prompt = await feed.take(position)
            found = [media.get(key) for key in prompt.keys]
            nbytes = sum(array.nbytes for features in found for array in features.values())
            more = meter.row(len(prompt.encoded.ids), nbytes)
            media.release(prompt.keys)
            position += 1
    finally:
        feed.close()


def probe(run: Run, environment: Environment, count: int, out: Path) -> None:
    """What the first rows become, in the order of the files."""
    import numpy as np

    from relax_core.run import build_adapter

    adapter, media = build_adapter(run)
    tasks = environment.tasks("train")
    found: dict[str, Any] = {}
    for i in range(count):
        encoded = adapter.encode(tasks[i].messages)
        features = {ref.kind: media.get(ref.key) for ref in encoded.media}
        image, audio = features["image"], features["audio"]
        found |= {f"ids-{i}": np.array(encoded.ids), f"grid-{i}": image["grid"]}
        found |= {f"pixels-{i}": image["pixels"], f"mel-{i}": audio["mel"]}
    np.savez(out, **found)


def work(a: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    run = run_of(a.files, a.workers)
    environment = run.stack.build("environments", run.config.environments[0], where="environments.0")
    if a.probe:
        probe(run, environment, a.probe, a.out)
        return
    meter = Meter(a.warmup, a.rows)
    with meter.watching():
        asyncio.run(feed_all(run, environment, meter))
    meter.write(a.out)


if __name__ == "__main__":
    work(arguments(__doc__))
