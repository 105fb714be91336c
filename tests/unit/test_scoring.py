"""Scoring groups: which rewards apply, sums, abstentions, and graders that fail, are late or are cancelled."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import numpy as np
import pytest

from relax_core.config.schema import RewardSection
from relax_core.interfaces import Reward
from relax_core.scoring import Scorer, applies, number_or_problem, outcomes, unmatched
from relax_core.types import Group, PlayError, Task, Trajectory


class Given(Reward):
    """Gives what it was told to, or raises it; a function is asked for it."""

    async def __call__(self, trajectory: Trajectory) -> Any:
        value = self.config(trajectory) if callable(self.config) else self.config
        value = await value if isinstance(value, Awaitable) else value
        if isinstance(value, BaseException):
            raise value
        return value


class Together(Reward):
    """Scores a group as it was told to."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        raise AssertionError("not asked one by one")

    async def score_group(self, group: Group) -> list[Any]:
        found: list[Any] = await self.config(group)
        return found


def group_of(count: int = 1, failed: int = 0, metadata: Mapping[str, Any] | None = None) -> Group:
    task = Task("t", (), None, metadata or {}, "env")
    error = PlayError("", "", "")
    plays = [Trajectory(task, 0, m, error=error if m < failed else None) for m in range(count)]
    return Group("g", 0, task, 0, plays)


def scored(*rewards: tuple[Any, float], failed: bool = False) -> tuple[Trajectory, Scorer, list[str]]:
    notes: list[str] = []
    given = [
        (RewardSection(id="given", name=f"r{i}", weight=weight), Given(value))
        for i, (value, weight) in enumerate(rewards)
    ]
    scorer = Scorer(given, notes.append)
    group = group_of(1, int(failed))
    asyncio.run(scorer.score(group))
    return group.trajectories[0], scorer, notes


# --- values -----------------------------------------------------------------------------------------------------------


def test_weighted_sum() -> None:
    assert scored((1.0, 0.8), (0.5, 0.2))[0].reward == pytest.approx(0.9)
    assert scored((1.0, 1.0), (0.5, -2.0))[0].reward == 0.0


def test_zero_is_a_value_and_none_is_not() -> None:
    assert scored((0.0, 1.0), (None, 5.0))[0].reward == 0.0
    trajectory = scored((None, 1.0), (None, 1.0))[0]
    assert trajectory.reward is None and trajectory.rewards == {"r0": None, "r1": None}


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_of_any_kind_are_values(value: Any) -> None:
    found = scored((value, 1.0))[0].reward
    assert found == 1.0 and type(found) is float


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (ValueError("down"), "ValueError: down"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (10**400, "is not a number"),
        ("good", "'good' is not a number"),
        ("1.0", "'1.0' is not a number"),
        ([1.0, 2.0], "[1.0, 2.0] is not a number"),
        (object(), "is not a number"),
        ({"a": math.nan}, "component 'a': the value nan"),
        ({"a": 1.0, "b": "x"}, "component 'b': the value 'x' is not a number"),
        (TimeoutError("its own"), "TimeoutError: its own"),
    ],
)
def test_a_failure_abstains_is_counted_and_said_once(bad: Any, said: str) -> None:
    trajectory, scorer, notes = scored((bad, 1.0), (1.0, 0.5))
    assert trajectory.reward == 0.5 and trajectory.rewards == {"r0": None, "r1": 1.0}
    assert trajectory.metrics == {"r0/failures": 1.0} and scorer.failures == {"r0": 1}
    assert len(notes) == 1 and said in notes[0]
    assert scorer.failures_in_words() == f"; r0 failed 1 times, the last: {scorer.last_failure['r0']}"


@pytest.mark.parametrize(
    ("components", "total"),
    [
        ({"right": 1.0, "short": -0.25}, 0.75),
        ({"right": 1.0, "short": None}, 1.0),
        ({"right": None}, None),
        ({}, None),
        ({"right": True}, 1.0),
    ],
)
def test_components_are_summed_and_shown(components: dict[str, Any], total: float | None) -> None:
    trajectory = scored((components, 2.0))[0]
    assert trajectory.rewards == {"r0": total}
    assert trajectory.reward == (None if total is None else 2 * total)
    assert trajectory.metrics == {f"r0/{key}": float(v) for key, v in components.items() if v is not None}


def test_a_failed_play_has_no_rewards_and_its_group_goes_on() -> None:
    trajectory = scored((1.0, 1.0), failed=True)[0]
    assert trajectory.reward is None and trajectory.rewards == {}
    group = group_of(3, failed=1)
    asyncio.run(Scorer([(RewardSection(id="r"), Given(1.0))]).score(group))
    assert [t.reward for t in group.trajectories] == [None, 1.0, 1.0]


def test_a_failure_of_one_play_leaves_the_others() -> None:
    def value(trajectory: Trajectory) -> Any:
        return ValueError("odd") if trajectory.member % 2 else float(trajectory.member)

    group, scorer = group_of(4), Scorer([(RewardSection(id="r"), Given(value))], lambda line: None)
    asyncio.run(scorer.score(group))
    assert [t.reward for t in group.trajectories] == [0.0, None, 2.0, None] and scorer.failures == {"r": 2}


