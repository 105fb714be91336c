"""Rewards exact and format: right, wrong, abstaining."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from relax_core.types import PlayError, Stop, Task, Trajectory, Turn, message, user
from relax_envs.rewards.exact import Exact
from relax_envs.rewards.format import Format


def trajectory(reply: str | None, answer: Any = "red", stop: Stop = Stop.EOS) -> Trajectory:
    task = Task("t", (user("?"),), answer)
    turns = [] if reply is None else [Turn(task.messages, message("assistant", reply), stop, 1)]
    return Trajectory(task, 0, 0, turns)


def failed(reply: str) -> Trajectory:
    found = trajectory(reply)
    found.error = PlayError("play", "ValueError", "oops")
    return found


def exact(found: Trajectory, **settings: Any) -> float | None:
    return asyncio.run(Exact(Exact.Config(**settings))(found))


def form(found: Trajectory, **settings: Any) -> float | None:
    return asyncio.run(Format(Format.Config(**settings))(found))


@pytest.mark.parametrize(
    ("reply", "answer", "settings", "reward"),
    [
        ("red", "red", {}, 1.0),
        (" red\n", "red", {}, 1.0),
        (" red", "red", {"strip": False}, 0.0),
        ("Red", "red", {}, 0.0),
        ("Red", "red", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("red blue", "red", {}, 0.0),
        ("", "red", {}, 0.0),
        ("", "", {}, 1.0),
        (None, "red", {}, 0.0),
        ("3", 3, {}, 1.0),
        ("3.0", 3, {}, 0.0),
        ("blue", ["red", "blue"], {}, 1.0),
        ("green", ("red", "blue"), {}, 0.0),
        ("anything", [], {}, 0.0),
        ("red", None, {}, None),
    ],
)
def test_exact(reply: str | None, answer: Any, settings: dict[str, Any], reward: float | None) -> None:
    assert exact(trajectory(reply, answer), **settings) == reward


def test_a_failed_play_is_not_scored() -> None:
    assert exact(failed("red")) is None
    assert form(failed("red"), words=1) is None


@pytest.mark.parametrize(
    ("reply", "settings", "reward"),
    [
        ("red", {"words": 1}, 1.0),
        (" red ", {"words": 1}, 1.0),
        ("red red", {"words": 1}, 0.0),
        ("", {"words": 1}, 0.0),
        (None, {"words": 1}, 0.0),
        ("<a>x\ny</a>", {"pattern": "<a>.*</a>"}, 1.0),
        ("<a>x</a>!", {"pattern": "<a>.*</a>"}, 0.0),
        ("one two", {"pattern": "[a-z ]+", "words": 2}, 1.0),
        ("one 2", {"pattern": "[a-z ]+", "words": 2}, 0.0),
    ],
)
def test_format(reply: str | None, settings: dict[str, Any], reward: float) -> None:
    assert form(trajectory(reply), **settings) == reward


@pytest.mark.parametrize(
    ("stop", "ended", "reward"),
    [(Stop.EOS, True, 1.0), (Stop.LENGTH, True, 0.0), (Stop.LIMIT, True, 0.0), (Stop.LENGTH, False, 1.0)],
)
def test_format_may_ask_for_an_end(stop: Stop, ended: bool, reward: float) -> None:
    assert form(trajectory("red", stop=stop), words=1, ended=ended) == reward
    assert form(trajectory(None), ended=True) == 0.0


def test_the_last_turn_counts() -> None:
    found = trajectory("red")
    found.turns.append(Turn((), message("assistant", "blue"), Stop.LENGTH, 1))
    assert exact(found) == 0.0
    assert form(found, ended=True) == 0.0


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ValidationError, match=r"no condition is set: give pattern, words or ended: true"):
        Format.Config()
    with pytest.raises(ValidationError, match=r"'\(' is no regular expression: missing \)"):
        Format.Config(pattern="(")
    with pytest.raises(ValidationError):
        Format.Config(words=0)
