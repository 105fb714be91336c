"""Environment ``reasoning-gym``: procedural tasks of the reasoning-gym package, scored by its own verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from relax_core.errors import ConfigError, nearest
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.types import Task, user
from relax_envs.lazy import LazyTasks

Option = bool | int | float | str


class ReasoningGym(Environment):
    """Asks one of reasoning-gym's questions once. Training and evaluation draw from different seeds.

    A question that two seeds share would count as held out although it was trained on: give the data set enough room,
    or leave it to ``evaluation.disjoint`` to stop the run.
    """

    class Config(ComponentConfig):
        dataset: str
        """Such as ``gcd`` or ``letter_counting``."""
        options: dict[str, Option] = {}
        """The data set's own settings, such as ``max_num: 20``."""
        instruction: str = ""
        """Appended to every question."""
        seed: Annotated[int, Field(ge=0)] = 0
        size: PositiveInt = 2048
        """Training tasks."""
        eval_size: PositiveInt = 128
        """Evaluation tasks."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._sets: dict[str, Any] = {}

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        data = self._data(split)
        return LazyTasks(len(data), lambda index: self._task(data, split, index), keep=True)

    def _data(self, split: Literal["train", "eval"]) -> Any:
        """Made once. Raises ConfigError when the package, the data set or an option is not there."""
        if split not in self._sets:
            try:
                import reasoning_gym
            except ImportError as error:
                raise ConfigError(
                    "environment reasoning-gym: the package is not installed: pip install 'relax-rl[gym]'"
                ) from error
            config = self.config
            known = reasoning_gym.factory.DATASETS
            if config.dataset not in known:
                raise ConfigError(
                    f"environment reasoning-gym: dataset {config.dataset!r} does not exist"
                    f"{nearest(config.dataset, known) or '; reasoning-gym lists them'}"
                )
            size = config.size if split == "train" else config.eval_size
            seed = 2 * config.seed + (split == "eval")
            try:
                self._sets[split] = reasoning_gym.create_dataset(config.dataset, seed=seed, size=size, **config.options)
            except (TypeError, ValueError, AssertionError) as error:
                raise ConfigError(f"environment reasoning-gym: options of {config.dataset!r}: {error}") from error
        return self._sets[split]

    def _task(self, data: Any, split: str, index: int) -> Task:
        entry = data[index]
        question = entry["question"] + (f"\n{self.config.instruction}" if self.config.instruction else "")
        metadata = {"dataset": self.config.dataset}
        return Task(f"{self.config.dataset}-{split}-{index}", (user(question),), entry["answer"], metadata)
