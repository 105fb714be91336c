"""Relax beside a bare loop and TRL on the same work, on a CPU: a table, the bars, and every raw timing as JSON.

    python benchmarks/embedded.py [--json FILE] [--rounds 3] [--steps 10] [--threads 1] [--only fixed|tail] [--skip trl]

Each round runs every contender once, each in a fresh process, one after the other. A ratio compares two processes of
the same round; the median over the rounds counts. README.md says what is measured.
"""

from __future__ import annotations

import argparse
import json
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
TAIL_TOLERANCE = 0.1
"""Contenders draw their heavy-tailed lengths from one distribution, each by itself: means may differ this much."""


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


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every timing here")
    p.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    p.add_argument("--steps", type=int, default=10, help="measured steps of each process")
    p.add_argument("--warmup", type=int, default=2, help="steps before them, at least 1")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--only", choices=[*WORKS], help="completions of one length, or heavy-tailed lengths")
    p.add_argument("--skip", action="append", default=[], choices=[c.name for c in FIXED[1:]], help="leave a peer out")
    a = p.parse_args()
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


def compare_work(found: Sequence[dict[str, Any]]) -> None:
    """Whether all contenders of one kind of work sampled as much as Relax and learned about as fast."""
    ours = [r for r in found if r["framework"] == "relax"]
    for peer in [r for r in found if r["framework"] != "relax"]:
        tokens = [statistics.fmean(r["tokens_per_step"] for r in ours), peer["tokens_per_step"]]
        rises = [statistics.fmean(r["reward_last"] - r["reward_first"] for r in ours)]
        rises.append(peer["reward_last"] - peer["reward_first"])
        if abs(tokens[0] / tokens[1] - 1) > TAIL_TOLERANCE:
            raise SystemExit(f"relax sampled {tokens[0]:.0f} tokens a step, {peer['framework']} {tokens[1]:.0f}")
        if not 0.5 < rises[0] / rises[1] < 2:
            raise SystemExit(f"relax's reward rose by {rises[0]:.3f}, that of {peer['framework']} by {rises[1]:.3f}")


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


def speed(result: dict[str, Any]) -> float:
    """Completions per second of the process's median step."""
    return COMPLETIONS / float(result["step_s_median"])


def ratios(found: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """By peer: how many times as fast Relax was, round by round."""
    ours = {r["round"]: speed(r) for r in found if r["framework"] == "relax"}
    result: dict[str, list[float]] = {}
    for r in found:
        result.setdefault(r["framework"], []).append(ours[r["round"]] / speed(r))
    return result


def judged(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each bar whose peer ran, with the ratio that counts."""
    result = []
    for bar in BARS:
        mine = ratios([r for r in found if r["lengths"] == bar.lengths])
        if bar.peer in mine:
            ratio = statistics.median(mine[bar.peer])
            result.append(asdict(bar) | {"ratio": ratio, "rounds": mine[bar.peer], "reached": ratio >= bar.least})
    return result


def table(found: Sequence[dict[str, Any]], title: str) -> Table:
    result = Table(title=title, caption="relax is: how many times as fast Relax is; median of the rounds (min to max)")
    result.add_column("framework")
    for heading in ("step s", "min", "max", "completions/s", "tokens/s", "CPU s/step", "RSS MB", "relax is"):
        result.add_column(heading, justify="right")
    by_peer = ratios(found)
    for name, values in by_peer.items():
        runs = [r for r in found if r["framework"] == name]
        median = {key: statistics.median(r[key] for r in runs) for key in ("step_s_median", "cpu_s_per_step", "rss_mb")}
        tokens = statistics.fmean(r["tokens_per_step"] for r in runs)
        ratio = "" if name == "relax" else f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        result.add_row(
            name,
            f"{median['step_s_median']:.2f}",
            f"{min(r['step_s_min'] for r in runs):.2f}",
            f"{max(r['step_s_max'] for r in runs):.2f}",
            f"{COMPLETIONS / median['step_s_median']:.1f}",
            f"{tokens / median['step_s_median']:,.0f}",
            f"{median['cpu_s_per_step']:.2f}",
            f"{median['rss_mb']:,.0f}",
            ratio,
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
    for lengths in dict.fromkeys(r["lengths"] for r in found):
        of_work = [r for r in found if r["lengths"] == lengths]
        compare_work(of_work)
        words = "64 tokens each" if lengths == "fixed" else "heavy-tailed, 4 to 64 tokens"
        title = f"{COMPLETIONS} completions a step, {words}; threads: {a.threads}, processes: {a.rounds}"
        console.print(table(of_work, title))
    for bar in bars:
        verdict = "reached" if bar["reached"] else "missed"
        wanted = f"at least {bar['least']} x {bar['peer']}, {bar['lengths']} lengths"
        console.print(f"{verdict}: {bar['ratio']:.2f} ({wanted})", highlight=False)


if __name__ == "__main__":
    main()
