"""Plays that raise, hang, return garbage or flood are data: their group goes on, and too many of them end the run."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from relax_core.bus import Bus
from relax_core.chat import Chat, PlayOver, Seat
from relax_core.config.schema import PlayLimits
from relax_core.errors import DataError, RelaxError
from relax_core.interfaces import Completion, Engine, Environment, Request
from relax_core.play_clock import PlayClock
from relax_core.play_counts import PlayCounts, count_metrics, noted_means
from relax_core.players import PlayCount, Player, rows_of
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import tiny_run
from relax_core.types import Group, Image, PlayError, Sampling, Stop, Task, Trajectory, Version, user


class Slow(Engine):
    """Answers ``red`` and the end, after so many seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(None)
        self.seconds = seconds

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(self.seconds)
        ids = [3, 1][: request.sampling.max_new_tokens]
        return Completion(ids, [-0.5] * len(ids), [Version(0, 1)] * len(ids), Stop.EOS)

    async def load_weights(self, *_: Any) -> None: ...

    async def health(self) -> dict[str, float]:
        return {}


class Acting(Environment):
    """Asks once, then does what ``act`` does."""

    def __init__(self, act: Any) -> None:
        super().__init__(None)
        self.act = act

    def tasks(self, split: str) -> list[Task]:
        return []

    async def play(self, task: Task, chat: Chat) -> None:
        await chat("red")
        result = self.act(chat)
        return await result if asyncio.iscoroutine(result) else result  # type: ignore[no-any-return]


def played(act: Any, engine: Engine | None = None, **limits: Any) -> Trajectory:
    player = Player(
        tiny_run(), engine or Slow(), tiny_adapter("red green", images=True), {"e": Acting(act)}, Bus(9, 999)
    )
    player._limits["e"] = PlayLimits(**limits)
    task = Task("t", (user("red"),), environment="e")
    return asyncio.run(player.single(task, Seat(0, "t", 0, 0, ()), Sampling(), None, {}))


def raising(error: BaseException) -> Any:
    def act(chat: Chat) -> None:
        raise error

    return act


async def hang(chat: Chat) -> None:
    await asyncio.sleep(60)


async def in_a_group_of_tasks(chat: Chat) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(chat.branch(1)("red"))
        group.create_task(chat.branch(1)("green"))


async def in_spite_of_all(chat: Chat) -> None:
    while True:
        with suppress(Exception):
            await chat("red")


FAILURES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "raises": (raising(ValueError("no map")), {}, "ValueError", "no map"),
    "exits": (raising(SystemExit(3)), {}, "SystemExit", "3"),
    "cancels itself": (raising(asyncio.CancelledError()), {}, "CancelledError", ""),
    "times out by itself": (raising(TimeoutError("socket")), {}, "TimeoutError", "socket"),
    "hangs": (hang, {"seconds": 0.05}, "Timeout", "took longer than limits.seconds (0.05)"),
    "returns garbage": (lambda chat: 5, {}, "TypeError", "play returned a int; nothing is allowed"),
    "says garbage": (lambda chat: chat(user(Image(b"no picture"))), {}, "DataError", "no modality decodes image"),
    "floods": (lambda chat: chat("red " * 10_000), {"tokens": 500}, "TooManyTokens", "limits.tokens allows 500"),
    "notes no number": (lambda chat: chat.metrics.update(x=float("nan")), {}, "ValueError", "chat.metrics['x'] is nan"),
}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES)
def test_it_is_an_error_of_the_play(case: tuple[Any, dict[str, Any], str, str]) -> None:
    act, limits, kind, text = case
    found = played(act, **limits)
    assert found.error is not None and found.error.where == "environments.e"
    assert found.error.type == kind and text in found.error.text
    assert found.stop is (Stop.TIME if kind == "Timeout" else Stop.ERROR)
    assert rows_of(Group("g", 0, found.task, 0, [found])) == {}


def test_a_play_that_is_cancelled_from_outside_is_no_error() -> None:
    async def run() -> None:
        player = Player(tiny_run(), Slow(), tiny_adapter("red green"), {"e": Acting(hang)}, Bus(9, 999))
        task = Task("t", (user("red"),), environment="e")
        play = asyncio.create_task(player.single(task, Seat(0, "t", 0, 0, ()), Sampling(), None, {}))
        await asyncio.sleep(0.05)
        play.cancel()
        with pytest.raises(asyncio.CancelledError):
            await play

    asyncio.run(run())


@pytest.mark.parametrize("act", [in_spite_of_all, in_a_group_of_tasks], ids=["catches all", "task group"])
def test_a_limit_ends_a_play_that_is_trained(act: Any) -> None:
    found = played(act, turns=2)
    assert found.error is None and found.stop is Stop.TURNS
    assert len(rows_of(Group("g", 0, found.task, 0, [found]))) >= 1


def test_the_policys_time_does_not_count() -> None:
    async def three_more(chat: Chat) -> None:
        for _ in range(3):
            await chat("red")
            await asyncio.sleep(0.01)

    assert played(three_more, Slow(0.2), seconds=0.4).error is None


def test_a_clock_counts_what_is_left_and_stops_for_several_at_once() -> None:
    async def run() -> float:
        clock = PlayClock(0.3)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with clock:
                await asyncio.sleep(0.1)
                with clock.stopped():
                    await asyncio.sleep(0.2)
                    with clock.stopped():
                        await asyncio.sleep(0.2)
                    await asyncio.sleep(0.1)
                await asyncio.sleep(5)
        assert clock.expired
        return time.monotonic() - start

    assert 0.75 < asyncio.run(run()) < 3


def test_notes_of_an_environment_are_metrics_of_the_play_and_averaged() -> None:
    found = played(lambda chat: chat.metrics.update(crop=1))
    assert found.metrics == {"crop": 1.0, "rewrites": 0.0}
    other = Trajectory(found.task, 0, 1, metrics={"crop": 0.0, "exact/failures": 1.0})
    assert noted_means([found, other, Trajectory(found.task, 0, 2)]) == {"crop": 0.5}


# --- too many ---------------------------------------------------------------------------------------------------------


def count(error: str | None = None) -> PlayCount:
    return PlayCount(
        2, 0, Stop.ERROR if error else Stop.EOS, PlayError("environments.e", error, "x") if error else None
    )


def test_a_run_ends_when_more_than_the_fraction_of_the_newest_plays_fail() -> None:
    counts = PlayCounts(tiny_run().config.model_copy(update={"max_failed_fraction": 0.25}), lambda line: None)
    window = counts._newest.maxlen or 0
    counts.add([count("ValueError")] * (window // 4) + [count()] * (window - window // 4))
    counts.add([count()] * window)
    counts.add([count("KeyError")] * (window // 4 - 1) + [count("ValueError")])
    with pytest.raises(RelaxError, match=r"max_failed_fraction: \d+ of the last \d+ plays failed, 0.25 of them may"):
        counts.add([count("KeyError")] * 2)
    shown = count_metrics(counts.take())
    assert shown["plays/errors/KeyError"] == window // 4 + 1 and shown["plays/stops/eos"] == 2 * window - window // 4
    assert shown["plays/failed_fraction"] == shown["plays/errors"] / (2 * window + window // 4 + 2)
    assert count_metrics(counts.take())["plays/errors"] == 0


def test_a_limit_is_not_swallowed_by_who_catches_exceptions() -> None:
    assert not issubclass(PlayOver, Exception) and issubclass(DataError, RelaxError)
