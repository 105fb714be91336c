"""The callback ``dynamic-sampling``: which groups it filters, and when it gives up; and the score stage around it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from relax_algorithms.callbacks.dynamic_sampling import DynamicSampling
from relax_algorithms.callbacks.mask_truncated import MaskTruncated
from relax_algorithms.callbacks.overlong import Overlong
from relax_core.admission import Admission
from relax_core.bus import Claim, Holder
from relax_core.config.schema import RewardSection
from relax_core.errors import RelaxError
from relax_core.hookspecs import Callback, GroupEvent
from relax_core.interfaces import Reward, Row
from relax_core.run import Run
from relax_core.scoring import Scorer
from relax_core.stages import Score
from relax_core.testing.training import tiny_run
from relax_core.types import Group, Stop, Task, Trajectory, Turn, message

FEW = tiny_run(groups_per_step=2, group_size=4)


def group(*rewards: float | None, tokens: int = 5, stop: Stop = Stop.EOS) -> Group:
    """Each member's reward; its replies have ``tokens``, ``tokens + 1``, ... tokens."""
    task = Task("t", ())
    found = Group("t@0", 0, task, 0)
    for member, reward in enumerate(rewards):
        turn = Turn((), message("assistant", ""), stop, tokens + member)
        found.trajectories.append(Trajectory(task, 0, member, [turn], stop=stop, reward=reward, raw_reward=reward))
    return found


def callback(**settings: Any) -> DynamicSampling:
    return DynamicSampling(DynamicSampling.Config(**settings))


def filtered(found: Group, value: str | None = None, run: Run = FEW, **settings: Any) -> str | None:
    return callback(**settings).filter_group(run, value, GroupEvent(found))


# --- which groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0, 0.0, 1.0), None),
        ((1.0, 1.0, 1.0), "all rewards are 1"),
        ((0.0, 0.0), "all rewards are 0"),
        ((0.1,) * 7, "all rewards are 0.1"),
        ((1.0, None, 1.0), "all rewards are 1"),
        ((1.0, None, 0.0), None),
        ((None, 0.25), "all rewards are 0.25"),
        ((None, None), None),
    ],
)
def test_groups_whose_rewards_are_equal(rewards: tuple[float | None, ...], reason: str | None) -> None:
    assert filtered(group(*rewards)) == reason


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.0, 0.0, 0.0, 0.4), "the mean reward is below 0.2"),
        ((0.0, 0.4), None),
        ((1.0, 0.6), None),
        ((1.0, 1.0, 1.0, 0.6), "the mean reward is above 0.8"),
        ((0.5, 0.5), "all rewards are 0.5"),
    ],
)
def test_groups_that_are_too_hard_or_too_easy(rewards: tuple[float, ...], reason: str | None) -> None:
    assert filtered(group(*rewards), min_mean=0.2, max_mean=0.8) == reason


def test_it_decides_on_the_reward_before_shaping() -> None:
    """All right, but of different lengths: an overlong penalty makes them differ, and they still teach nothing."""
    found = group(1.0, 1.0, 1.0, tokens=9)
    shaped = Overlong(Overlong.Config(limit=10, buffer=2)).shape_rewards(FEW, [1.0] * 3, GroupEvent(found))
    assert shaped == [0.5, 0.0, 0.0]
    for trajectory, reward in zip(found.trajectories, shaped, strict=True):
        trajectory.reward = reward
    assert filtered(found) == "all rewards are 1"
    for trajectory, raw in zip(found.trajectories, (1.0, 0.5, 0.5), strict=True):
        trajectory.reward, trajectory.raw_reward = 0.5, raw
    assert filtered(found) is None, "and rewards that shaping made equal do not matter either"


def test_plays_that_shaping_left_out_do_not_count() -> None:
    """Three right plays and a wrong one that was cut off: of those that can be trained all are equal."""
    found = group(1.0, 1.0, 1.0, 0.0)
    found.trajectories[3].reward = None
    assert filtered(found) == "all rewards are 1"


def test_the_reason_of_another_comes_first() -> None:
    assert filtered(group(1.0, 0.0), value="too old") == "too old"
    assert filtered(group(None, None), value="too old") == "too old"


# --- giving up --------------------------------------------------------------------------------------------------------


def give(sampling: DynamicSampling, *groups: Group) -> None:
    for found in groups:
        sampling.filter_group(FEW, None, GroupEvent(found))


def test_it_gives_up_after_so_many_in_a_row() -> None:
    """max_attempts 3 x groups_per_step 2: the sixth ends the run."""
    sampling = callback(max_attempts=3, min_mean=0.3)
    give(sampling, *[group(0.0, 0.0)] * 4, group(0.1, 0.0))
    with pytest.raises(RelaxError) as error:
        give(sampling, group(1.0, 1.0))
    text = str(error.value)
    assert "6 groups in a row were filtered and none was kept: 4 because all rewards are 0, 1 because" in text
    assert "fewer than max_attempts (3) x groups_per_step (2)" in text
    assert "easier tasks" in text and "group_size (4)" in text and "\n" not in text


def test_many_reasons_are_shortened() -> None:
    sampling = callback(max_attempts=3)
    with pytest.raises(RelaxError, match=r"none was kept: 1 because all rewards are 0, .*, and 3 more reasons; "):
        give(sampling, *(group(float(i), float(i)) for i in range(6)))


