"""A whole run on one or two GPUs: seconds of each step, tokens a second, and the histogram of lags.

    python -m benchmarks.gpu.train --placement separate [--staleness 2] [--steps 10] [--json FILE]   # two GPUs
    python -m benchmarks.gpu.train --placement colocate ...                                           # one

Random weights, GRPO, 256 replies of 512 tokens a step, a reward that is chance. ``separate``: the trainer on the first
GPU, the engine in processes of its own on the second, weights by the transport ``broadcast``. ``colocate``: they take
turns. The first steps compile kernels: medians leave out ``--warmup`` steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import work

MISMATCH = ("train/mismatch/abs", "train/mismatch/k3")
"""Of the engine's log-probs and the trainer's."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = work.parser(__doc__)
    p.add_argument("--placement", choices=["separate", "colocate"], default="separate")
    p.add_argument("--engine", choices=["sglang", "torch"], default="sglang")
    p.add_argument("--shape", default="qwen3-0.6b")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--staleness", type=int, default=None, help="default: 2 if separate, else 0")
    p.add_argument("--groups", type=int, default=16, help="of a step")
    p.add_argument("--size", type=int, default=16, help="replies of a group")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--new", type=int, default=512)
    p.add_argument("--micro", type=int, default=16384, help="tokens of a micro-batch")
    p.add_argument("--transport", default="broadcast", help="of separate")
    return p.parse_args(words)


def written(a: argparse.Namespace) -> Any:
    separate = a.placement == "separate"
    staleness = a.staleness if a.staleness is not None else 2 if separate else 0
    there = "cpu" if a.device == "cpu" else "cuda:1" if separate else "cuda:0"
    saver = {"memory_saver": True} if a.engine == "sglang" and not separate and a.device != "cpu" else {}
    name = f"{a.placement}-{a.engine}-{a.shape}"
    shutil.rmtree(a.folder / "runs" / name, ignore_errors=True)
    overlap = {"overlap": "process"} if separate else {"placement": "colocate"}
    return work.run_file(
        a,
        a.shape,
        work.engine(a, there, a.engine, **saver),
        name=name,
        steps=a.steps,
        groups_per_step=a.groups,
        group_size=a.size,
        max_staleness=staleness,
        runtime={"id": "local", **overlap},
        checkpoint={"every": a.steps},
        trainer={"id": "torch", "device": a.device, "tokens_per_micro_batch": a.micro},
        **({"transport": {"id": a.transport}} if separate else {}),
    )


def trained(a: argparse.Namespace) -> None:
    from relax_core.launch import prepare
    from relax_core.screen import Screen
    from relax_core.train import run_training

    began = time.time()
    run = prepare(written(a), report=lambda line: None)
    with Screen(run, quiet=True) as screen:
        run_training(run, screen)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run.directory / "summary.json").read_text())
    steps = [line for line in lines if line["kind"] == "train"]
    counted = steps[a.warmup :]
    rows = [
        {"what": "seconds to the end of step 1", "value": steps[0]["time/at"] - began},
        {"what": "step, median s", "value": work.median([s["time/step"] for s in counted])},
        {"what": "of it waiting for rows, s", "value": work.median([s["time/wait"] for s in counted])},
        {"what": "publish, s", "value": work.median([s["time/publish"] for s in counted])},
        {"what": "tokens/s", "value": work.median([s["time/tokens_per_s"] for s in counted])},
    ]
    rows += [{"what": f"trained tokens of lag {lag}", "value": n} for lag, n in _lags(summary).items()]
    for name in MISMATCH:
        if values := [s[name] for s in counted if s.get(name) is not None]:
            rows.append({"what": name, "value": work.median(values)})
    print(json.dumps([round(s["time/step"], 2) for s in steps]), flush=True)
    work.report(a, f"{a.placement}, {a.engine}, {a.shape}: {a.steps} steps", rows, {"steps": steps, "summary": summary})


def _lags(summary: Any) -> dict[str, float]:
    """Wherever the summary has it."""
    if isinstance(summary, dict):
        if "lag_tokens" in summary:
            return {str(lag): float(n) for lag, n in summary["lag_tokens"].items()}
        for value in summary.values():
            if found := _lags(value):
                return found
    return {}


if __name__ == "__main__":
    settings = arguments()
    settings.folder.mkdir(parents=True, exist_ok=True)
    work.offer(settings.folder / "site")
    trained(settings)
