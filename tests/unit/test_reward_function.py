"""Reward ``function``: whatever a user has that can be called."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax_core.config.schema import RewardSection
from relax_core.errors import ConfigError
from relax_core.scoring import Scorer, outcomes
from relax_core.testing.reward_plays import group_of, played
from relax_core.types import Trajectory
from relax_envs.rewards.function import Function

CODE = """
import asyncio, functools, os, sys, threading, time

def of_trajectory(trajectory): return len(trajectory.last_reply)
def of_any(thing): return thing.reply_tokens
def positional(play, /): return play.reply_tokens
def of_default(x=None): return x.reply_tokens
def of_star(*things): return things[0].reply_tokens
def of_task(task): return float(task.answer)
def of_response(response): return float(response)
def of_two(response, answer): return response == answer
def of_keywords(*, response, answer): return response == answer
def of_metadata(metadata, answer=None): return metadata["x"] if answer == "4" else 0
def of_messages(messages): return messages[0]["content"] == "?" and len(messages) == 1
def of_rest(**things): return len(things)
def of_some_and_rest(response, **things): return len(things)
def with_option(response, scale=1.0): return float(response) * scale
def with_needed(text, scale): return text.reply_tokens * scale

async def later(response):
    await asyncio.sleep(0.01)
    return float(response)

def starts_a_coroutine(response): return later(response)

class Scorer:
    def __init__(self, scale=1.0): self.scale = scale
    def __call__(self, response): return float(response) * self.scale
    def method(self, response): return float(response) + self.scale
    @staticmethod
    def static(response): return float(response)
    @classmethod
    def classy(cls, response): return float(response)

class Later:
    async def __call__(self, response):
        await asyncio.sleep(0)
        return float(response)

class Silent: pass

class Broken:
    def __init__(self): raise ValueError("no model here")
    def __call__(self, response): return 0.0

made, later_made = Scorer(3.0), Later()
half = functools.partial(with_option, scale=0.5)
half_of_object = functools.partial(Scorer(0.5))
half_later = functools.partial(later)
of_lambda = lambda response: float(response)
builtin = callable

def nothing(response): return None
def true(response): return True
def text(response): return "0.5"
def numpy(response):
    import numpy
    return numpy.float32(0.5)
def parts(response): return {"right": 1.0, "short": -0.25, "style": None}
def raises(response): raise ValueError("I cannot")
def stops(response): raise StopIteration
def leaves(response): sys.exit(3)
async def leaves_later(response): sys.exit(3)
def sleeps(response): time.sleep(float(response)); return 1.0
def thread(response): return threading.current_thread() is not threading.main_thread()
def process(response): return os.getpid()
def dies(response): os._exit(7) if response == "die" else None; return 1.0
def lists(response, metadata): return [response, metadata["x"]]

def ranks(group): return [float(t.member) for t in group.trajectories]
def of_group(whole): return [0.5] * len(whole.trajectories)
def of_responses(responses, answer): return [r == answer for r in responses]
def of_all(trajectories, task, messages): return [len(m) for m in messages]
async def ranks_later(group): return ranks(group)
def partly(group): return [1.0, None]
def too_few(group): return [1.0]
def one(group): return 1.0
def array(group):
    import numpy
    return numpy.arange(len(group.trajectories))
def parts_of_group(group): return [{"a": 1.0}, {"a": 2.0}]

def needs_truth(response, truth): return 1.0
def needs_two(a, b): return 1.0
def needs_nothing(): return 1.0
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


def built(file: Path, name: str, **settings: Any) -> Function:
    return Function(Function.Config(call=f"{file}:{name}", **settings))


def asked(reward: Function, *plays: Trajectory, timeout: float = 20) -> list[Any]:
    async def ask() -> list[Any]:
        try:
            return list(await outcomes(reward, group_of(plays), timeout))
        finally:
            await reward.close()

    return asyncio.run(ask())


def play(reply: str = "4", member: int = 0) -> Trajectory:
    found = played(reply, answer="4", metadata={"x": 7}, tokens=5)
    found.member = member
    return found


