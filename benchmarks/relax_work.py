"""Relax on the peers' work A, through what ``relax train`` does: seconds per step.

    python benchmarks/relax_work.py --threads 1 --steps 10 --json out.json [--tail]

A run file with a user's defaults (journal, trajectories, metrics, a checkpoint at the end) is prepared and trained in a
temporary folder. A step is timed from the end of the step before, as in trl_cpu.py; the JSON has the same fields.
``generate`` is the time in which the trainer waits for rows, ``train`` is the rest of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
from importlib import metadata
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

if TYPE_CHECKING:
    from benchmarks.peers.workloads import Work
    from benchmarks.work_plugin import Clock
    from relax_core.run import Run

PACKAGES = ("relax-rl", "torch", "transformers", "tokenizers")
PLUGIN = EntryPoint("peers", "benchmarks.work_plugin", "relax.plugins")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""The bare text: the peers' prompts have no roles."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", choices=["a"], default="a")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--steps", type=int, default=0, help="measured steps (0: the work's own number)")
    p.add_argument("--warmup", type=int, default=-1, help="unmeasured steps first (-1: the work's own number)")
    p.add_argument("--tail", action="store_true", help="heavy-tailed completion lengths from 4 to 64 tokens")
    p.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a value of the run file")
    p.add_argument("--profile", default="", help="write cProfile's statistics here (slows the run)")
    p.add_argument("--json", default="")
    a = p.parse_args()
    if a.warmup == 0:
        p.error("--warmup: found 0; a step is timed from the end of the one before, so give 1 or more")
    return a


def run_file(work: Work, folder: Path, steps: int, threads: int, tail: bool) -> dict[str, Any]:
    """The work as a run file, with the peers' settings; what it leaves out has Relax's defaults."""
    from benchmarks.peers import workloads

    return {
        "name": "work",
        "runs": str(folder / "runs"),
        "plugins": ["peers"],
        "seed": workloads.SEED,
        "steps": steps,
        "groups_per_step": work.prompts_per_step,
        "group_size": work.group,
        "model": {"id": "work", "path": str(folder / "model"), "chat_template": str(folder / "template.jinja")},
        "environments": [{"id": "work", "tail": tail}],
        "rewards": [{"id": "share", "token": work.tokenizer.convert_tokens_to_ids(workloads.TARGET)}],
        "algorithm": {"id": "grpo", "aggregation": "sequence-mean", "clip_low": 0.2, "clip_high": 0.2},
        "sampling": {"temperature": 1.0, "max_new_tokens": work.max_new_tokens},
        "engine": {"id": "torch", "threads": threads},
        "trainer": {"id": "torch", "lr": work.lr, "weight_decay": 0.0, "clip": 1.0, "threads": threads},
        "callbacks": [{"id": "clock"}],
    }


def prepared(work: Work, folder: Path, a: argparse.Namespace, steps: int) -> Run:
    """Write model, template and run file into ``folder`` and check them, as ``relax train`` would."""
    from relax_core.launch import prepare
    from relax_core.plugins import installed_plugins

    model: Any = work.model
    model.save_pretrained(folder / "model")
    work.tokenizer.save_pretrained(folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run_file(work, folder, steps, a.threads, a.tail)))
    return prepare(file, a.set, report=lambda line: None, installed=[*installed_plugins(), PLUGIN])


def trained(run: Run, profile: str) -> None:
    """Train with nothing on the screen."""
    from relax_core.screen import Screen
    from relax_core.train import run_training

    with Screen(run, quiet=True) as screen:
        if not profile:
            run_training(run, screen)
            return
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(run_training, run, screen)
        profiler.dump_stats(profile)


def measure(a: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(a.threads)
    from benchmarks.peers import workloads

    work = workloads.load(a.work)
    warmup, steps = work.warmup if a.warmup < 0 else a.warmup, a.steps or work.steps
    with tempfile.TemporaryDirectory() as name:
        run = prepared(work, Path(name), a, warmup + steps)
        trained(run, a.profile)
        total = json.loads((run.directory / "summary.json").read_text())
    clock = cast("Clock", run.stack.callbacks["callbacks.0"])
    return summary(a, work, warmup, clock, total) | {
        "threads_seen": torch.get_num_threads(),
        "settings": {"set": a.set},
    }


def summary(a: argparse.Namespace, work: Work, warmup: int, clock: Clock, total: dict[str, Any]) -> dict[str, Any]:
    wall, burn = differences(clock.wall, warmup), differences(clock.cpu, warmup)
    metrics = [event.metrics for event in clock.steps]
    measured = metrics[warmup:]
    waited = [m["time/wait"] for m in measured]
    tokens = [m["train/tokens"] for m in measured]
    expected = len(metrics) * work.prompts_per_step
    if total["groups"]["trained"] != expected:
        raise SystemExit(f"relax trained {total['groups']['trained']} groups, not {expected}")
    return {
        "framework": "relax",
        "work": a.work,
        "threads": a.threads,
        "steps": len(wall),
        "completions_per_s": work.completions_per_step * len(wall) / sum(wall),
        "tokens_per_s": sum(tokens) / sum(wall),
        "step_s_median": statistics.median(wall),
        "step_s_min": min(wall),
        "step_s_max": max(wall),
        "generate_s_median": statistics.median(waited),
        "train_s_median": statistics.median([s - g for s, g in zip(wall, waited, strict=True)]),
        "cpu_s_per_step": statistics.mean(burn),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "reward_first": metrics[0]["reward"],
        "reward_last": metrics[-1]["reward"],
        "tokens_per_step": sum(tokens) / len(tokens),
        "step_s": wall,
        "lengths": "heavy-tailed" if a.tail else "fixed",
        "versions": {p: metadata.version(p) for p in PACKAGES} | {"python": platform.python_version()},
    }


def differences(times: list[float], warmup: int) -> list[float]:
    """Seconds from each step's end to the next one's, without those of the warm-up, which is at least one step."""
    return [after - before for before, after in pairwise(times)][warmup - 1 :]


def main() -> None:
    a = arguments()
    os.environ["OMP_NUM_THREADS"] = str(a.threads)  # before torch is imported
    result = measure(a)
    for key, value in result.items():
        if not isinstance(value, dict):
            print(f"{key:20} {value:.3f}" if isinstance(value, float) else f"{key:20} {value}")
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
