"""Checks of an environment's plays: whatever the policy says they end, and each is a function of its own key alone."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import random
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relax_core import serial
from relax_core.testing.environment_tasks import message_problems
from relax_core.testing.scripted_plays import Table
from relax_core.testing.within import run_within

if TYPE_CHECKING:
    from relax_core.interfaces import Environment, Request
    from relax_core.scripted import Say
    from relax_core.types import Task, Trajectory

SIDE_BY_SIDE = 6
"""Plays at once, that must be what each is alone."""
MEMBERS = 4
"""Plays of a task that are played again: each draws for itself."""

UNKNOWN = '<tool_call>\n{"name": "no-such-tool", "arguments": {"x": 1}}\n</tool_call>'
REPLIES: Mapping[str, str] = {
    "an empty reply": "",
    "blanks": " \n\t ",
    "garbage": "\x00}{ ]]> %s \\ <|im_end|> <tool_call",
    "any script": "žluťoučký 猫 🦊 ‮abc  ",
    "a very long reply": "word " * 4_000,
    "a broken tool call": '<tool_call>\n{"name": "zoom", "arguments": {"x": \n</tool_call>',
    "a call of an unknown tool": UNKNOWN,
    "a call without arguments": '<tool_call>\n{"name": "zoom"}\n</tool_call>',
    "calls side by side": "\n".join([UNKNOWN] * 20),
}
"""What a policy may say, by what it is called in an error."""

Script = tuple[str, Sequence[str]]
"""Its name, and replies of which the last one is repeated."""


def replies(tasks: Sequence[Task]) -> Iterator[Script]:
    """``REPLIES``, each said again and again, all of them in turn, and a wrong answer that is corrected."""
    yield from ((name, [text]) for name, text in REPLIES.items())
    yield "everything in turn", list(REPLIES.values())
    for answer in dict.fromkeys(task.answer for task in tasks if isinstance(task.answer, str)):
        yield f"the answer {answer!r:.40}", [answer]
        yield f"something else, and then the answer {answer!r:.40}", ["something else", answer]


def named(scripts: Sequence[Sequence[str]]) -> Iterator[Script]:
    """Those of the author."""
    for i, script in enumerate(scripts):
        assert script, f"scripts[{i}] is empty: give at least one reply"
        yield f"scripts[{i}]", script


def saying(table: Table, script: Sequence[str]) -> Say:
    """The script, its last reply for ever."""
    rest = itertools.chain(script, itertools.repeat(script[-1]))
    return lambda request: table.adapter.reply(next(rest))


def in_turns(table: Table, script: Sequence[str], wait: int) -> Say:
    """Likewise, letting others go first so many times."""
    say = saying(table, script)

    async def later(request: Request) -> Sequence[int]:
        for _ in range(wait):
            await asyncio.sleep(0)
        found = say(request)
        assert not isinstance(found, Awaitable)
        return found

    return later


def as_text(table: Table, trajectory: Trajectory) -> str:
    """What was said, and how it ended: all that must be equal in equal plays."""
    said = serial.trajectory_to_json(trajectory, table.adapter.media.decode)
    return serial.dumps({key: said[key] for key in ("turns", "stop", "error")}).decode()


def difference(one: str, other: str) -> str:
    """Where two texts part."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, at - 30)
    return f"...{one[start : at + 60]!r} was ...{other[start : at + 60]!r}"


# --- whatever is said -------------------------------------------------------------------------------------------------


def check_any_reply(table: Table, tasks: Sequence[Task], scripts: Sequence[Script], seconds: float) -> None:
    """Plays end, without an error, by well-formed messages; nothing is at work behind them."""
    for task in tasks:
        for name, script in scripts:
            where = f"play of task {task.id!r} with {name}"
            work = functools.partial(_whole, table, task, saying(table, script), where)
            check_trajectory(run_within(seconds, where, work), where)


async def _whole(table: Table, task: Task, say: Say, where: str) -> Trajectory:
    trajectory = await table.play(task, say)
    await _nothing_at_work(where, "has ended")
    return trajectory


def check_trajectory(trajectory: Trajectory, where: str) -> None:
    """No error; what the environment said is well formed; its numbers are numbers."""
    error = trajectory.error
    assert error is None, (
        f"{where}: it fails by {error and error.type}: {error and error.text}: whatever the policy says is no error of "
        "the play; tell the policy, or end the play"
    )
    assert trajectory.turns, f"{where}: it ends before the policy said anything: call chat(...) at least once"
    for i, turn in enumerate(trajectory.turns):
        for message in turn.prompt:
            for problem in message_problems(message):
                raise AssertionError(f"{where}: turn {i}: {problem}")
    for name, value in trajectory.metrics.items():
        assert isinstance(value, int | float) and math.isfinite(value), f"{where}: metric {name!r} is {value!r}"