# --- what can be called -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("of_trajectory", 1),
        ("of_any", 5),
        ("positional", 5),
        ("of_default", 5),
        ("of_star", 5),
        ("of_task", 4.0),
        ("of_response", 4.0),
        ("of_two", True),
        ("of_keywords", True),
        ("of_metadata", 7),
        ("of_messages", True),
        ("of_rest", 6),
        ("of_some_and_rest", 5),
        ("with_option", 4.0),
        ("later", 4.0),
        ("starts_a_coroutine", 4.0),
        ("Scorer", 4.0),
        ("Scorer.static", 4.0),
        ("Scorer.classy", 4.0),
        ("made", 12.0),
        ("made.method", 7.0),
        ("Later", 4.0),
        ("later_made", 4.0),
        ("half", 2.0),
        ("half_of_object", 2.0),
        ("half_later", 4.0),
        ("of_lambda", 4.0),
        ("builtin", False),
        ("nothing", None),
        ("true", True),
        ("numpy", 0.5),
        ("parts", {"right": 1.0, "short": -0.25, "style": None}),
        ("thread", True),
    ],
)
def test_what_can_be_called(file: Path, name: str, reward: Any) -> None:
    assert asked(built(file, name), play()) == [reward]


@pytest.mark.parametrize(
    ("name", "options", "reward"),
    [
        ("with_option", {"scale": 2.0}, 8.0),
        ("with_needed", {"scale": 2.0}, 10.0),
        ("Scorer", {"scale": 2.0}, 8.0),
        ("half", {"scale": 0.25}, 1.0),
        ("of_rest", {"extra": 1}, 7),
    ],
)
def test_options_are_keywords(file: Path, name: str, options: dict[str, Any], reward: float) -> None:
    assert asked(built(file, name, options=options), play()) == [reward]


def test_a_module_on_the_path_is_found_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    assert asked(Function(Function.Config(call="my_rewards:of_response")), play()) == [4.0]
    sys.modules.pop("my_rewards")


def test_a_file_is_executed_once_and_relative_to_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    first, again = built(Path("my_rewards.py"), "made"), built(file, "made")
    assert first.function is again.function


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("FILE:of_respnse", "has no 'of_respnse'; did you mean 'of_response'?"),
        ("FILE:number", "is a int, which cannot be called"),
        ("FILE:needs_truth", "needs 'truth'; it can have trajectory, task, response, answer, metadata, messages"),
        ("FILE:needs_two", "needs 'a'"),
        ("FILE:needs_nothing", "has no parameter"),
        ("FILE:Silent", "instances of the class"),
        ("FILE:Broken", "cannot be made: ValueError: no model here"),
        ("FILE", "write package.module:name, or path/file.py:name"),
        (":name", "write package.module:name"),
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("none.py:f", "none.py cannot be imported: FileNotFoundError"),
    ],
)
def test_what_cannot_be_called_stops_the_run(file: Path, call: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Function(Function.Config(call=call.replace("FILE", str(file))))
    assert said in str(error.value) and str(error.value).startswith("reward function: call: ")


def test_a_file_that_cannot_be_executed_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    for _ in range(2):  # the second time it is no half-made module either
        with pytest.raises(ConfigError, match=r"bad.py cannot be imported: SyntaxError"):
            built(tmp_path / "bad.py", "f")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("with_option", {"options": {"scael": 2.0}}, "options.scael: .* has no such parameter"),
        ("with_option", {"options": {"response": "x"}}, "options.response: Relax itself gives the function"),
        ("of_trajectory", {"process": True}, "needs 'trajectory'; it can have response, answer, metadata, messages"),
        ("of_any", {"process": True}, "called with plain data: name its parameters after response, answer"),
        ("of_response", {"group": True}, "needs 'response'; did you mean 'responses'"),
        ("of_group", {"group": False, "options": {"group": 1}}, "options.group: .* has no such parameter"),
        ("ranks", {}, "needs 'group'; it can have trajectory, task, response, answer, metadata, messages"),
    ],
)
def test_settings_that_do_not_fit_the_function(file: Path, name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(file, name, **settings)


@pytest.mark.parametrize(
    "settings", [{"process": True, "group": True}, {"deadline": 0.0}, {"workers": 0}, {"weight": 1}]
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Function.Config(call="os.path:exists", **settings)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "ValueError: I cannot"),
        ("stops", "StopIteration"),
        ("leaves", "SystemExit: 3"),
        ("leaves_later", "asked Python to exit (3)"),
        ("text", "the value '0.5' is not a number"),
    ],
)
def test_a_function_that_fails_abstains_and_the_others_go_on(file: Path, name: str, said: str) -> None:
    plays, notes = [play(), play()], list[str]()
    rewards = [(RewardSection(id="mine"), built(file, name)), (RewardSection(id="other"), built(file, "true"))]
    scorer = Scorer(rewards, notes.append)
    asyncio.run(scorer.score(group_of(plays)))
    assert [p.rewards for p in plays] == [{"mine": None, "other": 1.0}] * 2
    assert scorer.failures == {"mine": 2} and said in notes[0]