# --- which rewards apply ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "metadata", "right"),
    [
        ({}, {}, True),
        ({"source": "gsm8k"}, {"source": "gsm8k"}, True),
        ({"source": "gsm8k"}, {"source": "aime"}, False),
        ({"source": "gsm8k"}, {}, False),
        ({"source": "gsm8k"}, {"source": None}, False),
        ({"source": ("gsm8k", "aime")}, {"source": "aime"}, True),
        ({"source": ("gsm8k", "aime")}, {"source": "math"}, False),
        ({"source": ()}, {"source": "math"}, False),
        ({"source": "gsm8k", "level": 1}, {"source": "gsm8k", "level": 1}, True),
        ({"source": "gsm8k", "level": 1}, {"source": "gsm8k", "level": 2}, False),
        ({"level": 1}, {"level": np.int64(1)}, True),
        ({"level": 1}, {"level": 1.0}, True),
        ({"level": 1}, {"level": "1"}, False),
        ({"level": 1}, {"level": True}, False),
        ({"hard": True}, {"hard": True}, True),
        ({"hard": True}, {"hard": 1}, False),
        ({"hard": False}, {}, False),
        ({"source": "a"}, {"source": ["a", "b"]}, False),
        ({"source": "a"}, {"source": np.array(["a", "b"])}, False),
    ],
)
def test_metadata_choose_the_rewards_of_a_row(when: dict[str, Any], metadata: dict[str, Any], right: bool) -> None:
    assert applies(RewardSection(id="r", when=when), Task("t", (), None, metadata, "env")) is right


def test_environments_and_metadata_both_must_fit() -> None:
    section = RewardSection(id="r", environments=("env",), when={"source": "a"})
    assert applies(section, Task("t", (), None, {"source": "a"}, "env"))
    assert not applies(section, Task("t", (), None, {"source": "a"}, "other"))
    assert not applies(section, Task("t", (), None, {}, "env"))


def test_each_row_gets_its_own_rewards() -> None:
    rewards = [
        (RewardSection(id="a", when={"source": "a"}), Given(1.0)),
        (RewardSection(id="b", when={"source": ("b", "c")}), Given(2.0)),
        (RewardSection(id="all", weight=0.5), Given(4.0)),
    ]
    found = {}
    for source in ("a", "b", "d"):
        group = group_of(1, metadata={"source": source})
        asyncio.run(Scorer(rewards).score(group))
        found[source] = (group.trajectories[0].rewards, group.trajectories[0].reward)
    assert found == {"a": ({"a": 1.0, "all": 4.0}, 3.0), "b": ({"b": 2.0, "all": 4.0}, 4.0), "d": ({"all": 4.0}, 2.0)}


def test_a_row_without_a_reward_is_no_zero_and_is_said() -> None:
    notes: list[str] = []
    rewards = [
        (RewardSection(id="gsm8k", when={"source": ("gsm8k", "svamp")}), Given(1.0)),
        (RewardSection(id="exact", when={"kind": "x"}, environments=("env", "other")), Given(1.0)),
    ]
    scorer = Scorer(rewards, notes.append)
    for _ in range(2):
        group = group_of(2, metadata={"source": "aime", "secret": 1})
        asyncio.run(scorer.score(group))
        assert [(t.reward, t.rewards, t.metrics) for t in group.trajectories] == [(None, {}, {"unmatched": 1.0})] * 2
    said = (
        "task 't' has no reward: it is of environment 'env' and metadata {\"source\": \"aime\"} (without kind); "
        'gsm8k asks for metadata {"source": ["gsm8k", "svamp"]}; exact asks for environments ["env", "other"] and '
        'metadata {"kind": "x"}: change when or environments, or add a reward'
    )
    assert notes == [said] and scorer.unmatched == 2
    assert scorer.failures_in_words() == f"; 2 groups had no reward, the last: {said}"
    assert unmatched(Task("t", (), environment="e"), [RewardSection(id="r", environments=("f",))]).startswith(
        "task 't' has no reward: it is of environment 'e'; r asks for environments"
    )


# --- time -------------------------------------------------------------------------------------------------------------


def test_what_is_late_abstains_and_the_others_keep_their_values() -> None:
    async def value(trajectory: Trajectory) -> float:
        await asyncio.sleep(60 if trajectory.member == 1 else 0)
        return 1.0

    group, notes = group_of(3), list[str]()
    scorer = Scorer(
        [(RewardSection(id="slow", timeout=0.2), Given(value)), (RewardSection(id="fast"), Given(0.5))], notes.append
    )
    started = time.monotonic()
    asyncio.run(scorer.score(group))
    assert time.monotonic() - started < 5
    assert [t.rewards for t in group.trajectories] == [
        {"slow": 1.0, "fast": 0.5},
        {"slow": None, "fast": 0.5},
        {"slow": 1.0, "fast": 0.5},
    ]
    assert scorer.failures == {"slow": 1} and "TimeoutError: no answer within 0.2 s" in notes[0]


