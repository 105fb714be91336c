"""One setting of the overlap benchmark in this process: train as ``relax train`` does, write what was measured as JSON.

    python benchmarks/overlap_work.py --work lengths|tools|a --placement colocate|separate --staleness 2 --steps 10
        --json out.json [--rest SECONDS] [--runtime ray|local] [--set trainer.tokens_per_micro_batch=2048]

``--rest``: the trainer rests so many seconds a step and computes nothing. All times are of the clock that the processes
of a machine share; overlap_bars.py says what becomes of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

if TYPE_CHECKING:
    from benchmarks.overlap_plugin import Meter
    from relax_core.run import Run

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = {"overlap": "benchmarks.overlap_plugin", "peers": "benchmarks.work_plugin"}
GROUPS, GROUP_SIZE = 8, 8
MODEL = {"hidden": 256, "layers": 2, "heads": 8, "kv_heads": 4, "init_std": 0.02}
"""1.6 M parameters: sampling and training a step cost about the same."""
SMALL = 0.05
"""CPUs, as Ray counts them, of a role that computes little; each engine and rank counts ``LARGE``."""
LARGE = 0.4
GRACE_S = 0.05
"""How far from the end of a step an engine may note that it serves the step's weights."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", choices=["lengths", "tools", "a"], default="lengths")
    p.add_argument("--placement", choices=["colocate", "separate"], default="separate")
    p.add_argument("--staleness", type=int, default=2)
    p.add_argument("--runtime", choices=["ray", "local"], default="ray")
    p.add_argument("--rest", type=float, help="seconds a step that the trainer rests instead of computing")
    p.add_argument("--steps", type=int, default=10, help="measured steps")
    p.add_argument("--warmup", type=int, default=3, help="unmeasured steps before them, at least 1")
    p.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="override a value of the run file")
    p.add_argument("--json", default="")
    a = p.parse_args(words)
    if a.warmup < 1:
        p.error(f"--warmup: found {a.warmup}; a step is timed from the end of the one before, so give 1 or more")
    if a.steps < 2:
        p.error(f"--steps: found {a.steps}; what an engine does is noted once a step, so give 2 or more")
    return a


# --- the run file -----------------------------------------------------------------------------------------------------


def runtime(kind: str, placement: str) -> dict[str, Any]:
    """Two cores: for two engines and then two ranks, or for one engine beside one rank."""
    if kind == "local":
        overlap = {"overlap": "process"} if placement == "separate" else {"overlap": "turns", "placement": "colocate"}
        return {"id": "local", **overlap}
    count = 2 if placement == "colocate" else 1
    small = {"cpus": SMALL}
    engine, _ = core_of_engine(placement)
    roles = {
        "engine": {"replicas": count, "cpus": LARGE, "cores": [[core] for core in engine]},
        "trainer": {"ranks": count, "cpus": LARGE},
        "environments": small,
        "graders": small,
        "bus": small,
        "stages": {"advantages": small},
    }
    return {"id": "ray", "placement": placement, "roles": roles}


def core_of_engine(placement: str) -> tuple[list[int], list[int]]:
    """The engine's own core beside a trainer, and the one for all else; none and none where engines use all in turn.

    Else all that asks the engine for little would take the core away from it now and then, though another has time.
    """
    if placement == "colocate" or sys.platform != "linux":
        return [], []
    first, *others = sorted(os.sched_getaffinity(0))
    return ([first], others) if others else ([], [])


def reasoning(tools: bool) -> dict[str, Any]:
    """The parts of the run file that are this benchmark's own work."""
    from benchmarks.overlap_plugin import LIMIT, WORDS

    return {
        "groups_per_step": GROUPS,
        "group_size": GROUP_SIZE,
        "model": {"id": "endless", "tiny": {"words": list(WORDS), **MODEL}},
        "environments": [{"id": "reasoning", "tools": tools}],
        "rewards": [{"id": "word"}],
        "algorithm": {"id": "grpo", "aggregation": "sequence-mean"},
        "sampling": {"temperature": 1.0, "max_new_tokens": LIMIT},
        "trainer": {"lr": 1e-3, "weight_decay": 0.0, "clip": 1.0},
    }


def work_a(folder: Path) -> dict[str, Any]:
    """The peers' work A, as relax_work.py gives it to Relax."""
    from benchmarks import relax_work
    from benchmarks.peers import workloads

    work = workloads.load("a")
    model: Any = work.model
    model.save_pretrained(folder / "model")
    work.tokenizer.save_pretrained(folder / "model")
    (folder / "template.jinja").write_text(relax_work.TEMPLATE)
    return relax_work.run_file(work, folder, 1, 1, tail=False)


