"""Rows from one process to another: Relax's bus on Ray beside a bare Ray actor and TransferQueue.

    python benchmarks/bus.py [--json FILE] [--rounds 15] [--warmup 3] [--puts 200] [--skip transferqueue]

256 ragged rows of about 12 KB, in 8 puts, and 64 of about 2 MB, in 8 puts, are put by one process and then taken by
another, which looks into every column. Both waits are timed and added. Every side has its processes; in each round the
sides take turns, each round begins with another one, and the ratio is that of the same round. Then the latency of
single puts, without and with 8 consumers that wait for rows that never come. README.md says what is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))

SIDES = ("relax", "bare actor", "transferqueue")
BARS = {"bare actor": 0.9, "transferqueue": 2.0}
"""Relax must reach so many times the speed of each."""
WORKS = {"256 rows of 12 KB": (8, 32, 12_000), "64 rows of 2 MB": (8, 8, 2_000_000)}
"""Groups, rows of a group, bytes of a row."""
PARTS = ("put_s", "take_s", "total_s")
WAITING = 8
MISSING = "TransferQueue is not installed: pip install TransferQueue==0.1.11"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every timing here")
    p.add_argument("--rounds", type=int, default=15, help="measured turns of each side")
    p.add_argument("--warmup", type=int, default=3, help="turns before them, in which all values are compared")
    p.add_argument("--puts", type=int, default=200, help="single puts whose latency is measured")
    p.add_argument("--skip", action="append", default=[], choices=SIDES[1:], help="leave a peer out")
    p.add_argument("--folder", type=Path, help="for Ray's files; default: Ray's own")
    a = p.parse_args(words)
    if min(a.rounds, a.warmup, a.puts) < 1:
        p.error("counts must be 1 or more")
    return a


# --- the two ends -----------------------------------------------------------------------------------------------------


class End:
    """An actor's process with one end of a contender."""

    def __init__(self, name: str, handle: Any, role: str) -> None:
        from benchmarks.bus_sides import Groups, make_groups, make_side

        self.side = make_side(name, handle, role)
        self.made: dict[str, Groups] = {work: make_groups(*size) for work, size in WORKS.items()}
        self.lingering: list[asyncio.Task[None]] = []

    async def ready(self) -> bool:
        return True

    async def put(self, work: str, number: int) -> float:
        from benchmarks.bus_sides import renamed

        groups = renamed(self.made[work], number)
        await self.side.open(groups)
        began = time.perf_counter()
        await self.side.put(groups)
        return time.perf_counter() - began

    async def take(self, work: str, number: int, compare: bool) -> float:
        from benchmarks.bus_sides import digest, renamed, touched

        groups = renamed(self.made[work], number)
        wanted = {id: row for rows in groups.values() for id, row in rows.items()}
        began = time.perf_counter()
        rows = await self.side.take(len(groups), len(wanted))
        found = touched(rows)
        seconds = time.perf_counter() - began
        if found != touched(wanted) or (compare and digest(rows) != digest(wanted)):
            raise SystemExit(f"{type(self.side).__name__}: {work}: other rows came out than went in")
        del rows
        await self.side.done(groups)
        return seconds

    async def single_puts(self, count: int, first: int) -> list[float]:
        """Latency of puts of one row of about 12 KB each."""
        from benchmarks.bus_sides import make_groups, renamed

        seconds = []
        for i in range(count):
            groups = renamed(make_groups(1, 1, 12_000, seed=i), first + i)
            await self.side.open(groups)
            began = time.perf_counter()
            await self.side.write(groups)
            seconds.append(time.perf_counter() - began)
        return seconds

    async def linger(self, count: int) -> None:
        self.lingering = [asyncio.ensure_future(self.side.linger()) for _ in range(count)]
        await asyncio.sleep(0.3)

    async def leave(self) -> None:
        for task in self.lingering:
            task.cancel()
        await asyncio.wait(self.lingering)


class Ends:
    """Both ends of a contender."""

    def __init__(self, name: str) -> None:
        import ray

        self.name = name
        self.handle = _handle(name)
        actor: Any = ray.remote(End)
        make = actor.options(num_cpus=0, max_concurrency=100)
        self.producer, self.consumer = (make.remote(name, self.handle, role) for role in ("rollout", "train"))
        ray.get([self.producer.ready.remote(), self.consumer.ready.remote()])

    def turn(self, work: str, number: int, compare: bool) -> dict[str, float]:
        import ray

        put = ray.get(self.producer.put.remote(work, number), timeout=120)
        take = ray.get(self.consumer.take.remote(work, number, compare), timeout=120)
        return {"put_s": put, "take_s": take, "total_s": put + take}

    def latencies(self, puts: int) -> dict[str, list[float]]:
        import ray

        first = 1_000_000
        ray.get(self.producer.single_puts.remote(20, first), timeout=120)
        alone = ray.get(self.producer.single_puts.remote(puts, first + 20), timeout=120)
        ray.get(self.consumer.linger.remote(WAITING), timeout=120)
        beside = ray.get(self.producer.single_puts.remote(puts, first + 20 + puts), timeout=120)
        ray.get(self.consumer.leave.remote(), timeout=120)
        return {"alone": alone, "waiting": beside}


