"""The work of the overlap benchmark as a plugin: replies with lengths like reasoning, tools that sleep, and meters.

Every length and every latency is a function of the play's key (task, attempt, member), so that all settings train the
same groups with the same lengths in the same steps.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from benchmarks.overlap_config import MeteredEngineConfig, MeteredTrainerConfig
from relax_core.hookspecs import API_VERSION, Callback, StepEnd
from relax_core.interfaces import Component, ComponentConfig, Environment, Reward
from relax_core.models.config import TextConfig
from relax_core.types import Task, Trajectory, user

if TYPE_CHECKING:
    from relax_core.chat import Chat
    from relax_core.run import Run

relax_api = API_VERSION

WORDS = tuple(f"w{i:02d}" for i in range(61))
TARGET = "w07"
LIMIT = 384
"""Most sampled tokens of a play."""
MEDIAN_SHARE, AT_LIMIT = 0.15, 0.05
"""The median length as a share of the limit, and the share of plays that reach the limit."""
TOOL_MEDIAN_S, TOOL_P99_S = 0.05, 1.0
"""How long a tool sleeps."""


def relax_environments() -> Mapping[str, Component]:
    target = "benchmarks.overlap_plugin:Reasoning"
    return {"reasoning": Component(target, summary="Replies of log-normal length, with tools that sleep or without.")}


def relax_rewards() -> Mapping[str, Component]:
    return {"word": Component("benchmarks.overlap_plugin:WordShare", summary="The share of one word in the replies.")}


def relax_models() -> Mapping[str, Component]:
    target = "benchmarks.overlap_parts:Endless"
    return {"endless": Component(target, TextConfig, "A tiny model of words that never ends a reply.")}


def relax_engines() -> Mapping[str, Component]:
    target = "benchmarks.overlap_parts:MeteredEngine"
    return {"metered": Component(target, MeteredEngineConfig, "The embedded engine; it notes when it works.")}


def relax_trainers() -> Mapping[str, Component]:
    target = "benchmarks.overlap_parts:MeteredTrainer"
    return {"metered": Component(target, MeteredTrainerConfig, "The embedded trainer; it notes when it works.")}


def relax_callbacks() -> Mapping[str, Component]:
    return {"meter": Component("benchmarks.overlap_plugin:Meter", summary="Times, CPU and metrics of each step.")}


# --- draws ------------------------------------------------------------------------------------------------------------


def log_normal(u: float, median: float, quantile: float, at: float) -> float:
    """A log-normal value from a uniform number ``u``; its ``quantile`` lies at ``at``."""
    normal = NormalDist()
    sigma = math.log(at / median) / normal.inv_cdf(quantile)
    return median * math.exp(sigma * normal.inv_cdf(min(max(u, 1e-6), 1 - 1e-6)))


def length(u: float, limit: int = LIMIT) -> int:
    """Sampled tokens of a play: median 15 % of the limit, 5 % of the plays at the limit, at least 1."""
    return max(1, min(limit, round(log_normal(u, MEDIAN_SHARE * limit, 1 - AT_LIMIT, limit))))


def latency(u: float) -> float:
    """Seconds that a tool sleeps: median 50 ms, p99 1 s."""
    return log_normal(u, TOOL_MEDIAN_S, 0.99, TOOL_P99_S)


def parts(total: int, turns: int) -> list[int]:
    """A play's tokens, spread evenly over at most so many turns."""
    turns = min(turns, total)
    return [total * (i + 1) // turns - total * i // turns for i in range(turns)]


class Reasoning(Environment):
    """One reply; with ``tools``, two or three, and a tool that sleeps between each and the next."""

    class Config(ComponentConfig):
        limit: int = LIMIT
        tools: bool = False

    config: Config

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        rng = random.Random(0)
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(8, 24))) for _ in range(256)]
        return [Task(str(i), (user(text),)) for i, text in enumerate(texts)]

    async def play(self, task: Task, chat: Chat) -> None:
        total = length(chat.random("length"), self.config.limit)
        turns = 1 if not self.config.tools else 2 if chat.random("turns") < 0.5 else 3
        said = task.messages
        for i, part in enumerate(parts(total, turns)):
            if i:
                await asyncio.sleep(latency(chat.random("tool", i)))
                said = (user("w00 w01 w02 w03"),)
            await chat(*said, max_new_tokens=part)


class WordShare(Reward):
    """The share of one word in the replies."""

    async def __call__(self, trajectory: Trajectory) -> float:
        said = [word for turn in trajectory.turns for word in turn.reply.text.split()]
        return said.count(TARGET) / max(1, len(said))


# --- meters -----------------------------------------------------------------------------------------------------------


class Meter(Callback):
    """The end of each step on the clock that all processes share, its metrics, and CPU seconds of all processes of the
    run after the steps ``first`` and ``last`` (counted from 1)."""

    class Config(ComponentConfig):
        first: int
        last: int

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ends: list[float] = []
        self.steps: list[StepEnd] = []
        self.cpu: list[dict[int, tuple[str, float]]] = []

    def on_step_end(self, run: Run, event: StepEnd) -> None:
        self.ends.append(time.monotonic())
        self.steps.append(event)
        if len(self.ends) in (self.config.first, self.config.last):
            self.cpu.append(family_cpu())


def family_cpu() -> dict[int, tuple[str, float]]:
    """Name and CPU seconds of this process and of all that descend from it, by process id."""
    tick = os.sysconf("SC_CLK_TCK")
    found: dict[int, tuple[int, str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        except OSError:  # it ended meanwhile
            continue
        fields = text[text.rindex(")") + 2 :].split()
        name = words[0] if words and words[0].startswith("ray::") else " ".join(Path(w).name for w in words[:2])
        found[int(folder.name)] = (int(fields[1]), name, (int(fields[11]) + int(fields[12])) / tick)
    family: set[int] = set()
    new = {os.getpid()}
    while new:
        family |= new
        new = {pid for pid, (parent, _, _) in found.items() if parent in family} - family
    return {pid: found[pid][1:] for pid in family if pid in found}