def test_components_are_shown_beside_their_sum(file: Path) -> None:
    found = play()
    scorer = Scorer([(RewardSection(id="function", name="mine", weight=2.0), built(file, "parts"))])
    asyncio.run(scorer.score(group_of([found])))
    assert found.rewards == {"mine": 0.75} and found.reward == 1.5
    assert found.metrics == {"mine/right": 1.0, "mine/short": -0.25}


def test_a_failed_play_is_not_scored(file: Path) -> None:
    assert asked(built(file, "raises"), played("4", failed=True)) == [None]


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_slow_function_holds_nobody_up(file: Path) -> None:
    async def ask() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        found = await outcomes(built(file, "sleeps", workers=4), group_of([play("0.3")] * 4), 20)
        ticking.cancel()
        return list(found), ticks

    started = time.monotonic()
    found, ticks = asyncio.run(ask())
    assert found == [1.0] * 4 and ticks > 5
    assert 0.3 <= time.monotonic() - started < 1.1  # at the same time


def test_only_so_many_calls_run_at_once(file: Path) -> None:
    started = time.monotonic()
    assert asked(built(file, "sleeps", workers=1), *[play("0.1")] * 4) == [1.0] * 4
    assert time.monotonic() - started >= 0.4


def test_a_function_that_never_ends_is_not_waited_for_nor_does_the_program(file: Path) -> None:
    started = time.monotonic()
    found = asked(built(file, "sleeps", workers=2), play("30"), play("0"), timeout=0.3)
    assert isinstance(found[0], TimeoutError) and found[1] == 1.0
    assert time.monotonic() - started < 3
    assert any(t.name == "reward" and t.daemon for t in threading.enumerate())


def test_it_may_be_called_from_other_threads(file: Path) -> None:
    reward = built(file, "later")
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = asyncio.run(reward(play(str(i))))

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("ranks", [0.0, 1.0]),
        ("of_group", [0.5, 0.5]),
        ("of_responses", [True, False]),
        ("of_all", [1, 1]),
        ("ranks_later", [0.0, 1.0]),
        ("partly", [1.0, None]),
        ("array", [0, 1]),
        ("parts_of_group", [{"a": 1.0}, {"a": 2.0}]),
        ("too_few", "score_group gave 1 values for 2 trajectories"),
        ("one", "returned a float: return a list"),
    ],
)
def test_a_function_of_groups(file: Path, name: str, right: Any) -> None:
    found = asked(built(file, name, group=True), play("4", 0), play("5", 1))
    if isinstance(right, str):
        assert len(found) == 2 and all(right in str(error) for error in found)
    else:
        assert found == right


# --- processes --------------------------------------------------------------------------------------------------------


def in_process(file: Path, name: str, plays: Sequence[Trajectory], **settings: Any) -> list[Any]:
    return asked(built(file, name, process=True, **{"workers": 1, "deadline": 10.0, **settings}), *plays)


def test_a_function_may_run_in_a_process_of_its_own(file: Path) -> None:
    pids = in_process(file, "process", [play(), play()])
    assert pids[0] == pids[1] != os.getpid()
    assert in_process(file, "lists", [play()]) == [["4", 7]]
    assert in_process(file, "of_two", [play()]) == [True]
    assert in_process(file, "with_option", [play()], options={"scale": 2.0}) == [8.0]
    assert in_process(file, "later", [play()]) == [4.0]
    assert in_process(file, "numpy", [play()]) == [0.5]


def test_a_process_that_hangs_or_dies_fails_one_call_and_the_others_go_on(file: Path) -> None:
    found = in_process(file, "sleeps", [play("30"), play("0"), play("0")], deadline=1.0)
    assert "took more than 1 s" in str(found[0]) and found[1:] == [1.0, 1.0]
    found = in_process(file, "dies", [play("die"), play("4")])
    assert "ended with status 7" in str(found[0]) and found[1] == 1.0
    found = in_process(file, "raises", [play()])
    assert "ValueError: I cannot" in str(found[0])