def _handle(name: str) -> Any:
    import ray

    if name == "relax":
        from relax_plugin_ray.bus import RayBus

        return RayBus.start(max_rows=100_000, max_bytes=10**9)
    if name == "bare actor":
        from benchmarks.bus_sides import BareActor

        actor: Any = ray.remote(BareActor)
        return actor.options(num_cpus=0, max_concurrency=1000).remote()
    return {"controller": {"polling_mode": True}}


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(names: Sequence[str], a: argparse.Namespace, console: Console) -> dict[str, Any]:
    ends = {}
    for name in names:
        began = time.perf_counter()
        ends[name] = Ends(name)
        console.print(f"{name}: both ends are up after {time.perf_counter() - began:.1f} s", highlight=False)
    turns: list[dict[str, Any]] = []
    for number, work in enumerate(WORKS):
        for r in range(-a.warmup, a.rounds):
            shift = r % len(names)
            for name in (*names[shift:], *names[:shift]):
                found = ends[name].turn(work, 1000 * number + r + a.warmup, compare=r < 0)
                if r >= 0:
                    turns.append({"work": work, "round": r, "side": name, **found})
        for name in names:
            seconds = statistics.median(t["total_s"] for t in turns if (t["work"], t["side"]) == (work, name))
            console.print(f"{work}: {name:13} {1000 * seconds:8.1f} ms", highlight=False)
    return {"turns": turns, "latencies": {name: ends[name].latencies(a.puts) for name in names}}


def judged(turns: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """By work and side: medians, and how many times as fast Relax is in the same round."""
    result = []
    for work in WORKS:
        by = {name: {t["round"]: t for t in turns if (t["work"], t["side"]) == (work, name)} for name in names}
        for name in names:
            medians = {
                key: statistics.median(t[key] for t in by[name].values()) for key in ("put_s", "take_s", "total_s")
            }
            ratios = [by[name][r]["total_s"] / by["relax"][r]["total_s"] for r in by[name]]
            ratio = statistics.median(ratios)
            bar = BARS.get(name)
            result.append(
                {"work": work, "side": name, **medians, "ratio": ratio, "ratios": ratios}
                | {"bar": bar, "reached": bar is None or ratio >= bar}
            )
    return result


def speed_table(bars: Sequence[Mapping[str, Any]]) -> Table:
    caption = "Relax: how many times as fast, median of the rounds (quartiles); total = put + take"
    result = Table(title="Rows from one process to another", caption=caption)
    for heading in ("work", "side", "put ms", "take ms", "total ms", "Relax", "bar"):
        result.add_column(heading, justify="left" if heading in ("work", "side") else "right", no_wrap=True)
    for bar in bars:
        times = [f"{1000 * bar[key]:.1f}" for key in PARTS]
        low, _, high = statistics.quantiles(bar["ratios"], n=4) if len(bar["ratios"]) > 1 else [bar["ratio"]] * 3
        words = ["", ""]
        if bar["bar"] is not None:
            verdict = "reached" if bar["reached"] else "missed"
            words = [f"{bar['ratio']:.2f} ({low:.2f} to {high:.2f})", f"{bar['bar']:g} {verdict}"]
        result.add_row(bar["work"], bar["side"], *times, *words)
    return result


def latency_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    result = Table(title=f"Latency of one put of one row, without and with {WAITING} waiting consumers (ms)")
    for heading in ("side", "median", "worst", "median, waiting", "worst, waiting"):
        result.add_column(heading, justify="left" if heading == "side" else "right", no_wrap=True)
    for name, seconds in found.items():
        cells = [f"{1000 * f(seconds[key]):.2f}" for key in ("alone", "waiting") for f in (statistics.median, max)]
        result.add_row(name, *cells)
    return result


def main() -> None:
    a = arguments()
    import ray

    from benchmarks.embedded import machine

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    names = [name for name in SIDES if name not in a.skip]
    if "transferqueue" in names and importlib.util.find_spec("transfer_queue") is None:
        console.print(MISSING, highlight=False)
        names.remove("transferqueue")
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    options: dict[str, Any] = {"_temp_dir": str(a.folder)} if a.folder else {}
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=2 * 10**9,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
        **options,
    )
    try:
        report = measured(names, a, console)
    finally:
        ray.shutdown()
    bars = judged(report["turns"], names)
    if a.json:
        settings = {name: value for name, value in vars(a).items() if name not in ("json", "folder")}
        report = {"started": started, "machine": machine(), "settings": settings, "speed": bars, **report}
        a.json.write_text(json.dumps(report))
    console.print(speed_table(bars))
    console.print(latency_table(report["latencies"]))


if __name__ == "__main__":
    main()
