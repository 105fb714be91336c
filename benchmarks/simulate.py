"""A cluster of 8 to 512 engines in virtual time: what staleness and placement buy, and what control costs a row.

    python benchmarks/simulate.py [--json FILE] [--engines 8 32 128 512] [--staleness 0 1 2 4] [--rows 4]
                                  [--measure] [--quick] [--profile]

The loop, admission, order, bus, router, players, chat, scoring, stages, feed and files are Relax's own; engines,
trainer, model and environment only take time, as measured with the embedded ones (``--measure`` does so now; else the
recorded costs count). Every reply has a length: median 15 % of the limit, 5 % at the limit.

* scale: groups a step grow with the engines. ``separate``: so many engines, and as many ranks of their own;
  ``colocate``: so many devices that are engines, then ranks. *Control* is the CPU time of the process for each trained
  row, without that of the simulated parts and of the run's files (journal, trajectories, metrics): both are counted
  apart. The bar: at most 1.5 times from the fewest engines to the most, as the median over placements and staleness.
* overlap: 64 rows a step on two devices, as benchmarks/overlap.py has them: colocate (2 engines, then 2 ranks) and
  separate (1 and 1), also with tools that sleep (log-normal, median 50 ms, p99 1 s). More staleness must not be slower.
* filtered: 30 % of the groups filtered, 10 % failed. The bar: the last quarter of the steps takes as long as the first,
  within 5 %; the steps in which the pipe fills and empties are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.simulate_costs import Costs
    from benchmarks.simulate_run import Setting

HERE = Path(__file__).resolve().parent
FLAT, EVEN, SLOWER = 1.5, 0.05, 0.01
"""The bars: growth of control a row; difference of the quarters; how much slower more staleness may be (noise)."""
PLACEMENTS: tuple[Literal["colocate", "separate"], ...] = ("colocate", "separate")
FILTERED, FAILED = 0.3, 0.1
Say = Callable[[str], None]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write everything here")
    p.add_argument("--engines", type=int, nargs="+", default=[8, 32, 128, 512])
    p.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    p.add_argument("--rows", type=int, default=4, help="rows a step for each engine; a group has 8")
    p.add_argument("--window", type=int, default=2400, help="rows that are measured, at least; and at least 4 steps")
    p.add_argument("--steps", type=int, default=400, help="of each run with filtered and failed groups")
    p.add_argument("--seeds", type=int, default=4, help="such runs for each staleness")
    p.add_argument("--measure", action="store_true", help="measure the costs now (20 s); default: the recorded ones")
    p.add_argument("--quick", action="store_true", help="a small part of everything, in seconds")
    p.add_argument("--profile", action="store_true", help="what grows: profile the fewest and the most engines")
    a = p.parse_args(words)
    if a.quick:
        a.engines, a.staleness, a.window, a.steps, a.seeds = [8, 32], [0, 2], 96, 80, 1
    if (
        min(*a.engines, a.rows, a.window, a.steps, a.seeds) < 1
        or min(a.staleness) < 0
        or any(e * a.rows % 8 for e in a.engines)
    ):
        p.error("counts must be 1 or more, staleness 0 or more, and engines x rows a multiple of 8")
    return a


# --- what is run ------------------------------------------------------------------------------------------------------


def scale(a: argparse.Namespace) -> Iterator[Setting]:
    from benchmarks.simulate_run import Setting

    for engines in sorted(a.engines):
        for placement in PLACEMENTS:
            for staleness in a.staleness:
                rows, period = engines * a.rows, staleness + 1
                steps = max(4, math.ceil(a.window / rows))
                yield Setting(
                    engines, engines, placement, staleness, rows // 8,
                    warmup=period, measured=period * math.ceil(steps / period),  # groups start in waves
                )  # fmt: skip


def overlap(a: argparse.Namespace) -> Iterator[Setting]:
    from benchmarks.simulate_run import Setting

    for tools in (0,) if a.quick else (0, 2):
        for placement in PLACEMENTS:
            devices = 2 if placement == "colocate" else 1
            for staleness in a.staleness:
                yield Setting(
                    devices, devices, placement, staleness, groups_per_step=8, tools=tools,
                    warmup=staleness + 1, measured=math.ceil(a.window / 64),
                )  # fmt: skip


def filtered(a: argparse.Namespace) -> Iterator[Setting]:
    from benchmarks.simulate_run import Setting

    for staleness in (1,) if a.quick else (0, 1, 2):
        for seed in range(a.seeds):
            yield Setting(
                8, 8, "separate", staleness, groups_per_step=8, group_size=2,
                filtered=FILTERED / (1 - FAILED), failed=FAILED, steps=a.steps, seed=seed,
            )  # fmt: skip


def run_all(settings: Iterator[Setting], costs: Costs, say: Say) -> list[dict[str, Any]]:
    from benchmarks.simulate_run import simulate

    found = []
    for s in settings:
        began = time.process_time()
        found.append(result := simulate(s, costs))
        say(
            f"{s.engines:4} engines  {s.placement:8}  staleness {s.staleness}  tools {s.tools}  "
            f"{result['steps_per_h']:8,.0f} steps/h  control {result['control_us_per_row']:4.0f} us/row  "
            f"({time.process_time() - began:.1f} s of CPU)"
        )
    return found


# --- what it says -----------------------------------------------------------------------------------------------------


def growth(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Control a row with the most engines by that with the fewest, for each placement and staleness.

    ``over_least``: by the least of all sizes, since few rows a step make what is done once a step dear for each.
    """
    of: dict[tuple[str, int], dict[int, float]] = {}
    for r in found:
        s = r["setting"]
        of.setdefault((s["placement"], s["staleness"]), {})[s["engines"]] = r["control_us_per_row"]
    ratios = {f"{p} {s}": values[max(values)] / values[min(values)] for (p, s), values in of.items()}
    over_least = statistics.median(values[max(values)] / min(values.values()) for values in of.values())
    median = statistics.median(ratios.values())
    return {"ratios": ratios, "median": median, "over_least": over_least, "reached": median <= FLAT}


