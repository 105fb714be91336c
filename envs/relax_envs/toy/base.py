"""What the toy environments with media share: each task is a function of (seed, environment, split, index)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from relax_core.interfaces import ComponentConfig, Environment
from relax_core.keys import generator
from relax_core.types import MediaPart, Task, user
from relax_envs.lazy import LazyTasks

if TYPE_CHECKING:
    import numpy as np


class MediaToy(Environment):
    """Made when asked for, and kept. The splits draw from different streams, so no eval task occurs in training."""

    name: ClassVar[str]
    prompt: ClassVar[str]

    class Config(ComponentConfig):
        seed: Annotated[int, Field(ge=0)] = 0
        """Another seed gives other tasks."""
        size: PositiveInt = 512
        """Training tasks."""
        eval_size: PositiveInt = 256
        """Evaluation tasks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._splits = {
            "train": LazyTasks(config.size, lambda index: self._task("train", index), keep=True),
            "eval": LazyTasks(config.eval_size, lambda index: self._task("eval", index), keep=True),
        }

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return self._splits[split]

    def _task(self, split: str, index: int) -> Task:
        medium, answer = self.make(generator(self.config.seed, self.name, split, index))
        return Task(f"{self.name}-{split}-{index}", (user(self.prompt, medium),), answer)

    @abstractmethod
    def make(self, rng: np.random.Generator) -> tuple[MediaPart, str]:
        """A medium and the one word that describes it."""
