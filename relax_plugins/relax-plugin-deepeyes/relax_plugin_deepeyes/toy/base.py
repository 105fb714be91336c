"""What the toys share: scenes that are functions of (seed, toy, split, index), a first look at them, and one tool."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from relax_core.keys import generator
from relax_core.types import Decoded, MediaKind, MediaPart, Task, user
from relax_envs.lazy import LazyTasks
from relax_envs.tools.environment import ToolEnvironment
from relax_envs.tools.tool import Tool, ToolError
from relax_plugin_deepeyes.looking import Note, Source

if TYPE_CHECKING:
    import numpy as np

    from relax_core.chat import Chat


@dataclass(frozen=True, slots=True)
class Scene:
    """``whole`` is what tools look at, ``glimpse`` what is shown first. ``place``: where the answer is to be found."""

    whole: Decoded
    glimpse: MediaPart
    place: int
    answer: str


class LookToy(ToolEnvironment):
    """Made when asked for, and kept. The splits draw from different streams, so no eval task occurs in training.

    Metrics of a play: ``called`` (a call was run) and ``right_call`` (one of them looked at the right place).
    """

    name: ClassVar[str]
    prompt: ClassVar[str]
    places: ClassVar[Sequence[Any]]
    """Where the answer may be: what a right call must cover, and show little besides."""
    answers: ClassVar[Sequence[str]]

    class Config(ToolEnvironment.Config):
        seed: Annotated[int, Field(ge=0)] = 0
        """Another seed gives other scenes."""
        size: PositiveInt = 1024
        """Training scenes."""
        eval_size: PositiveInt = 256
        """Evaluation scenes."""
        announce: Literal["template", "text", "none"] = "none"
        """How the tool is declared to the policy; a tiny one cannot read what it says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._scenes: dict[tuple[str, int], Scene] = {}
        self._splits = {
            "train": LazyTasks(config.size, lambda index: self._task("train", index), keep=True),
            "eval": LazyTasks(config.eval_size, lambda index: self._task("eval", index), keep=True),
        }

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return self._splits[split]

    def tools(self, task: Task, chat: Chat) -> Sequence[Tool]:
        scene = self.scene(task.metadata["split"], task.metadata["index"])
        chat.metrics.update(called=0.0, right_call=0.0)

        async def source(kind: MediaKind, index: int) -> Decoded:
            if kind != scene.whole.kind or index:
                raise ToolError(f"There is no {kind} {index}.")
            return scene.whole

        def note(where: Any) -> None:
            chat.metrics["called"] = 1.0
            if self.shows(where, self.places[scene.place]):
                chat.metrics["right_call"] = 1.0

        return [self.tool(source, note)]

    def scene(self, split: str, index: int) -> Scene:
        if (split, index) not in self._scenes:
            rng = generator(self.config.seed, self.name, split, index)
            place, answer = int(rng.integers(len(self.places))), self.answers[int(rng.integers(len(self.answers)))]
            self._scenes[split, index] = Scene(*self.make(rng, place, answer), place, answer)
        return self._scenes[split, index]

    def _task(self, split: str, index: int) -> Task:
        scene = self.scene(split, index)
        messages = (user(self.prompt, scene.glimpse),)
        return Task(f"{self.name}-{split}-{index}", messages, scene.answer, {"split": split, "index": index})

    @abstractmethod
    def make(self, rng: np.random.Generator, place: int, answer: str) -> tuple[Decoded, MediaPart]:
        """The whole and the glimpse. The glimpse is the same for every answer."""

    @abstractmethod
    def tool(self, source: Source, note: Note) -> Tool: ...

    @abstractmethod
    def shows(self, where: Any, place: Any) -> bool:
        """Whether a call that looked at ``where`` shows what is at ``place``."""


def call_word(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call without white space, which is one word."""
    written = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{written}</tool_call>"


def answer_word(answer: str) -> str:
    return f"<answer>{answer}</answer>"