def ranking(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Staleness from the fastest to the slowest, by placement and tools; whether more is never slower."""
    of: dict[str, list[tuple[int, float]]] = {}
    for r in found:
        s = r["setting"]
        of.setdefault(f"{s['placement']} tools {s['tools']}", []).append((s["staleness"], r["steps_per_h"]))
    orders = {name: [s for s, _ in sorted(pairs, key=lambda p: -p[1])] for name, pairs in of.items()}
    rising = [
        later >= earlier * (1 - SLOWER)
        for pairs in of.values()
        for (_, earlier), (_, later) in zip(sorted(pairs), sorted(pairs)[1:], strict=False)
    ]
    return {"fastest_first": orders, "reached": all(rising)}


def quarters(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Virtual seconds of the first and the last quarter of the steps of whole runs of one staleness, together."""
    staleness = runs[0]["setting"]["staleness"]
    first = last = 0.0
    groups: Counter[str] = Counter()
    for r in runs:
        inside = r["step_ends_s"][staleness : len(r["step_ends_s"]) - staleness - 1]
        quarter = (len(inside) - 1) // 4
        first += inside[quarter] - inside[0]
        last += inside[-1] - inside[-1 - quarter]
        groups.update(r["groups"])
    shares = {name: groups[name] / groups["issued"] for name in ("filtered", "failed")}
    ended = ("trained", "filtered", "failed", "dropped", "in_flight")
    accounted = all(r["groups"]["issued"] == sum(r["groups"][name] for name in ended) for r in runs)
    max_lag = max(r["max_lag"] for r in runs)
    found = {"staleness": staleness, "first_s": first, "last_s": last, "ratio": last / first, "shares": shares}
    reached = abs(last / first - 1) <= EVEN and accounted and max_lag <= staleness
    return found | {"accounted": accounted, "max_lag": max_lag, "reached": reached}


def by_staleness(found: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    values = sorted({r["setting"]["staleness"] for r in found})
    return [[r for r in found if r["setting"]["staleness"] == value] for value in values]


def table(found: Sequence[dict[str, Any]], title: str, caption: str) -> Table:
    result = Table(title=title, caption=caption)
    for heading in ("engines", "placed", "stale", "tools", "steps/h", "rows/s/device", "engine idle", "trainer wait"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("tokens by lag", no_wrap=True)
    result.add_column("control us/row", justify="right", no_wrap=True)
    for r in found:
        s = r["setting"]
        devices = s["engines"] + (s["ranks"] if s["placement"] == "separate" else 0)
        result.add_row(
            str(s["engines"]),
            s["placement"],
            str(s["staleness"]),
            str(s["tools"]),
            f"{r['steps_per_h']:,.0f}",
            f"{r['rows_per_s'] / devices:.2f}",
            f"{r['engine_idle']:.0%}",
            f"{r['trainer_wait']:.0%}",
            " ".join(f"{lag}:{share:.0%}" for lag, share in r["lags"].items()),
            f"{r['control_us_per_row']:.0f}",
        )
    return result


def report(a: argparse.Namespace, costs: Costs, say: Say) -> dict[str, Any]:
    found = {name: run_all(make(a), costs, say) for name, make in
             (("scale", scale), ("overlap", overlap), ("filtered", filtered))}  # fmt: skip
    judged = {"growth": growth(found["scale"]), "ranking": ranking(found["overlap"])}
    return {**found, **judged, "quarters": [quarters(runs) for runs in by_staleness(found["filtered"])]}


def conclusions(found: dict[str, Any], engines: Sequence[int]) -> Iterator[str]:
    def word(part: dict[str, Any]) -> str:
        return "reached" if part["reached"] else "missed"

    ratios = found["growth"]["ratios"].values()
    yield (
        f"{word(found['growth'])}: control a row grows {found['growth']['median']:.2f} times ({min(ratios):.2f} to "
        f"{max(ratios):.2f}) from {min(engines)} to {max(engines)} engines (allowed: {FLAT:g}), and "
        f"{found['growth']['over_least']:.2f} times from the size that needs least"
    )
    orders = "; ".join(f"{name}: {' '.join(map(str, o))}" for name, o in found["ranking"]["fastest_first"].items())
    yield f"{word(found['ranking'])}: more staleness is never slower; the fastest first: {orders}"
    for q in found["quarters"]:
        yield (
            f"{word(q)}: staleness {q['staleness']} with {q['shares']['filtered']:.0%} filtered and "
            f"{q['shares']['failed']:.0%} failed: the last quarter of the steps takes {q['ratio']:.3f} times the first"
        )


def grown(a: argparse.Namespace, costs: Costs) -> Iterator[str]:
    """Functions whose own time a row grows most, with profiles of the fewest and the most engines."""
    from benchmarks.simulate_profile import differences
    from benchmarks.simulate_run import simulate

    with tempfile.TemporaryDirectory() as folder:
        files = []
        few, many = (next(s for s in scale(a) if s.engines == n) for n in (min(a.engines), max(a.engines)))
        for s in (few, many):
            simulate(s.changed(placement="separate"), costs, file := Path(folder) / f"{s.engines}.prof")
            files.append((file, s.rows_per_step * (s.warmup + s.measured)))
        yield from differences(*files)


def main() -> None:
    a = arguments()
    sys.path.insert(0, str(HERE.parent))
    from benchmarks.embedded import machine
    from benchmarks.simulate_costs import HOW, RECORDED, measure

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)

    def say(line: str) -> None:
        console.print(line, highlight=False)

    started, cpu = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.process_time()
    costs, raw = measure() if a.measure else (RECORDED, {"recorded": True})
    found = report(a, costs, say)
    caption = "virtual time; idle and wait: shares of the time in which nothing is computed"
    console.print(table(found["scale"], f"{a.rows} rows a step for each engine", caption))
    console.print(table(found["overlap"], "64 rows a step on two devices", caption))
    for line in conclusions(found, a.engines):
        say(line)
    for line in grown(a, costs) if a.profile else ():
        say(line)
    if a.json:
        settings = {name: value for name, value in vars(a).items() if name != "json"}
        head: dict[str, Any] = {"started": started, "machine": machine(), "settings": settings}
        head |= {"costs": asdict(costs) | {"how": HOW, "timings": raw}, "cpu_s": time.process_time() - cpu}
        a.json.write_text(json.dumps(head | found))


if __name__ == "__main__":
    main()
