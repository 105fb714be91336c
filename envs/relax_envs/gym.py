"""Environment ``gymnasium``: anything with Gymnasium's ``reset`` and ``step`` as a conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, model_validator

from relax_core.errors import ConfigError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.types import Message, Part, Task, user
from relax_envs.gym_values import Actions, shown
from relax_envs.lazy import LazyTasks
from relax_envs.named import in_words, load
from relax_envs.threads import Line

if TYPE_CHECKING:
    from relax_core.chat import Chat


class Gymnasium(Environment):
    """The policy is shown each observation, and its reply is the next action.

    A task is a seed; its message is the ``instruction`` and what ``reset(seed=...)`` shows. Numpy arrays uint8
    (H, W, 3) are images, all else is text. A reply that is no action is answered with what is allowed, and is no step.
    The play ends when the environment does, or by its ``limits``. The play's metrics are ``return`` (the sum of
    rewards: reward ``metric`` gives it), ``steps`` and ``invalid_actions``.

    Every play has an environment of its own, which one thread makes, steps and closes. Where every seed shows the same
    first, training and evaluation have the same content: set ``disjoint: false`` in the evaluation.
    """

    class Config(ComponentConfig):
        env: str | None = None
        """Its id in the gymnasium package, such as ``FrozenLake-v1``."""
        path: str | None = None
        """Or a class of your own, or a function that makes one: ``package.module:Class``, or ``path/file.py:Class``."""
        options: dict[str, Any] = {}
        """Keywords that it is made with."""
        actions: dict[str, Any] | None = None
        """The value of each action by the word for it, such as ``{left: 0, right: 2}``; default: replies are JSON."""
        pattern: str | None = None
        """A regular expression that finds the action in a reply, its last match (or that's first group) counts;
        default: the whole reply after its reasoning."""
        instruction: str = ""
        """Said before the first observation."""
        show: Literal["observation", "render", "both"] = "observation"
        """What the policy sees: observations, what ``render()`` gives (set ``render_mode`` in the options), or both."""
        output_limit: PositiveInt = 10_000
        """Characters of text in one observation; what is longer is cut in its middle."""
        own_start: bool = False
        """Whether each play of a task has a seed of its own, rather than that of the task. Rewards are compared
        between plays that began alike."""
        seed: Annotated[int, Field(ge=0)] = 0
        """Task i has seed 2 (seed + i); in evaluation one more."""
        size: PositiveInt = 2048
        """Training tasks."""
        eval_size: PositiveInt = 128
        """Evaluation tasks."""

        @model_validator(mode="after")
        def _one_of_two(self) -> Gymnasium.Config:
            if (self.env is None) == (self.path is None):
                raise ValueError("give env (an id of the gymnasium package) or path (a class of your own), one of them")
            try:
                re.compile(self.pattern or "")
            except re.error as error:
                raise ValueError(f"pattern: {error}") from error
            return self

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        size = self.config.size if split == "train" else self.config.eval_size
        return LazyTasks(size, partial(self._task, split), keep=True)

    def _task(self, split: str, index: int) -> Task:
        seed = 2 * (self.config.seed + index) + (split == "eval")
        episode = Episode(self.config)
        try:
            first = self._first(episode.reset(seed))
        finally:
            episode.close()
        name = self.config.env or str(self.config.path).rpartition(":")[2]
        return Task(f"{name}-{split}-{index}", (first,), metadata={"seed": seed})

    def _first(self, observation: Sequence[Part]) -> Message:
        return user(*([f"{self.config.instruction}\n"] if self.config.instruction else []), *observation)

    async def play(self, task: Task, chat: Chat) -> None:
        seed = int(chat.random("gymnasium") * 2**31) if self.config.own_start else task.metadata["seed"]
        chat.metrics.update({"return": 0.0, "steps": 0.0, "invalid_actions": 0.0})
        episode, line = Episode(self.config), Line("gymnasium")
        try:
            first = self._first(await line(partial(episode.reset, seed)))
            await self._steps(task.messages if (first,) == task.messages else (first,), episode, line, chat)
        finally:
            line.end(episode.close)

    async def _steps(self, said: Sequence[Message], episode: Episode, line: Line, chat: Chat) -> None:
        while True:
            reply = await chat(*said)
            try:
                action = episode.actions.read(reply.text)
            except ValueError as error:
                chat.metrics["invalid_actions"] += 1
                said = [user(str(error))]
                continue
            step = await line(partial(episode.step, action))
            chat.metrics["return"] += step.reward
            chat.metrics["steps"] += 1
            if step.over:
                return
            said = [user(*step.parts)]


class Step(NamedTuple):
    """What a step came to."""

    parts: Sequence[Part]
    reward: float
    over: bool


class Episode:
    """One environment, made when it is first reset. Every method may block."""

    actions: Actions

    def __init__(self, config: Any) -> None:
        self.config = config
        self._env: Any = None

    def reset(self, seed: int) -> Sequence[Part]:
        """Raises ConfigError when there is no such environment."""
        self._env = made(self.config)
        space = getattr(self._env, "action_space", None)
        self.actions = Actions(self.config.actions, self.config.pattern, space)
        observation, _ = self._env.reset(seed=seed)
        return self._shown(observation)

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        over = bool(terminated or truncated)
        return Step(() if over else self._shown(observation), float(reward), over)

    def close(self) -> None:
        if self._env is not None and hasattr(self._env, "close"):
            self._env.close()

    def _shown(self, observation: Any) -> Sequence[Part]:
        show, limit = self.config.show, self.config.output_limit
        seen = () if show == "render" else shown(observation, limit)
        return seen if show == "observation" else (*seen, *shown(self._env.render(), limit))


def made(config: Any) -> Any:
    """The environment of a config. Raises ConfigError."""
    where = "environment gymnasium"
    if config.path is not None:
        make = partial(load(config.path, f"{where}: path"), **config.options)
    else:
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError(f"{where}: the package is not installed: pip install 'relax-rl[gymnasium]'") from error
        make = partial(gymnasium.make, config.env, **config.options)
    try:
        return make()
    except Exception as error:
        raise ConfigError(f"{where}: {config.env or config.path} cannot be made: {in_words(error)}") from error
