"""Reward ``math`` as a run uses it: groups of trajectories, graded in processes of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import RewardSection
from relax_core.errors import ConfigError, DataError
from relax_core.scoring import Scorer
from relax_core.types import Group, PlayError, Stop, Task, Trajectory, Turn, message
from relax_envs.graders.pool import GraderError
from relax_envs.rewards.math import Math

CASES = Path(__file__).resolve().parents[1] / "cases" / "math.jsonl"
PAYLOADS = (
    "__import__('os').system('touch PWNED')",
    r"\boxed{__import__('os').system('touch PWNED')}",
    "The answer is $__import__('os').system('touch PWNED')$",
    "exec(\"open('PWNED','w')\")",
    "(lambda: open('PWNED','w'))()",
    r"\sum_{k=1}^{2} __import__('os').system('touch PWNED')",
    "$(touch PWNED)",
)


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    found = Math(Math.Config())
    yield found
    found._pool.close()


def trajectory(gold: Any, reply: str, error: PlayError | None = None) -> Trajectory:
    turn = Turn((), message("assistant", reply), Stop.EOS, 1)
    return Trajectory(Task("t", (), gold), 0, 0, [turn], error=error)


def group(gold: Any, replies: Sequence[str]) -> Group:
    return Group("g", 0, Task("t", (), gold), 0, [trajectory(gold, reply) for reply in replies])


def score(reward: Math, gold: Any, replies: Sequence[str]) -> list[float | BaseException | None]:
    return asyncio.run(reward.score_group(group(gold, replies)))


@pytest.mark.timeout(60)
def test_a_group_is_scored_in_order(reward: Math) -> None:
    replies = [r"\boxed{\frac{1}{2}}", "the answer is 0.5", r"\boxed{1/3}", "", r"$\frac{2}{4}$", "I do not know"]
    assert score(reward, r"\frac{1}{2}", replies) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.timeout(60)
def test_all_cases_have_their_reward_through_the_pool(reward: Math) -> None:
    async def everything() -> None:
        cases = [json.loads(line) for line in CASES.read_text().splitlines()]
        found = await asyncio.gather(
            *(reward(trajectory(c["gold"], c["response"])) for c in cases if "options" not in c), return_exceptions=True
        )
        for case, value in zip([c for c in cases if "options" not in c], found, strict=True):
            if case["reward"] is None:
                assert isinstance(value, DataError), case
            else:
                assert value == case["reward"], case

    asyncio.run(everything())


@pytest.mark.timeout(60)
def test_more_than_300_answers_a_second_are_graded_by_two_workers(reward: Math) -> None:
    golds = {
        r"\frac{1}{%d}": "The answer is 1/%d",
        r"%d\sqrt{2}": r"\boxed{\sqrt{2}\cdot %d}",
        "(x+%d)^2": "(%d+x)(x+%d)",
    }
    groups = [
        group(gold % n, [reply % ((n,) * reply.count("%d")), "0"] * 4)
        for n in range(1, 43)
        for gold, reply in golds.items()
    ]

    async def everything() -> list[list[float | BaseException | None]]:
        return await asyncio.gather(*(reward.score_group(one) for one in groups))

    asyncio.run(everything())
    begun = time.monotonic()
    assert asyncio.run(everything()) == [[1.0, 0.0] * 4] * 126
    assert time.monotonic() - begun < 1008 / 300


@pytest.mark.timeout(60)
def test_hostile_answers_are_wrong_within_the_deadline_and_the_batch_goes_on(
    reward: Math, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = [
        *("9**9**9**9", r"\boxed{9^{9^{9^{9}}}}", "4" * 100_000, r"\boxed{" + "1+" * 50_000 + "1}", "99999!"),
        *(r"\boxed{" * 10_000 + "4" + "}" * 10_000, r"\boxed{" * 10_000, r"\sum_{i=1}^{10^9} i^i", *PAYLOADS),
    ]
    replies = [reply for bad in hostile for reply in (bad, r"\boxed{4}")]
    begun = time.monotonic()
    assert score(reward, "4", replies) == [0.0, 1.0] * len(hostile)
    assert time.monotonic() - begun < reward.config.deadline
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_as_gold_is_a_bad_row_or_text_and_is_not_run(
    reward: Math, payload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = score(reward, payload, ["4"])
    assert found == 0.0 or isinstance(found, DataError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_it_abstains_without_an_answer_and_for_failed_plays(reward: Math) -> None:
    assert asyncio.run(reward(trajectory(None, "4"))) is None
    assert asyncio.run(reward(trajectory("4", "4", PlayError("", "", "")))) is None
    assert asyncio.run(reward(Trajectory(Task("t", (), "4"), 0, 0))) == 0.0  # nothing was said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("gold", ["foo_{", "", "9**9**9**9", r"\frac{1}{0}", {"a": 1}, [], ["4", "foo_{"], object()])
def test_a_gold_that_cannot_be_read_is_an_error_that_names_it(reward: Math, gold: Any) -> None:
    with pytest.raises(DataError, match=r"task 't': the answer .* cannot be read"):
        asyncio.run(reward(trajectory(gold, "4")))


@pytest.mark.timeout(60)
def test_a_bad_gold_is_counted_and_abstains(reward: Math) -> None:
    section = RewardSection(id="math", name="correct")
    scorer = Scorer([(section, reward)], note=lambda line: None)
    plays = group("foo_{", ["foo_{", "5"])
    asyncio.run(scorer.score(plays))
    assert [t.reward for t in plays.trajectories] == [None, None]
    assert scorer.failures["correct"] == 2 and "foo_{" in scorer.failures_in_words()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("gold", "reply", "right"),
    [
        (5, "5", 1.0),
        (0.5, "1/2", 1.0),
        (1e-7, "10^{-7}", 1.0),
        (True, "true", 1.0),
        (["4", 5], "5", 1.0),
        (("a", "b"), "c", 0.0),
    ],
)
def test_a_gold_may_be_a_number_or_a_list(reward: Math, gold: Any, reply: str, right: float) -> None:
    assert asyncio.run(reward(trajectory(gold, reply))) == right


@pytest.mark.timeout(60)
def test_reasoning_is_no_answer(reward: Math) -> None:
    replies = [
        r"<think>\boxed{5}</think>",
        r"\boxed{5}</think>\boxed{4}",
        r"<think>\boxed{4}</think>\boxed{5}<|im_end|>",
    ]
    assert score(reward, "5", replies) == [0.0, 0.0, 1.0]


@pytest.mark.timeout(60)
def test_options_reach_the_grader() -> None:
    reward = Math(Math.Config(percent="number", boxes="any", workers=1))
    assert score(reward, "50", [r"\boxed{1} \boxed{50\%}", "0.5"]) == [1.0, 0.0]
    reward._pool.close()


@pytest.mark.timeout(60)
def test_graders_that_were_killed_between_two_groups_are_replaced(reward: Math) -> None:
    score(reward, "4", ["4"])
    for pid in reward._pool.pids():
        os.kill(pid, signal.SIGKILL)
    assert score(reward, "4", ["4", "5"]) == [1.0, 0.0]


@pytest.mark.timeout(60)
def test_a_grader_that_hangs_abstains_and_the_others_go_on() -> None:
    reward = Math(Math.Config(deadline=0.3, workers=1))

    async def scored() -> list[float | BaseException | None]:
        await reward(trajectory("4", "4"))
        play = asyncio.ensure_future(reward.score_group(group("4", ["4"] * 3000)))
        await asyncio.sleep(0.02)
        os.kill(reward._pool.pids()[0], signal.SIGSTOP)
        return await play

    found = asyncio.run(scored())
    failed = [value for value in found if value != 1.0]
    assert len(failed) <= 1 and all(isinstance(x, GraderError) and x.kind == "deadline" for x in failed)
    reward._pool.close()


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else find(name, *a))
    with pytest.raises(ConfigError, match=r"pip install 'relax-rl\[math\]'"):
        Math(Math.Config())
    assert list(Math.check(Math.Config(), None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings", [{"percent": "both"}, {"tolerance": -1.0}, {"longest": 0}, {"workers": 0}, {"box": "last"}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Math.Config.model_validate(settings)
