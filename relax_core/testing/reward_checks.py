"""Checks that every reward must pass, whatever it scores. In a plugin's tests, all there is to write::

def test_mine() -> None:
    check_reward(Mine(Mine.Config()), [(played("Paris", answer="Paris"), 1.0), (played("?"), None)])
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core import serial
from relax_core.errors import DataError
from relax_core.scoring import total_or_problem
from relax_core.testing.reward_plays import group_of, played
from relax_core.testing.within import run_within
from relax_core.types import Stop, Task

if TYPE_CHECKING:
    from relax_core.interfaces import Reward
    from relax_core.interfaces.authoring import RewardValue
    from relax_core.types import Decoded, MediaPart, Trajectory

Example = tuple["Trajectory", "RewardValue"]
"""What was played, and what the reward must say of it; None: it abstains."""

AT_ONCE = 4
"""Times that each play is scored at once."""
CLOSE = 1e-6
"""Relative to what a reward should be, or to 1."""


def check_reward(reward: Reward, examples: Sequence[Example] = (), *, seconds: float = 30.0) -> None:
    """Raise AssertionError, saying what is wrong, unless the reward keeps its promises.

    It gives a finite number, a mapping of these, or None. It is right about the ``examples``, and as odd plays of their
    tasks come (no turn, an error, an empty reply, a huge one) it scores or abstains, and does not raise; a task without
    an answer or metadata may be a DataError. The same play gets the same, again and beside others; but for metrics the
    play stays as it was; ``score_group`` has a value for each play; ``close`` may be called twice. The reward is closed
    behind it. ``seconds``: what all of this may take.
    """
    run_within(seconds, f"reward {type(reward).__name__}", lambda: _check(reward, examples))


async def _check(reward: Reward, examples: Sequence[Example]) -> None:
    try:
        plays = [trajectory for trajectory, _ in examples]
        for i, (trajectory, wanted) in enumerate(examples):
            found = await _scored(reward, trajectory, f"examples[{i}]")
            assert _equal(found, wanted), f"examples[{i}]: found {found!r}, should be {wanted!r}: {_said(trajectory)}"
        tasks = [trajectory.task for trajectory in plays[:3]] or [Task("t", (), "answer")]
        for name, trajectory in odd_plays(tasks):
            await _scored(reward, trajectory, name)
            plays.append(trajectory)
        for name, trajectory in odd_tasks(tasks[0]):
            await _scored(reward, trajectory, name, data_error=True)
        await check_again(reward, plays)
        await check_group(reward, plays)
    finally:
        await reward.close()
    try:
        await reward.close()
    except Exception as error:
        raise AssertionError(f"close() called a second time raises {_told(error)}: let it do nothing then") from error


def odd_plays(tasks: Sequence[Task]) -> Iterator[tuple[str, Trajectory]]:
    """Plays that a run may hand to a reward, with what is odd about them."""
    for task in tasks:
        for name, trajectory in (
            ("a play without turns", played()),
            ("a play that failed", played(failed=True)),
            ("an empty reply", played("")),
            ("blanks", played(" \n")),
            ("a huge reply", played("a b 1 {[( " * 10_000, tokens=50_000, stop=Stop.LENGTH)),
            ("one long word", played("9" * 100_000, tokens=50_000, stop=Stop.LENGTH)),
            ("any script", played("žluťoučký 猫 🦊 \u202eabc \x00")),
            ("many turns", played(*(f"reply {i}" for i in range(50)))),
        ):
            yield name, replace(trajectory, task=task)


def odd_tasks(task: Task) -> Iterator[tuple[str, Trajectory]]:
    """Plays of tasks that lack what may be needed to score them."""
    yield "a task without an answer", replace(played("42"), task=replace(task, answer=None))
    yield "a task without metadata", replace(played("42"), task=replace(task, metadata={}))


async def _scored(reward: Reward, trajectory: Trajectory, name: str, *, data_error: bool = False) -> RewardValue:
    """Likewise, where it must not raise; ``data_error``: but for a DataError."""
    try:
        return await _value(reward, trajectory, name)
    except AssertionError:
        raise
    except Exception as error:
        if data_error and isinstance(error, DataError):
            return None
        raise AssertionError(
            f"{name}: raises {_told(error)}: return None to abstain where there is nothing to score: "
            f"{_said(trajectory)}"
        ) from error


async def _value(reward: Reward, trajectory: Trajectory, name: str) -> RewardValue:
    """What it says of a play, which must be something that a reward may say; the play stays as it was."""
    before = _as_text(trajectory)
    found = await reward(trajectory)
    check_value(found, name)
    assert _as_text(trajectory) == before, f"{name}: the reward changed the play: leave it as it is"
    return found


def check_value(found: object, name: str) -> None:
    """A finite number, None, or a mapping of texts to these."""
    if isinstance(found, Mapping):
        wrong = [key for key in found if not isinstance(key, str)]
        assert not wrong, f"{name}: a component is called {wrong[0]!r}; a name is text"
        for key, value in found.items():
            assert not isinstance(value, Mapping), f"{name}: component {key!r} is a mapping in a mapping"
            check_value(value, f"{name}: component {key!r}")
        return
    total = total_or_problem(found)  # type: ignore[arg-type]
    assert not isinstance(total, str), f"{name}: {total}"


async def check_again(reward: Reward, plays: Sequence[Trajectory]) -> None:
    """Each play gets the same again, and the same beside all others."""
    alone = [await reward(trajectory) for trajectory in plays]
    again = [await reward(trajectory) for trajectory in reversed(plays)][::-1]
    together = await asyncio.gather(*(reward(trajectory) for trajectory in [*plays] * AT_ONCE))
    for i, (trajectory, wanted) in enumerate(zip(plays, alone, strict=True)):
        assert _equal(again[i], wanted), (
            f"scored again it is {again[i]!r}, and was {wanted!r}: {_said(trajectory)}: a reward is a function of the "
            "play alone"
        )
        for found in together[i :: len(plays)]:
            assert _equal(found, wanted), (
                f"scored beside others it is {found!r}, alone {wanted!r}: {_said(trajectory)}: many are scored at "
                "once; keep what belongs to one in local variables"
            )


async def check_group(reward: Reward, plays: Sequence[Trajectory]) -> None:
    """``score_group`` has a value for each play, in order; where it is the inherited one, the same as alone."""
    from relax_core.interfaces import Reward as Base

    for count in (1, len(plays)):
        group = group_of([replace(trajectory, member=i) for i, trajectory in enumerate(plays[:count])])
        found = list(await reward.score_group(group))
        assert len(found) == count, f"score_group gives {len(found)} values for {count} plays: one each, in their order"
        for i, value in enumerate(found):
            if isinstance(value, BaseException):
                raise AssertionError(f"score_group: play {i} raises {_told(value)}: return None to abstain") from value
            check_value(value, f"score_group: play {i}")
            if type(reward).score_group is Base.score_group:
                wanted = await reward(group.trajectories[i])
                assert _equal(value, wanted), f"score_group: play {i} gets {value!r}, alone {wanted!r}"


def _equal(found: RewardValue, wanted: RewardValue) -> bool:
    """Mappings by component; a number that was expected also equals a mapping with that sum."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in found)
    one, other = total_or_problem(found), total_or_problem(wanted)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= CLOSE * max(1.0, abs(other))
    return one is other is None


def _as_text(trajectory: Trajectory) -> bytes:
    """What was played; a reward may note metrics."""
    said = serial.trajectory_to_json(replace(trajectory, metrics={}), _unread)
    return serial.dumps([serial.task_to_json(trajectory.task, _unread), said])


def _unread(part: MediaPart) -> Decoded:
    raise DataError("media are not looked at")


def _said(trajectory: Trajectory) -> str:
    """The play in short."""
    return (
        f"task {trajectory.task.id!r}, answer {trajectory.task.answer!r:.60}, last reply {trajectory.last_reply!r:.60}"
    )


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
