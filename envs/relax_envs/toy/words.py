"""Text toys: the n-th of three words, and the last of four. A fifth of all prompts is held out, by content."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from relax_core.content_hash import content_hash
from relax_core.errors import ConfigError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.keys import generator
from relax_core.types import Task, user
from relax_envs.lazy import LazyTasks
from relax_envs.split import held_out

WORDS = ("cat", "dog", "sun", "moon", "tree", "fish", "bird", "star", "rain", "fire")
NTH_PROMPT = "word {place} of {words} ?"
LAST_PROMPT = "last of {words} ?"
PLACES = ("1", "2", "3")
HELD_OUT = 0.2


class WordToy(Environment):
    """All prompts exist; which are held out depends on their content alone, and the seed shuffles either side."""

    name: ClassVar[str]

    class Config(ComponentConfig):
        seed: Annotated[int, Field(ge=0)] = 0
        """Another seed takes other prompts of the same sides."""
        size: PositiveInt = 2048
        """Training prompts."""
        eval_size: PositiveInt = 256
        """Evaluation prompts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._splits: dict[str, LazyTasks] = {}

    @abstractmethod
    def prompts(self) -> Iterator[tuple[str, str]]:
        """Every prompt with its answer."""

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        """Raises ConfigError when more are asked for than exist."""
        if not self._splits:
            sides: dict[str, list[tuple[str, str]]] = {"train": [], "eval": []}
            for prompt, answer in self.prompts():
                hash = content_hash(Task("", (user(prompt),)))
                sides["eval" if held_out(hash, HELD_OUT) else "train"].append((prompt, answer))
            sizes = {"train": self.config.size, "eval": self.config.eval_size}
            self._splits = {side: self._chosen(side, found, sizes[side]) for side, found in sides.items()}
        return self._splits[split]

    def _chosen(self, side: str, found: list[tuple[str, str]], size: int) -> LazyTasks:
        if size > len(found):
            field = "size" if side == "train" else "eval_size"
            raise ConfigError(f"{self.name}.{field}: {size} prompts wanted, {len(found)} exist: lower it")
        order = generator(self.config.seed, self.name, side).permutation(len(found))[:size].tolist()

        def make(index: int) -> Task:
            prompt, answer = found[order[index]]
            return Task(f"{self.name}-{side}-{index}", (user(prompt),), answer)

        return LazyTasks(size, make, keep=True)


class NthWord(WordToy):
    """``word 2 of cat dog sun ?`` -> ``dog``: 3,000 prompts."""

    name = "nth-word"

    def prompts(self) -> Iterator[tuple[str, str]]:
        for place, *words in product(PLACES, WORDS, WORDS, WORDS):
            yield NTH_PROMPT.format(place=place, words=" ".join(words)), words[int(place) - 1]


class LastWord(WordToy):
    """``last of cat dog sun moon ?`` -> ``moon``: 10,000 prompts."""

    name = "last-word"

    def prompts(self) -> Iterator[tuple[str, str]]:
        for words in product(WORDS, repeat=4):
            yield LAST_PROMPT.format(words=" ".join(words)), words[-1]