def test_a_reward_of_groups_is_late_as_a_whole() -> None:
    async def never(group: Group) -> list[Any]:
        await asyncio.sleep(60)
        return []

    group, scorer = group_of(2), Scorer([(RewardSection(id="r", timeout=0.1), Together(never))], lambda line: None)
    asyncio.run(scorer.score(group))
    assert [t.rewards for t in group.trajectories] == [{"r": None}] * 2 and scorer.failures == {"r": 2}


def test_rewards_are_asked_at_the_same_time() -> None:
    async def value(trajectory: Trajectory) -> float:
        await asyncio.sleep(0.3)
        return 1.0

    scorer = Scorer([(RewardSection(id="r", name=f"r{i}"), Given(value)) for i in range(10)])
    started = time.monotonic()
    asyncio.run(scorer.score(group_of(4)))
    assert time.monotonic() - started < 1.5


def test_a_reward_that_does_not_end_when_it_is_told_to_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.scoring.GRACE", 0.1)

    async def stubborn(trajectory: Trajectory) -> float:
        until = time.monotonic() + 1.0
        while (left := until - time.monotonic()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue
        return 1.0

    async def measured() -> tuple[float, list[Any]]:
        started = time.monotonic()
        found = await outcomes(Given(stubborn), group_of(1), 0.1)
        return time.monotonic() - started, found

    seconds, found = asyncio.run(measured())
    assert seconds < 0.9 and isinstance(found[0], TimeoutError)


# --- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Given, Together])
def test_a_play_cancelled_while_it_is_scored_is_cancelled_not_scored(cls: type[Reward]) -> None:
    ended: list[str] = []

    async def value(thing: Any) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def cancel() -> None:
        scoring = asyncio.create_task(scorer.score(group))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    group = group_of(2)
    scorer = Scorer([(RewardSection(id="r"), cls(value)), (RewardSection(id="fast"), Given(1.0))], lambda line: None)
    asyncio.run(cancel())
    assert ended == ["cancelled"] * (2 if cls is Given else 1)
    assert all(t.reward is None and t.rewards == {} and t.metrics == {} for t in group.trajectories)
    assert not scorer.failures


def test_a_grader_that_cancels_itself_has_failed_and_the_run_goes_on() -> None:
    trajectory, _, notes = scored((asyncio.CancelledError(), 1.0), (1.0, 1.0))
    assert trajectory.reward == 1.0 and trajectory.rewards == {"r0": None, "r1": 1.0}
    assert "it was cancelled, and not by the run" in notes[0]


def test_what_ends_a_program_is_no_value() -> None:
    for error in (asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            number_or_problem(error)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_reward_of_groups_sees_the_plays_that_did_not_fail() -> None:
    async def ranks(group: Group) -> list[Any]:
        return [float(t.member) for t in group.trajectories]

    group = group_of(3, failed=1)
    asyncio.run(Scorer([(RewardSection(id="r"), Together(ranks))]).score(group))
    assert [t.reward for t in group.trajectories] == [None, 1.0, 2.0]


@pytest.mark.parametrize(
    ("given", "rewards", "failures"),
    [
        ([1.0, None], [1.0, None], 0),
        ([1.0, ValueError("bad")], [1.0, None], 1),
        ([1.0, asyncio.CancelledError()], [1.0, None], 1),
        ([1.0], [None, None], 2),
        ([1.0, 2.0, 3.0], [None, None], 2),
        (None, [None, None], 2),
        (np.array([1.0, 2.0]), [1.0, 2.0], 0),
    ],
)
def test_what_a_reward_of_groups_may_return(given: Any, rewards: list[Any], failures: int) -> None:
    async def fixed(group: Group) -> Any:
        return given

    group, scorer = group_of(2), Scorer([(RewardSection(id="r"), Together(fixed))], lambda line: None)
    asyncio.run(scorer.score(group))
    assert [t.rewards["r"] for t in group.trajectories] == rewards and sum(scorer.failures.values()) == failures


def test_a_group_without_a_valid_play_is_not_scored() -> None:
    async def asked(group: Group) -> list[Any]:
        raise AssertionError

    scorer = Scorer([(RewardSection(id="r"), Together(asked))])
    asyncio.run(scorer.score(group_of(2, failed=2)))
    assert not scorer.failures and not scorer.unmatched


# --- loops and threads ------------------------------------------------------------------------------------------------


def test_a_grader_called_from_another_thread_gives_the_right_score() -> None:
    """Evaluations and tools may score in a thread with a loop of its own."""
    scorer, call = Scorer([(RewardSection(id="r"), Given(lambda t: float(t.member)))]), group_of(3)

    async def main() -> None:
        await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(scorer.score(call))) for _ in range(4)))

    asyncio.run(main())
    assert [t.reward for t in call.trajectories] == [0.0, 1.0, 2.0]


def test_rewards_are_closed() -> None:
    closed: list[str] = []

    class Holding(Given):
        async def close(self) -> None:
            closed.append("closed")

    asyncio.run(Scorer([(RewardSection(id="a"), Holding(1.0)), (RewardSection(id="b"), Given(1.0))]).close())
    assert closed == ["closed"]
