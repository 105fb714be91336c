"""Reward ``function``: any function of the user's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PositiveInt, model_validator

from relax_core.errors import ConfigError, RelaxError
from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Group, Trajectory
from relax_envs.named import is_async, load
from relax_envs.rewards import called
from relax_envs.rewards.conversation import messages_of, plain
from relax_envs.rewards.loops import PerLoop
from relax_envs.threads import in_thread


class Function(Reward):
    """What a function of yours returns: a number, true or false, None to abstain, or a mapping of named components.

    A function, a method, a ``functools.partial``, a callable object, or a class that is made once with ``options``;
    sync (runs in a thread) or async. It is called with what its parameters are named after: ``trajectory``, ``task``,
    ``response`` (the last reply), ``answer``, ``metadata``, ``messages`` (what was said before the last reply, as
    ``{role, content}``), and with ``options``. One parameter of another name gets the trajectory.

    With ``group`` it is called once for the plays of a task and returns a list, one value for each in order; its
    parameters are ``group``, ``trajectories``, ``task``, ``responses``, ``answer``, ``metadata``, ``messages`` (a list
    of each play's), and one parameter of another name gets the group.

    The reward of a mapping is the sum of its components, those that are None left out; each is shown beside it. A
    function that raises abstains, and is counted. Abstains where the play failed.
    """

    class Config(ComponentConfig):
        call: str
        """``package.module:name``, or ``path/file.py:name``."""
        options: dict[str, Any] = {}
        """Keywords for the function, or for the class."""
        group: bool = False
        """Whether it scores the plays of a group together."""
        process: bool = False
        """Whether it runs in a process of its own, which is ended when it takes too long (``deadline``). It may then
        ask for ``response``, ``answer``, ``metadata`` and ``messages`` only, as plain data."""
        deadline: Annotated[float, Field(gt=0)] = 10.0
        """Seconds for one call in a process; a thread cannot be ended: there ``timeout`` only stops the waiting."""
        workers: PositiveInt = 4
        """Threads, or processes, at the same time. A call in a thread that never ends keeps its place for ever."""

        @model_validator(mode="after")
        def _fits(self) -> Function.Config:
            if self.process and self.group:
                raise ValueError("process and group do not go together yet: leave one out")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.by_group = config.group
        made = load(config.call, called.WHERE)
        if not inspect.isclass(made) and (unknown := called.unknown_options(made, config.options)):
            raise ConfigError(f"reward function: options.{unknown[0]}: {config.call!r} has no such parameter")
        self.function = called.bound(config.call, config.options)
        known = called.GROUP if config.group else called.PLAIN if config.process else called.PLAY
        options = {} if inspect.isclass(made) else config.options
        self.names = called.parameters(self.function, known, config.call, options)
        if self.names is None and config.process:
            raise ConfigError(
                f"reward function: call: {config.call!r}: in a process a function is called with plain data: name its "
                f"parameters after {', '.join(known)}"
            )
        self._async = is_async(self.function)
        self._places = PerLoop(lambda: asyncio.Semaphore(config.workers))
        self._pool: Any = None
        if config.process:
            from relax_envs.graders.pool import Pool

            target = f"{called.__name__}:{called.in_process.__name__}"
            self._pool = Pool([target], workers=config.workers, deadline=config.deadline)
            self._target = target

    async def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    async def __call__(self, trajectory: Trajectory) -> Any:
        if trajectory.error is not None:
            return None
        if self._pool is not None:
            given = plain(self._named(_of_play(trajectory)))
            return await self._pool.run(self._target, self.config.call, plain(self.config.options), given)
        return await self._run(self._call(_of_play(trajectory), trajectory))

    async def score_group(self, group: Group) -> Sequence[Any]:
        if not self.config.group:
            return await super().score_group(group)
        found = await self._run(self._call(_of_group(group), group))
        found = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(found, list | tuple):
            raise RelaxError(
                f"{self.config.call}: returned a {type(found).__name__}: return a list, one value per play"
            )
        return list(found)

    def _call(self, things: Mapping[str, Any], whole: Any) -> partial[Any]:
        return partial(self.function, whole) if self.names is None else partial(self.function, **self._named(things))

    def _named(self, things: Mapping[str, Any]) -> dict[str, Any]:
        made = {name: things[name] for name in self.names or ()}
        return {name: value() if isinstance(value, partial) else value for name, value in made.items()}

    async def _run(self, call: partial[Any]) -> Any:
        """Calls it: on this loop if it is async, else in a thread, with a place that it keeps until it returns."""
        if self._async:
            try:
                return await call()
            except SystemExit as error:
                raise RelaxError(f"{self.config.call} asked Python to exit ({error.code})") from error
        places = self._places.get()
        await places.acquire()
        found = await in_thread(call, "reward", places.release)
        return await found if inspect.isawaitable(found) else found


def _of_play(trajectory: Trajectory) -> dict[str, Any]:
    task = trajectory.task
    return {
        "trajectory": trajectory,
        "task": task,
        "response": trajectory.last_reply,
        "answer": task.answer,
        "metadata": task.metadata,
        "messages": partial(messages_of, trajectory),
    }


def _of_group(group: Group) -> dict[str, Any]:
    plays = group.trajectories
    return {
        "group": group,
        "trajectories": plays,
        "task": group.task,
        "responses": [trajectory.last_reply for trajectory in plays],
        "answer": group.task.answer,
        "metadata": group.task.metadata,
        "messages": partial(lambda: [messages_of(trajectory) for trajectory in plays]),
    }