async def _nothing_at_work(where: str, when: str) -> None:
    """Tasks of the event loop that outlive their play."""
    for _ in range(20):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    first = min(str(task.get_coro()) for task in left)
    raise AssertionError(
        f"{where}: when it {when}, {len(left)} of its tasks are still at work, such as {first}: await them, or cancel "
        "them in a finally block (asyncio.TaskGroup does)"
    )


# --- a function of its key --------------------------------------------------------------------------------------------


@contextmanager
def shared_generators(seed: int) -> Iterator[None]:
    """The generators of random and numpy stand somewhere else inside, and as before behind."""
    import numpy as np

    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


def again(environment: Environment) -> Environment:
    """Another instance with the same settings."""
    return type(environment)(environment.config)


def check_again(table: Table, other: Table, tasks: Sequence[Task], scripts: Sequence[Script], seconds: float) -> None:
    """Under the same key a play is the same, in another instance too, wherever shared generators stand."""
    for task, (name, script), member in itertools.product(tasks, _several(scripts), range(MEMBERS)):
        where = f"play of task {task.id!r} with {name}, member {member}"
        with shared_generators(1):
            first = _alone(table, task, script, member, seconds, where)
        with shared_generators(2):
            second = _alone(other, task, script, member, seconds, where)
        assert first == second, (
            f"{where}: played again under the same key it is another one: {difference(second, first)}: draw by "
            "chat.random, and keep nothing of a play in the instance"
        )


def _alone(table: Table, task: Task, script: Sequence[str], member: int, seconds: float, where: str) -> str:
    say = saying(table, script)
    return as_text(table, run_within(seconds, where, lambda: table.play(task, say, member)))


def _several(scripts: Sequence[Script]) -> list[Script]:
    """Enough of them: the one with everything, and those behind it."""
    at = next(i for i, (name, _) in enumerate(scripts) if name == "everything in turn")
    return list(scripts[at:])


def check_side_by_side(table: Table, tasks: Sequence[Task], scripts: Sequence[Script], seconds: float) -> None:
    """Plays of one instance at once are what each of them is alone."""
    seats = [(task, script) for task in tasks for script in _several(scripts)]
    seats = [seats[i * len(seats) // SIDE_BY_SIDE] for i in range(SIDE_BY_SIDE)]

    async def alone() -> list[Trajectory]:
        return [await table.play(task, saying(table, s), i) for i, (task, (_, s)) in enumerate(seats)]

    async def together() -> list[Trajectory]:
        plays = [table.play(task, in_turns(table, s, 1 + i % 3), i) for i, (task, (_, s)) in enumerate(seats)]
        return await asyncio.gather(*plays)

    whole = seconds * len(seats)
    one = run_within(whole, f"{len(seats)} plays one after the other", alone)
    other = run_within(whole, f"{len(seats)} plays at once", together)
    for (task, (name, _)), a, b in zip(seats, one, other, strict=True):
        a_text, b_text = as_text(table, a), as_text(table, b)
        assert a_text == b_text, (
            f"play of task {task.id!r} with {name}: beside others it is another one: {difference(b_text, a_text)}: "
            "many plays share the instance; keep what belongs to a play in local variables"
        )


# --- cancelled --------------------------------------------------------------------------------------------------------


def check_cancelled(table: Table, tasks: Sequence[Task], scripts: Sequence[Script], seconds: float) -> None:
    """A play that is cancelled while the policy speaks ends at once, and leaves nothing at work."""
    for task, (name, script), turn in itertools.product(tasks, _several(scripts), (0, 1)):
        where = f"play of task {task.id!r} with {name}, cancelled in turn {turn}"
        run_within(seconds, where, functools.partial(_cancelled, table, task, script, turn, where))


async def _cancelled(table: Table, task: Task, script: Sequence[str], turn: int, where: str) -> None:
    asked, say, turns = asyncio.Event(), saying(table, script), itertools.count()

    async def stuck(request: Request) -> Sequence[int]:
        if next(turns) == turn:
            asked.set()
            await asyncio.Event().wait()
        found = say(request)
        assert not isinstance(found, Awaitable)
        return found

    play, reached = asyncio.create_task(table.play(task, stuck)), asyncio.create_task(asked.wait())
    await asyncio.wait({play, reached}, return_when=asyncio.FIRST_COMPLETED)
    reached.cancel()
    play.cancel()
    results = await asyncio.gather(play, reached, return_exceptions=True)
    if asked.is_set():
        assert isinstance(results[0], asyncio.CancelledError), (
            f"{where}: it goes on ({results[0]!r:.80}): let CancelledError pass"
        )
    await _nothing_at_work(where, "was cancelled")


# --- the end ----------------------------------------------------------------------------------------------------------


def check_closed(table: Table, seconds: float) -> None:
    """``close`` gives back what there is, and does nothing the second time."""

    async def twice() -> None:
        await table.environment.close()
        await table.environment.close()

    try:
        run_within(seconds, "close() called twice", twice)
    except Exception as error:
        raise AssertionError(f"close() called twice raises {type(error).__name__}: {error}") from error
