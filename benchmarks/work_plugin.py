"""The peers' work as a plugin of Relax: its prompts, its reward, its model, and a clock.

A run file names it under ``plugins`` like any other; relax_work.py hands its entry point to the plugin look-up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from relax_core.hookspecs import API_VERSION, Callback, StepEnd
from relax_core.interfaces import Component, ComponentConfig, Environment, Reward
from relax_core.models.config import TextConfig
from relax_core.types import Task, Trajectory, user

if TYPE_CHECKING:
    from relax_core.chat import Chat
    from relax_core.run import Run

relax_api = API_VERSION


def relax_environments() -> Mapping[str, Component]:
    return {"work": Component("benchmarks.work_plugin:Prompts", summary="The peers' prompts, one reply each.")}


def relax_rewards() -> Mapping[str, Component]:
    return {"share": Component("benchmarks.work_plugin:Share", summary="The share of one token in the reply.")}


def relax_models() -> Mapping[str, Component]:
    return {"work": Component("benchmarks.work_model:WorkAdapter", TextConfig, "The peers' model; it never ends.")}


def relax_callbacks() -> Mapping[str, Component]:
    return {"clock": Component("benchmarks.work_plugin:Clock", summary="Wall and process time at each step's end.")}


class Prompts(Environment):
    """One prompt, one reply: of the full length, or, with ``tail``, of a heavy-tailed one."""

    class Config(ComponentConfig):
        tail: bool = False
        """Whether each play gets a length of its own, from 4 to 64 tokens."""

    config: Config

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        from benchmarks.peers.workloads import tiny_prompts

        return [Task(str(i), (user(text),)) for i, text in enumerate(tiny_prompts())]

    async def play(self, task: Task, chat: Chat) -> None:
        from benchmarks.peers.workloads import heavy_tailed

        limit = heavy_tailed(chat.random("length")) if self.config.tail else None
        await chat(*task.messages, max_new_tokens=limit)


class Share(Reward):
    """Work A's reward, on the tokens that were sampled."""

    class Config(ComponentConfig):
        token: int
        """The id that is counted."""

    config: Config

    async def __call__(self, trajectory: Trajectory) -> float:
        from benchmarks.peers.workloads import share_of_token

        ids = [
            token
            for sample in trajectory.samples
            for token, sampled in zip(sample.ids, sample.mask, strict=True)
            if sampled
        ]
        return share_of_token(self.config.token)([ids])[0]


class Clock(Callback):
    """Wall and process time, and the metrics, at the end of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.steps: list[StepEnd] = []

    def on_step_end(self, run: Run, event: StepEnd) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.steps.append(event)
