"""How fast reward ``math`` grades: answers a second in groups, and the time of one answer alone.

    python benchmarks/grading.py [--json FILE] [--answers 1000] [--group 8] [--workers 1 2] [--rounds 3]

The work is a fixed mix of golds and replies such as data sets and policies have them: numbers, fractions, roots,
expressions with variables, tuples, sets, intervals, matrices, units, percentages, words; half the replies with
reasoning before the answer, half of them wrong. Every round grades all of them once, in groups, all submitted at once;
then each alone. Workers are started and warm before the clock runs. The exit status says whether every answer got the
right reward; whether the bar (more than 300 a second with 2 workers) was reached is in the table and in the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relax_core.types import Group, Stop, Task, Trajectory, Turn, message
from relax_envs.rewards.math import Math

BAR, BAR_WORKERS = 300.0, 2
REASONING = (
    "Let me think step by step. We are given that $x^2 - 5x + 6 = 0$, so that $(x-2)(x-3) = 0$. ",
    "First I compute 12 * 7 = 84, and then I add 16, which makes 100. ",
    r"Using $\sin^2\theta + \cos^2\theta = 1$ we get \[\frac{1}{2}\left(1 - \cos 2\theta\right).\] ",
    "Wait, that is not right, since 17 is prime. Let me check it again.\n\n",
)
FRAMES = (
    r"So the answer is $\boxed{%s}$.",
    r"\boxed{%s}",
    "The answer is $%s$.",
    "Answer: %s",
    r"Thus \[ \boxed{%s} \]",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One round. Times of one answer alone are in milliseconds."""

    workers: int
    rate: float
    p50: float
    p99: float
    slowest: float


