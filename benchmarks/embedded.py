"""Relax beside a bare loop and TRL on the same work, on a CPU: a table, the bars, and every raw timing as JSON.

    python benchmarks/embedded.py [--json FILE] [--rounds 3] [--steps 10] [--threads 1] [--only fixed|tail] [--skip trl]

Each round runs every contender once, each in a fresh process, one after the other. A ratio compares two processes of
the same round; the median over the rounds counts. README.md says what is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
COMPLETIONS = 256
FIXED_TOKENS = COMPLETIONS * 64
BUSY = 1.15
"""A one-thread process that takes this many times its CPU time was kept waiting by something else."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A script that trains on the work and writes what it measured as JSON."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """Relax must reach ``least`` times the speed of ``peer`` on this work."""

    lengths: str
    peer: str
    least: float


RELAX = Contender("relax", "relax_work.py")
TRL = Contender("trl", "peers/trl_cpu.py")
FIXED = (
    RELAX,
    Contender("bare-hf-shared", "peers/bare_loop.py", ("--impl", "hf-shared")),
    TRL,
    Contender("bare-hf", "peers/bare_loop.py", ("--impl", "hf")),
    Contender("bare-raw", "peers/bare_loop.py", ("--impl", "raw")),
)
TAIL = (
    Contender("relax", "relax_work.py", ("--tail",)),
    Contender("trl", "peers/trl_cpu.py", ("--tail",)),
)
WORKS = {"fixed": FIXED, "tail": TAIL}
BARS = (Bar("fixed", "bare-hf-shared", 0.9), Bar("fixed", "trl", 1.0), Bar("tail", "trl", 1.4))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every timing here")
    p.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    p.add_argument("--steps", type=int, default=10, help="measured steps of each process")
    p.add_argument("--warmup", type=int, default=2, help="steps before them, at least 1")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--only", choices=[*WORKS], help="completions of one length, or heavy-tailed lengths")
    p.add_argument("--skip", action="append", default=[], choices=[c.name for c in FIXED[1:]], help="leave a peer out")
    a = p.parse_args(words)
    if min(a.rounds, a.steps, a.warmup, a.threads) < 1:
        p.error("--rounds, --steps, --warmup and --threads must be 1 or more")
    return a


# --- running --------------------------------------------------------------------------------------------------------


def run(contender: Contender, a: argparse.Namespace, lengths: str) -> dict[str, Any]:
    """Train in a fresh process and return what it measured, checked. Exits with its last lines when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        sizes = {"--threads": a.threads, "--steps": a.steps, "--warmup": a.warmup, "--json": out}
        command = [sys.executable, str(HERE / contender.script), "--work", "a", *contender.arguments]
        command += [str(word) for pair in sizes.items() for word in pair]
        # Set for all alike, before their torch is loaded.
        environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "MKL_NUM_THREADS": str(a.threads)}
        before = os.getloadavg()[0]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            hint = " (make bench installs the peers)" if "No module named" in tail else ""
            raise SystemExit(f"{contender.name} ended with {done.returncode}{hint}; its last lines:\n{tail}")
        result: dict[str, Any] = json.loads(out.read_text())
    check(contender.name, result, lengths, a)
    return result | {"framework": contender.name, "lengths": lengths, "load_before": before}


def check(name: str, result: dict[str, Any], lengths: str, a: argparse.Namespace) -> None:
    """Whether a process did the work that it was given, and learned from it."""
    problems = []
    if len(result["step_s"]) != a.steps:
        problems.append(f"measured {len(result['step_s'])} steps, not {a.steps}")
    completions = result["completions_per_s"] * sum(result["step_s"]) / a.steps
    if abs(completions - COMPLETIONS) > 1e-6 * COMPLETIONS:
        problems.append(f"made {completions} completions a step, not {COMPLETIONS}")
    if lengths == "fixed" and result["tokens_per_step"] != FIXED_TOKENS:
        problems.append(f"sampled {result['tokens_per_step']} tokens a step, not {FIXED_TOKENS}")
    if not result["reward_last"] > result["reward_first"]:
        problems.append(f"reward went from {result['reward_first']} to {result['reward_last']}: it must rise")
    if problems:
        raise SystemExit(f"{name}: {'; '.join(problems)}")


def unlike(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where contenders of one kind of work did not sample as much as Relax, or did not learn about as fast."""
    ours, *peers = [runs for _, runs in by_framework(found)]
    tokens = mean(ours, "tokens_per_step")
    rise = mean(ours, "reward_last") - mean(ours, "reward_first")
    for runs in peers:
        name, theirs = runs[0]["framework"], mean(runs, "tokens_per_step")
        # Each contender draws its heavy-tailed lengths itself, the same ones in every round; their deviation is about
        # as large as their mean.
        allowed = 4 * math.sqrt(2 / (COMPLETIONS * runs[0]["steps"]))
        if abs(tokens / theirs - 1) > allowed:
            yield f"relax sampled {tokens:.0f} tokens a step, {name} {theirs:.0f}"
        other = mean(runs, "reward_last") - mean(runs, "reward_first")
        if not 0.5 < rise / other < 2:
            yield f"relax's reward rose by {rise:.3f}, that of {name} by {other:.3f}"