def run_file(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run file; what it leaves out has Relax's defaults: journal, trajectories, a checkpoint at the end."""
    own = work_a(folder) if a.work == "a" else reasoning(a.work == "tools")
    trainer = {**own["trainer"], "id": "metered", "threads": 1, "log": str(folder / "trainer.jsonl"), "rest_s": a.rest}
    plugins = ["overlap", *(["peers"] if a.work == "a" else []), *(["ray"] if a.runtime == "ray" else [])]
    return {
        **own,
        "name": "overlap",
        "runs": str(folder / "runs"),
        "plugins": plugins,
        "steps": a.warmup + a.steps + a.staleness,
        "max_staleness": a.staleness,
        "engine": {"id": "metered", "threads": 1, "log": str(folder / "engine.jsonl")},
        "trainer": trainer,
        "runtime": runtime(a.runtime, a.placement),
        "callbacks": [{"id": "meter", "first": a.warmup, "last": a.warmup + a.steps}],
    }


def offer_plugins(folder: Path) -> None:
    """Let every process of the run find this benchmark's plugins as if they were installed."""
    info = folder / "relax_overlap_benchmark-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: relax-overlap-benchmark\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in PLUGINS.items()]
    (info / "entry_points.txt").write_text("\n".join(["[relax.plugins]", *lines, ""]))
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(folder), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), *before])


# --- running ----------------------------------------------------------------------------------------------------------


def trained(a: argparse.Namespace, file: Path) -> Run:
    """Check the run file, then train with nothing on the screen."""
    from relax_core.launch import prepare
    from relax_core.screen import Screen
    from relax_core.train import run_training

    run = prepare(file, a.set, report=lambda line: None)
    with Screen(run, quiet=True) as screen:
        run_training(run, screen)
    return run


def measure(a: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="relax-overlap-") as name:
        folder = Path(name)
        offer_plugins(folder / "plugins")
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run_file(a, folder)))
        _, others = core_of_engine(a.placement)
        if a.runtime == "ray" and others:
            os.sched_setaffinity(0, others)  # of this process and all that it starts
        run = trained(a, file)
        meter = cast("Meter", run.stack.callbacks["callbacks.0"])
        summary = json.loads((run.directory / "summary.json").read_text())
        logs = {role: lines(folder / f"{role}.jsonl") for role in ("engine", "trainer")}
    return measured(a, meter, logs) | {"summary": summary}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def measured(a: argparse.Namespace, meter: Meter, logs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Raw times of every measured step, and what the meters noted between the first and the last of them.

    The last ``staleness`` steps of a run are left out: nothing is played beside them.
    """
    last = a.warmup + a.steps
    start, end = meter.ends[a.warmup - 1], meter.ends[last - 1]
    cpu = {}
    for pid, (name, seconds) in meter.cpu[-1].items():
        before = meter.cpu[0].get(pid, (name, 0.0))[1]
        cpu[f"{name} {pid}"] = (seconds - before) / a.steps
    trainer = [note for note in logs["trainer"] if a.warmup <= note["step"] < last]
    return {
        "work": a.work,
        "placement": a.placement,
        "staleness": a.staleness,
        "runtime": a.runtime,
        "rest_s": a.rest,
        "set": a.set,
        "warmup": a.warmup,
        "steps": a.steps,
        "step_s": [after - before for before, after in pairwise(meter.ends[a.warmup - 1 : last])],
        "wait_s": [note["wait_s"] for note in trainer],
        "compute_s": [note["step_s"] - note["wait_s"] for note in trainer],
        "metrics": [dict(event.metrics) for event in meter.steps[:last]],
        "engines": [within(of_pid, start, end) for of_pid in by_pid(logs["engine"])],
        "notes": logs,
        "cpu_s_per_step": sum(cpu.values()),
        "cpu_s_per_step_of": {name: s for name, s in sorted(cpu.items(), key=lambda item: -item[1]) if s >= 0.001},
    }


def by_pid(notes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[n for n in notes if n["pid"] == pid] for pid in dict.fromkeys(n["pid"] for n in notes)]


def within(notes: list[dict[str, Any]], start: float, end: float) -> dict[str, float]:
    """What an engine's counters gained in the measured time, and its seconds: from the first to the last of its notes.

    It writes one at each new version of the weights, at about the end of a step.
    """
    first = next(n for n in notes if n["at"] >= start - GRACE_S)
    last = max((n for n in notes if n["at"] <= end + GRACE_S), key=lambda n: n["at"])
    gained = {key: last[key] - first[key] for key in ("busy_s", "cpu_s", "drawn", "decodes")}
    seconds = last["at"] - first["at"]
    return {"seconds": seconds, "busy_share": gained["busy_s"] / seconds, **gained}


def main() -> None:
    a = arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before torch is imported
    result = measure(a)
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1))
    mean = sum(result["step_s"]) / len(result["step_s"])
    wait = sum(result["wait_s"]) / len(result["wait_s"])
    shares = ", ".join(f"{e['busy_share']:.2f}" for e in result["engines"])
    print(f"step {mean:.3f} s, wait {wait:.3f} s, engine busy {shares}, CPU {result['cpu_s_per_step']:.2f} s a step")
    for name, seconds in result["cpu_s_per_step_of"].items():
        print(f"  {seconds:.3f} s  {name}")


if __name__ == "__main__":
    main()
