"""Sampling beside training, on two cores: settings of placement and staleness side by side, a table, and the bars.

    python benchmarks/overlap.py [--json FILE] [--rounds 1] [--steps 8] [--only lengths|tools|a] [--skip trl]
                                 [--runtime ray|local] [--quick]

``lengths``: 64 replies a step with lengths like reasoning. ``tools``: the same tokens in two or three turns, with tools
that sleep between them. Both run with two engines and two ranks that take turns (colocate), and with one engine beside
one rank (separate) at max_staleness 0, 1, 2 and 4. ``a``: work A of the peers with engine and trainer in two processes
at max_staleness 1, beside TRL with 2 threads. Each run has a fresh process (overlap_work.py), one after the other; each
round begins with another one. overlap_plugin.py fixes lengths and latencies, overlap_bars.py says what the ideal is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]  # run as a script, this file lies where its siblings are no package

from benchmarks import overlap_bars as bars  # noqa: E402
from benchmarks.embedded import machine  # noqa: E402

STALENESS = {"lengths": 2, "tools": 2, "a": 1}
"""Where separate must reach the bar, by work."""
CORES = 2
QUICK_LIMIT = 48
"""Most tokens of a play in a smoke test."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one process runs. ``rest_s``: its trainer rests so long each step, and computes nothing."""

    work: str
    placement: str = "separate"
    staleness: int = 0
    rest_s: float | None = None

    def words(self, a: argparse.Namespace) -> list[str]:
        # Work A is about two processes of one machine: the local runtime.
        runtime = "local" if self.work == "a" else a.runtime
        found = ["--work", self.work, "--placement", self.placement, "--staleness", str(self.staleness)]
        found += ["--runtime", runtime, "--steps", str(a.steps), "--warmup", str(a.warmup)]
        found += ["--set", f"environments.0.limit={QUICK_LIMIT}"] if a.quick else []
        return found if self.rest_s is None else [*found, "--rest", str(self.rest_s)]


TRL = "trl"
Contender = Setting | str
"""A setting of Relax, or the name of a peer."""


def contenders(work: str) -> list[Contender]:
    """Without the run whose trainer rests: ``rounds`` adds it."""
    if work == "a":
        return [Setting(work, staleness=STALENESS[work]), TRL, Setting(work)]
    return [Setting(work, "colocate"), *(Setting(work, staleness=k) for k in (2, 0, 1, 4))]