def busy(found: Sequence[dict[str, Any]]) -> list[str]:
    """The frameworks that were kept waiting; known with one thread only."""
    return [
        name
        for name, runs in by_framework(found)
        if mean(runs, "step_s_median") > BUSY * mean(runs, "cpu_s_per_step") and runs[0]["threads"] == 1
    ]


def by_framework(found: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Relax first, then its peers as they came."""
    names = sorted(dict.fromkeys(r["framework"] for r in found), key=lambda name: name != "relax")
    return [(name, [r for r in found if r["framework"] == name]) for name in names]


def mean(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(r[key] for r in runs)


def rounds(a: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Every process, in alternation; each round begins with another contender."""
    works = {name: [c for c in WORKS[name] if c.name not in a.skip] for name in WORKS if a.only in (None, name)}
    for number in range(a.rounds):
        for lengths, contenders in works.items():
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                result = run(contender, a, lengths)
                console.print(
                    f"round {number + 1}/{a.rounds}  {lengths:5}  {contender.name:14}  "
                    f"{result['step_s_median']:.2f} s a step",
                    highlight=False,
                )
                yield result | {"round": number}


# --- comparing ------------------------------------------------------------------------------------------------------


def ratios(found: Sequence[dict[str, Any]], key: str = "step_s_median") -> dict[str, list[float]]:
    """By peer: how many times as long as Relax it took, round by round."""
    ours = {r["round"]: r[key] for r in found if r["framework"] == "relax"}
    return {name: [r[key] / ours[r["round"]] for r in runs] for name, runs in by_framework(found)}


def judged(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each bar whose peer ran, with the ratio that counts."""
    result = []
    for bar in BARS:
        of_work = [r for r in found if r["lengths"] == bar.lengths]
        times = ratios(of_work).get(bar.peer)
        if times:
            ratio = statistics.median(times)
            by_cpu = statistics.median(ratios(of_work, "cpu_s_per_step")[bar.peer])
            result.append(
                asdict(bar) | {"ratio": ratio, "by_cpu": by_cpu, "rounds": times, "reached": ratio >= bar.least}
            )
    return result


def table(found: Sequence[dict[str, Any]], title: str) -> Table:
    caption = "ratio: how many times as fast Relax is, median of the rounds (least to most); by CPU: in CPU time"
    result = Table(title=title, caption=caption)
    result.add_column("framework")
    for heading in ("step s", "min", "max", "completions/s", "tokens/s", "CPU s", "RSS MB", "ratio", "by CPU"):
        result.add_column(heading, justify="right", no_wrap=True)
    wall, burn = ratios(found), ratios(found, "cpu_s_per_step")
    for name, runs in by_framework(found):
        step, cpu, rss = (statistics.median(r[k] for r in runs) for k in ("step_s_median", "cpu_s_per_step", "rss_mb"))
        ours = name == "relax"
        result.add_row(
            name,
            f"{step:.2f}",
            f"{min(r['step_s_min'] for r in runs):.2f}",
            f"{max(r['step_s_max'] for r in runs):.2f}",
            f"{COMPLETIONS / step:.1f}",
            f"{mean(runs, 'tokens_per_step') / step:,.0f}",
            f"{cpu:.2f}",
            f"{rss:,.0f}",
            "" if ours else f"{statistics.median(wall[name]):.2f} ({min(wall[name]):.2f} to {max(wall[name]):.2f})",
            "" if ours else f"{statistics.median(burn[name]):.2f}",
        )
    return result


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def main() -> None:
    a = arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    found = list(rounds(a, console))
    bars = judged(found)
    if a.json:
        settings = {"rounds": a.rounds, "steps": a.steps, "warmup": a.warmup, "threads": a.threads}
        report = {"started": started, "machine": machine(), "settings": settings, "bars": bars, "runs": found}
        a.json.write_text(json.dumps(report, indent=1))
    problems = []
    for lengths in dict.fromkeys(r["lengths"] for r in found):
        of_work = [r for r in found if r["lengths"] == lengths]
        words = "64 tokens each" if lengths == "fixed" else "heavy-tailed, 4 to 64 tokens"
        title = f"{COMPLETIONS} completions a step, {words}; threads: {a.threads}, processes: {a.rounds}"
        console.print(table(of_work, title))
        problems += [f"{lengths}: {line}" for line in unlike(of_work)]
    for bar in bars:
        verdict = "reached" if bar["reached"] else "missed"
        wanted = f"at least {bar['least']} x {bar['peer']}, {bar['lengths']} lengths"
        console.print(f"{verdict}: {bar['ratio']:.2f}, by CPU {bar['by_cpu']:.2f} ({wanted})", highlight=False)
    if late := busy(found):
        console.print(f"note: this machine was busy ({', '.join(late)} had to wait): measure on an idle one")
    if problems:
        raise SystemExit("not comparable: " + "; ".join(problems))


if __name__ == "__main__":
    main()
