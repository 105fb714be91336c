"""What it costs to start a run on Ray: CPU time, memory and heavy packages of each process, until all roles are ready.

    python benchmarks/start.py [--run configs/omni-tiny.yaml] [--rounds 3] [--json FILE]

Each round is a process of its own with a cluster of its own: it checks the run file as ``relax train`` does, starts
every role, asks each process what it took, and ends. The table shows medians of the rounds. README.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("numpy", "torch", "tokenizers", "transformers", "transformers.modeling_utils", "torch._dynamo", "scipy")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--run", type=Path, default=ROOT / "configs" / "omni-tiny.yaml", help="a run file")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", type=Path, help="write what every round found here")
    p.add_argument("--once", action="store_true", help="one round in this process; prints JSON")
    return p.parse_args(words)


# --- one round --------------------------------------------------------------------------------------------------------


def taken(_: object = None) -> dict[str, Any]:
    """What this process has taken so far."""
    import psutil

    found = psutil.Process().memory_full_info()
    packages = [name for name in HEAVY if name in sys.modules]
    return {"cpu_s": time.process_time(), "pss_mb": found.pss / 1e6, "modules": len(sys.modules), "heavy": packages}


def rays_own() -> dict[str, float]:
    """CPU seconds of all other processes of the cluster together, and how many they are."""
    import psutil

    others = [p for p in psutil.Process().children(recursive=True) if not _is_actor(p)]
    times = [p.cpu_times() for p in others]
    memory = [p.memory_full_info().pss for p in others]
    return {"cpu_s": sum(t.user + t.system for t in times), "pss_mb": sum(memory) / 1e6, "processes": len(others)}


def _is_actor(process: Any) -> bool:
    title = (process.cmdline() or [""])[0]
    return title.startswith("ray::") and "IDLE" not in title and "Agent" not in title


async def started(run: Any) -> dict[str, Any]:
    """Start the roles of a run, look, and end them."""
    import ray

    runtime = run.stack.build("runtimes", run.config.runtime, where="runtime")
    start = time.perf_counter()
    try:
        roles = await runtime.start(run, print)
        wall_s = time.perf_counter() - start
        actors = {**runtime.actors(), "bus": roles.bus._actor}
        actors |= {f"trainer-{i}": actor for i, actor in enumerate(roles.trainer._ranks)}
        found = {role: ray.get(actor.__ray_call__.remote(taken)) for role, actor in sorted(actors.items())}
        return {"wall_s": wall_s, "controller": taken(), **found, "ray's own": rays_own()}
    finally:
        await runtime.stop()


def once(path: Path) -> dict[str, Any]:
    from relax_core.config.yaml import dump, read
    from relax_core.launch import prepare

    raw = read(path)
    plugins = [*raw.get("plugins", []), *(["ray"] if "ray" not in raw.get("plugins", []) else [])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump({**raw, "plugins": plugins, "runtime": {"id": "ray"}, "runs": folder}))
        return asyncio.run(started(prepare(file, report=lambda line: None)))


# --- all rounds -------------------------------------------------------------------------------------------------------


def shown(rounds: Sequence[Mapping[str, Any]]) -> Table:
    wall_s = statistics.median(found["wall_s"] for found in rounds)
    table = Table("process", "CPU s", "PSS MB", "modules", "of them", title=f"ready after {wall_s:.1f} s")
    names = [name for name in rounds[0] if name != "wall_s"]
    for name in names:
        heavy = ", ".join(rounds[0][name].get("heavy", ()))
        cells = [_median(rounds, [name], key) for key in ("cpu_s", "pss_mb")]
        table.add_row(name, f"{cells[0]:.2f}", f"{cells[1]:.0f}", str(rounds[0][name].get("modules", "")), heavy)
    table.add_section()
    table.add_row("all", *(f"{_median(rounds, names, key):.1f}" for key in ("cpu_s", "pss_mb")))
    return table


def _median(rounds: Sequence[Mapping[str, Any]], names: Sequence[str], key: str) -> float:
    return float(statistics.median(sum(found[name][key] for name in names) for found in rounds))


def main() -> None:
    a = arguments()
    if a.once:
        print(json.dumps(once(a.run)))
        return
    call = [sys.executable, __file__, "--once", "--run", str(a.run)]
    outputs = [subprocess.run(call, check=True, capture_output=True, text=True).stdout for _ in range(a.rounds)]
    rounds = [json.loads(output.splitlines()[-1]) for output in outputs]
    Console().print(shown(rounds))
    if a.json:
        a.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