def test_one_that_is_kept_begins_the_count_anew() -> None:
    sampling = callback(max_attempts=3)
    for _ in range(10):
        give(sampling, *[group(0.0, 0.0)] * 5, group(1.0, 0.0))


def test_groups_without_any_reward_do_not_count() -> None:
    """They fail, and the run has a bound of its own for that."""
    sampling = callback(max_attempts=1)
    give(sampling, group(0.0, 0.0), *[group(None, None)] * 9)
    with pytest.raises(RelaxError):
        give(sampling, group(0.0, 0.0))


def test_the_count_survives_a_restart() -> None:
    before = callback(max_attempts=3)
    give(before, *[group(0.0, 0.0)] * 5)
    after = callback(max_attempts=3)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    with pytest.raises(RelaxError, match="6 because all rewards are 0"):
        give(after, group(0.0, 0.0))
    after.load_state_dict({})
    give(after, *[group(0.0, 0.0)] * 5)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_group_of_one_is_refused() -> None:
    (line,) = DynamicSampling.check(DynamicSampling.Config(), tiny_run(group_size=1).config)
    assert "group_size is 1" in line and "set group_size to 2 or more" in line
    assert not list(DynamicSampling.check(DynamicSampling.Config(), FEW.config))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"min_mean": 0.9, "max_mean": 0.1}, "above max_mean"),
        ({"tries": 3}, "tries"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        DynamicSampling.Config.model_validate(settings)


# --- in the score stage -----------------------------------------------------------------------------------------------


class Given(Reward):
    """The number that the play's task holds for its member; None abstains."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        found: float | None = trajectory.task.answer[trajectory.member]
        return found


class Shelf:
    """As much of a bus as the stage needs."""

    def __init__(self) -> None:
        self.evicted: list[str] = []

    async def evict(self, group: str) -> list[Row]:
        self.evicted.append(group)
        return []


def scored(
    rewards: list[float | None], callbacks: list[Callback], stop: Stop = Stop.EOS
) -> tuple[dict[str, int], list[str], list[tuple[str, str | None]], dict[str, Any]]:
    """Counters, evicted groups, decisions and made columns after one group went through the stage."""
    run = tiny_run(groups_per_step=2)
    for i, found in enumerate(callbacks):
        run.stack.add_callback(found, f"callbacks.{i}")
    admission = Admission(2, 0, 3)
    ticket = admission.start("t@0")
    played = group(*[0.0] * len(rewards), tokens=9, stop=stop)
    task = Task("t", (), answer=rewards)
    for trajectory in played.trajectories:
        trajectory.task, trajectory.reward, trajectory.raw_reward = task, None, None
    rows = tuple(Row(f"t@0/{t.member}/0", ticket.group, {"played": played, "media": ()}) for t in played.trajectories)
    shelf, decided = Shelf(), list[tuple[str, str | None]]()
    scorer = Scorer([(RewardSection(id="given"), Given(None))], lambda line: None)
    stage: Any = Score(run, scorer, shelf, admission, lambda *d: decided.append(d), lambda rows: None)  # type: ignore[arg-type]
    made = asyncio.run(stage.run(Claim("score", Holder("score", 0), rows, (ticket.group,))))
    counters = admission.counters()
    admission.identity()
    return counters, shelf.evicted, decided, dict(made)


def test_a_filtered_group_gives_its_slot_back() -> None:
    """Rewards all 1, different lengths, overlong shaping on."""
    callbacks = [Overlong(Overlong.Config(limit=10, buffer=2)), callback()]
    counters, evicted, decided, made = scored([1.0, 1.0, 1.0], callbacks)
    assert counters["filtered"] == 1 and counters["in_flight"] == 0 and counters["failed"] == 0
    assert evicted == ["t@0"] and decided == [("t@0", None)] and not made


def test_a_kept_group_stays_with_its_shaped_rewards() -> None:
    callbacks = [Overlong(Overlong.Config(limit=10, buffer=2)), callback()]
    counters, evicted, decided, made = scored([1.0, 0.0, 1.0], callbacks)
    assert counters["in_flight"] == 1 and not evicted and decided == [("t@0", None)]
    assert [columns["reward"] for columns in made.values()] == [0.5, -1.0, 0.0]


def test_a_group_that_shaping_left_without_a_reward_is_filtered() -> None:
    """It was scored: it has not failed. But a run in which that goes on and on must end, so it says what happened."""
    counters, evicted, decided, made = scored([1.0, 0.0], [MaskTruncated(), callback()], stop=Stop.LENGTH)
    assert counters["filtered"] == 1 and counters["failed"] == 0 and evicted == ["t@0"] and not made
    assert decided == [("t@0", "its plays were scored, but shape_rewards left none of them a reward")]


def test_a_group_on_which_every_reward_abstained_has_failed() -> None:
    counters, evicted, decided, made = scored([None, None], [MaskTruncated(), callback()], stop=Stop.LENGTH)
    assert counters["failed"] == 1 and counters["filtered"] == 0 and evicted == ["t@0"] and not made
    assert decided == [("t@0", "every reward abstained")]