def quick() -> list[Contender]:
    """Short runs that show whether everything works; nothing can be concluded from them."""
    real = Setting("lengths", staleness=2)
    return [Setting("lengths", "colocate"), real, replace(real, rest_s=0.1)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every timing here")
    p.add_argument("--rounds", type=int, default=1, help="processes of each setting")
    p.add_argument("--steps", type=int, default=8, help="measured steps of each process")
    p.add_argument("--warmup", type=int, default=5, help="steps before them; more than the staleness, to fill up")
    p.add_argument("--only", choices=[*STALENESS], help="one work alone")
    p.add_argument("--skip", action="append", default=[], choices=[TRL], help="leave a peer out")
    p.add_argument("--runtime", choices=["ray", "local"], default="ray", help="of lengths and tools")
    p.add_argument("--quick", action="store_true", help="short runs with the local runtime: a smoke test")
    a = p.parse_args(words)
    if a.quick:
        a.rounds, a.steps, a.warmup, a.runtime = 1, 2, 2, "local"
    if min(a.rounds, a.steps - 1, a.warmup) < 1:
        p.error("--rounds and --warmup must be 1 or more, --steps 2 or more")
    return a


# --- running ----------------------------------------------------------------------------------------------------------


def run(contender: Contender, a: argparse.Namespace) -> dict[str, Any]:
    """Train in a fresh process on the first two cores, and return what it measured. Exits with its last lines when it
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        if isinstance(contender, Setting):
            command = [str(HERE / "overlap_work.py"), *contender.words(a)]
            threads, about = 1, {"framework": "relax"}
        else:
            sizes = ["--threads", str(CORES), "--steps", str(a.steps), "--warmup", str(a.warmup)]
            command = [str(HERE / "peers/trl_cpu.py"), "--work", "a", *sizes]
            threads, about = CORES, {"framework": TRL, "work": "a"}
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        before = os.getloadavg()[0]
        words = [sys.executable, *command, "--json", str(out)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, preexec_fn=_two_cores)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}; its last lines:\n{tail}")
        result: dict[str, Any] = json.loads(out.read_text())
    return result | about | {"load_before": before}


def _two_cores() -> None:
    """In the process to be: every setting gets the same two cores, on a machine of any size."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def rounds(a: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Every process, in alternation; each round begins with another contender."""
    if a.quick:
        chosen = {"lengths": quick()}
    else:
        chosen = {work: contenders(work) for work in STALENESS if a.only in (None, work)}
    if "a" in chosen and (TRL in a.skip or importlib.util.find_spec("trl") is None):
        if TRL not in a.skip:
            console.print("TRL is not installed and is left out; make bench installs it")
        chosen["a"].remove(TRL)
    for number in range(a.rounds):
        for work, listed in chosen.items():
            shift = number % len(listed)
            waiting = listed[shift:] + listed[:shift]
            while waiting:
                contender = waiting.pop(0)
                result = run(contender, a) | {"round": number}
                step = bars.mean(result["step_s"])
                words = f"round {number + 1}/{a.rounds}  {work:7}  {bars.label(result):27}  {step:.2f} s a step"
                console.print(words, highlight=False)
                yield result
                if contender == Setting(work):  # now it is known how long the trainer is to rest
                    rest_s = bars.mean(result["compute_s"])
                    waiting.insert(0, Setting(work, staleness=STALENESS[work], rest_s=rest_s))


# --- showing ----------------------------------------------------------------------------------------------------------


def settings_of(found: Sequence[dict[str, Any]], work: str) -> list[list[dict[str, Any]]]:
    """The runs of Relax on a work, by setting."""
    of_work = [r for r in found if r["work"] == work and r["framework"] == "relax"]
    return [[r for r in of_work if bars.label(r) == name] for name in dict.fromkeys(map(bars.label, of_work))]


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    result = Table(title=title, caption="lag: share of trained tokens by steps behind; CPU s: of all processes, a step")
    result.add_column("setting", no_wrap=True)
    for heading in ("steps/h", "step s", "min", "max", "wait s", "engine idle", "played", "trained", "reward", "CPU s"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("lag")
    for r in rows:
        result.add_row(
            r["setting"],
            f"{r['steps_per_hour']:,.0f}",
            f"{r['step_s']:.2f}",
            f"{r['step_s_min']:.2f}",
            f"{r['step_s_max']:.2f}",
            f"{r['trainer_wait_s']:.2f}",
            f"{r['engine_idle']:.0%}",
            "" if r["length_played"] is None else f"{r['length_played']:.1f}",
            f"{r['length_trained']:.1f}",
            f"{r['reward_last']:.3f}",
            f"{r['cpu_s_per_step']:.2f}",
            " ".join(f"{lag}:{share:.0%}" for lag, share in r["lag_tokens"].items()),
        )
    return result


def ratios(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast separate is, at the bar's staleness, as what it is compared with."""
    result: list[dict[str, Any]] = []
    for work, bound in STALENESS.items():
        of_work = [r for r in found if r["work"] == work]

        def own(r: dict[str, Any], bound: int = bound) -> bool:
            return bars.label(r) == f"separate@{bound}"

        for peer in ("colocate", "separate@0", TRL):
            ratio = bars.against(of_work, lambda r, peer=peer: bars.label(r) == peer, own)  # type: ignore[misc]
            if ratio is not None:
                result.append({"work": work, "setting": f"separate@{bound}", "peer": peer, "ratio": ratio})
    return result


def report(found: Sequence[dict[str, Any]], a: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import overlap_plugin as scenario

    names = ("LIMIT", "MEDIAN_SHARE", "AT_LIMIT", "TOOL_MEDIAN_S", "TOOL_P99_S")
    works = dict.fromkeys(r["work"] for r in found)
    return {
        "machine": machine(),
        "settings": {"rounds": a.rounds, "steps": a.steps, "warmup": a.warmup, "runtime": a.runtime, "quick": a.quick},
        "scenario": {name.lower(): getattr(scenario, name) for name in names},
        "bars": [] if a.quick else bars.judged(found, STALENESS),
        "ratios": [] if a.quick else ratios(found),
        "tables": {work: [bars.row(runs) for runs in settings_of(found, work)] for work in works},
        "problems": bars.unlike(found),
        "contenders": [asdict(c) if isinstance(c, Setting) else c for work in works for c in contenders(work)],
        "runs": list(found),
    }


def main() -> None:
    a = arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    result = {"started": started} | report(list(rounds(a, console)), a)
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))
    for work, rows in result["tables"].items():
        console.print(table(rows, f"{work}: {a.steps} measured steps, {a.rounds} processes of each setting"))
    for ratio in result["ratios"]:
        line = f"{ratio['work']}: {ratio['setting']} is {ratio['ratio']:.2f} times as fast as {ratio['peer']}"
        console.print(line, highlight=False)
    for bar in result["bars"]:
        verdict = "reached" if bar["ok"] else "missed"
        first = bar["rounds"][0]
        phases = f"generate {first['generate_s']:.2f} s, train {first['train_s']:.2f} s, step {first['step_s']:.2f} s"
        words = f"{bar['work']}: {bar['reached']:.2f} of the ideal (at least {bar['least']}); first round: {phases}"
        console.print(f"{verdict}: {words}", highlight=False)
    if result["problems"]:
        raise SystemExit("not comparable: " + "; ".join(result["problems"]))


if __name__ == "__main__":
    main()