def pairs(rng: random.Random) -> list[tuple[str, str, str]]:
    """(gold, an equal answer, another answer), one of each kind."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(100, 9999)
    return [
        (str(c), f"{c:,}", str(c + 1)),
        (rf"\frac{{{a}}}{{{b + 100}}}", f"{a}/{b + 100}", rf"\frac{{{b}}}{{{a + 100}}}"),
        (str(a / 8), rf"\frac{{{a}}}{{8}}", str(a / 8 + 0.01)),
        (rf"{a}\sqrt{{{2 * b * b}}}", rf"{a * b}\sqrt{{2}}", rf"{a}\sqrt{{2}}"),
        (rf"\frac{{{a}\pi}}{{{b}}}", f"{a}*pi/{b}", rf"\frac{{{a}\pi}}{{{b + 1}}}"),
        (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b + 1}"),
        (f"({a},{-b})", rf"\left({a}, -{b}\right)", f"({-b},{a})"),
        (rf"\{{{a},{c}\}}", rf"\{{{c}, {a}\}}", rf"\{{{a}\}}"),
        (f"[{a},{c})", rf"{a} \le x < {c}", f"[{a},{c}]"),
        (
            rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
            rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
            f"({b},{a + b})",
        ),
        (rf"{a}\text{{ cm}}", f"{a}", f"{a + 1}"),
        (rf"{a}\%", str(a / 100), str(a)),
        (rf"\text{{Tuesday, {a} cows}}", f"Tuesday, {a} cows", "Wednesday"),
        (f"y = {a}x - {b}", f"{a}x-{b}", f"{b}x-{a}"),
        (f"2^{{{a}}}", f"2 \\cdot 2^{{{a - 1}}}", f"2^{{{a - 1}}}"),
        (rf"\log_{{2}} {2 ** (a % 9)}", str(a % 9), str(a % 9 + 1)),
    ]


def work(answers: int, group: int) -> list[tuple[Group, list[float]]]:
    """Groups with the rewards that are right."""
    rng = random.Random(0)
    found: list[tuple[Group, list[float]]] = []
    kinds: list[tuple[str, str, str]] = []
    while answers > 0:
        kinds = kinds or pairs(rng)
        gold, equal, other = kinds.pop()
        task = Task(f"t{len(found)}", (), gold)
        plays, rewards = [], []
        for member in range(min(group, answers)):
            right = rng.random() < 0.5
            reasoning = "".join(rng.choices(REASONING, k=rng.randint(2, 30))) if rng.random() < 0.5 else ""
            reply = reasoning + rng.choice(FRAMES) % (equal if right else other)
            turn = Turn((), message("assistant", reply), Stop.EOS, 1)
            plays.append(Trajectory(task, 0, member, [turn]))
            rewards.append(float(right))
        found.append((Group(task.id, len(found), task, 0, plays), rewards))
        answers -= len(plays)
    return found


async def measure(workers: int, groups: Sequence[tuple[Group, list[float]]], rounds: int) -> list[Measured]:
    """Raises SystemExit for a reward that is not right."""
    reward = Math(Math.Config(workers=workers))
    await asyncio.gather(*(reward.score_group(group) for group, _ in groups))  # warms both workers
    count = sum(len(rewards) for _, rewards in groups)
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        scores = await asyncio.gather(*(reward.score_group(group) for group, _ in groups))
        seconds = time.perf_counter() - begun
        for (group, rewards), given in zip(groups, scores, strict=True):
            if given != rewards:
                wrong = next(i for i, pair in enumerate(zip(given, rewards, strict=True)) if pair[0] != pair[1])
                reply = group.trajectories[wrong].last_reply[-200:]
                raise SystemExit(
                    f"gold {group.task.answer!r}, reply ...{reply!r}: {given[wrong]!r}, not {rewards[wrong]}"
                )
        alone = []
        for group, _ in groups:
            for trajectory in group.trajectories:
                begun = time.perf_counter()
                await reward(trajectory)
                alone.append(1000 * (time.perf_counter() - begun))
        hundredths = statistics.quantiles(alone, n=100)
        found.append(Measured(workers, count / seconds, statistics.median(alone), hundredths[98], max(alone)))
    return found


def table(found: Sequence[Measured], title: str) -> Table:
    result = Table(title=title, caption=f"medians of the rounds; bar: more than {BAR:g}/s with {BAR_WORKERS} workers")
    for heading in ("workers", "answers/s", "one alone: p50 ms", "p99 ms", "slowest ms", "bar"):
        result.add_column(heading, justify="right")
    for workers in sorted({m.workers for m in found}):
        rounds = [m for m in found if m.workers == workers]
        middle = [statistics.median(getattr(m, name) for m in rounds) for name in ("rate", "p50", "p99", "slowest")]
        bar = "" if workers != BAR_WORKERS else "reached" if middle[0] > BAR else "missed"
        result.add_row(str(workers), f"{middle[0]:,.0f}", *(f"{x:.2f}" for x in middle[1:]), bar)
    return result


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every round here")
    p.add_argument("--answers", type=int, default=1000)
    p.add_argument("--group", type=int, default=8, help="answers to one gold")
    p.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    if min(a.answers, a.group, a.rounds, *a.workers) < 1 or a.answers < 2:
        p.error("counts must be 1 or more, answers 2 or more")
    groups = work(a.answers, a.group)
    started, loads = time.strftime("%Y-%m-%dT%H:%M:%S%z"), [os.getloadavg()[0]]
    found = [m for workers in a.workers for m in asyncio.run(measure(workers, groups, a.rounds))]
    loads.append(os.getloadavg()[0])
    if a.json:
        machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
        settings = {name: value for name, value in vars(a).items() if name != "json"}
        rounds = [asdict(m) for m in found]
        rates = [m.rate for m in found if m.workers == BAR_WORKERS]
        reached = bool(rates) and statistics.median(rates) > BAR
        report = {"started": started, "machine": machine, "load": loads, "settings": settings, "rounds": rounds}
        a.json.write_text(json.dumps({**report, "bar": BAR, "reached": reached}, indent=1))
    Console().print(table(found, f"{a.answers:,} answers in groups of {a.group}"))


if __name__ == "__main__":
    main()
