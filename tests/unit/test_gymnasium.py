"""Gymnasium environments as conversations: observations, actions, returns, seeds, and that each is closed."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.errors import ConfigError
from relax_core.testing.reward_plays import played as a_play
from relax_core.testing.reward_plays import rewarded
from relax_core.testing.scripted_plays import play
from relax_core.types import Decoded, Image, Stop, Text, Trajectory, user
from relax_envs.gym import Gymnasium
from relax_envs.gym_values import Actions, shown
from relax_envs.rewards.metric import Metric

CORRIDOR = '''
"""A corridor of cells: find the door. Written against Gymnasium's interface, without the package."""
import random
import threading
import time

LOG = []


class Corridor:
    def __init__(self, length=5, slow=0.0):
        self.length, self.slow, self.thread = length, slow, threading.get_ident()

    def reset(self, *, seed=None, options=None):
        self.at = random.Random(seed).randrange(self.length)
        LOG.append(("reset", seed))
        return {"at": self.at, "of": self.length}, {}

    def step(self, action):
        assert threading.get_ident() == self.thread, "another thread"
        time.sleep(self.slow)
        if action == 9:
            raise RuntimeError("the floor gave way")
        self.at += action
        there = self.at >= self.length
        return {"at": self.at, "of": self.length}, 1.0 if there else -0.25, there, self.at < 0, {}

    def close(self):
        LOG.append(("close", threading.get_ident() == self.thread))


def broken():
    raise ValueError("no door")
'''
ACTIONS = {"left": -1, "right": 1, "fall": 9}


@pytest.fixture
def corridor(tmp_path: Path) -> Path:
    (tmp_path / "corridor.py").write_text(CORRIDOR)
    return tmp_path / "corridor.py"


def environment(**settings: Any) -> Gymnasium:
    return Gymnasium(Gymnasium.Config.model_validate_json(json.dumps(settings)))


def in_corridor(path: Path, **settings: Any) -> Gymnasium:
    return environment(**{"path": f"{path}:Corridor", "actions": ACTIONS, **settings})


def log(path: Path) -> list[Any]:
    (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", None) == str(path)]
    return list(module.LOG)


def until_closed(path: Path, times: int) -> list[Any]:
    """Closing is not waited for by a play."""
    end = time.monotonic() + 20
    while sum(what == "close" for what, _ in log(path)) < times and time.monotonic() < end:
        time.sleep(0.01)
    return log(path)


# --- plays ------------------------------------------------------------------------------------------------------------


def test_observations_are_said_and_replies_are_actions(corridor: Path) -> None:
    env = in_corridor(corridor, instruction="Find the door.")
    task = env.tasks("train")[1]
    assert (task.id, task.metadata) == ("Corridor-train-1", {"seed": 2})
    start = int(task.messages[0].text.split("at: ")[1][0])
    assert task.messages == (user("Find the door.\n", f"at: {start}\nof: 5"),)

    found = play(env, task, ["up", "LEFT " if start else "right", *["right"] * 9])
    assert found.error is None and found.stop is Stop.EOS
    second = start - 1 if start else 1
    said = [turn.prompt for turn in found.turns]
    assert said[0] is not task.messages and said[0][0] is task.messages[0]  # so that it is encoded once
    assert said[1] == (user("Your reply is not an action. Write one of: left, right, fall."),)
    assert said[2] == (user(f"at: {second}\nof: 5"),)
    steps = 1 + (5 - second)
    assert len(said) == steps + 1
    assert found.metrics["return"] == 1.0 - 0.25 * (steps - 1)
    assert (found.metrics["steps"], found.metrics["invalid_actions"]) == (steps, 1.0)
    assert until_closed(corridor, 2) == [("reset", 2), ("close", True)] * 2


def test_truncation_ends_a_play_too(corridor: Path) -> None:
    env = in_corridor(corridor, options={"length": 1})
    found = play(env, env.tasks("train")[0], ["left"])
    assert found.error is None and found.metrics["return"] == -0.25


def test_splits_have_other_seeds_and_a_task_repeats(corridor: Path) -> None:
    env = in_corridor(corridor, size=3, eval_size=2, seed=10)
    assert [[t.metadata["seed"] for t in env.tasks(split)] for split in ("train", "eval")] == [[20, 22, 24], [21, 23]]
    again = in_corridor(corridor, size=3, eval_size=2, seed=10)
    assert list(again.tasks("train")) == list(env.tasks("train"))


def test_plays_may_have_a_start_of_their_own_that_repeats(corridor: Path) -> None:
    env = in_corridor(corridor, own_start=True, options={"length": 1000})
    task = env.tasks("train")[0]
    starts = [play(env, task, ["right", "fall"], member=member).turns[0].prompt for member in (0, 1, 0)]
    assert starts[0] == starts[2] != starts[1]
    shared = in_corridor(corridor, options={"length": 1000})
    task = shared.tasks("train")[0]
    assert len({play(shared, task, ["right", "fall"], member=m).turns[0].prompt for m in (0, 1)}) == 1


def test_an_environment_that_fails_is_an_error_of_the_play_and_is_closed(corridor: Path) -> None:
    env = in_corridor(corridor)
    found = play(env, env.tasks("train")[0], ["fall"])
    assert found.error is not None and found.error.text == "the floor gave way"
    assert until_closed(corridor, 2)[-1] == ("close", True)


class Chat:
    """Replies ``right`` for ever."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    async def __call__(self, *said: Any) -> Any:
        return type("Reply", (), {"text": "right"})()


def test_a_play_that_is_cancelled_in_a_step_closes_its_environment_behind_it(corridor: Path) -> None:
    env = in_corridor(corridor, options={"slow": 0.3, "length": 1000})
    task = env.tasks("train")[0]

    async def main() -> float:
        going = asyncio.create_task(env.play(task, Chat()))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        return time.monotonic() - begun

    assert asyncio.run(main()) < 0.2  # not until the step has ended
    assert until_closed(corridor, 2)[-1] == ("close", True)
    end = time.monotonic() + 20
    while any(thread.name == "gymnasium" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.name == "gymnasium" for thread in threading.enumerate())


# --- the package ------------------------------------------------------------------------------------------------------

WAY = ["down", "down", "right", "right", "down", "right"]
LAKE = {"env": "FrozenLake-v1", "actions": {"left": 0, "down": 1, "right": 2, "up": 3}}


def test_an_environment_of_the_package() -> None:
    pytest.importorskip("gymnasium")
    env = environment(**LAKE, options={"is_slippery": False, "render_mode": "ansi"}, show="render")
    found = play(env, env.tasks("train")[0], WAY)
    assert found.error is None and found.metrics["return"] == 1.0 and len(found.turns) == 6
    assert "SFFF" in found.turns[0].prompt[0].text.replace("\x1b[41m", "").replace("\x1b[0m", "")


def test_chance_of_an_environment_is_the_tasks_seed() -> None:
    pytest.importorskip("gymnasium")
    env = environment(**LAKE)
    task = env.tasks("train")[3]
    paths = [[turn.prompt for turn in play(env, task, WAY * 30).turns] for _ in range(2)]
    assert paths[0] == paths[1]


def test_continuous_actions_are_json() -> None:
    pytest.importorskip("gymnasium")
    env = environment(env="MountainCarContinuous-v0", options={"max_episode_steps": 2})
    found = play(env, env.tasks("train")[0], ["[0.5]", "[7]", "[true]", "[-1]"])
    assert found.error is None and found.metrics["invalid_actions"] == 2
    told = found.turns[2].prompt[0].text
    assert told == "Your reply is not an action. Write a JSON value for Box(-1.0, 1.0, (1,), float32)."
    assert found.metrics["return"] == pytest.approx(-0.1 * (0.25 + 1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": "FrozenLack-v1"}, r"FrozenLack-v1 cannot be made: NameNotFound: .*FrozenLake"),
        ({"env": "FrozenLake-v1", "options": {"no_such": 1}}, "FrozenLake-v1 cannot be made: TypeError"),
        ({**LAKE, "actions": {"jump": 7}}, r"actions.jump: 7 is not in the action space Discrete\(4\)"),
    ],
)
def test_what_the_package_cannot_make_ends_the_run(settings: dict[str, Any], said: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=said) as error:
        environment(**settings).tasks("train")[0]
    assert "\n" not in str(error.value)


def test_a_class_that_cannot_be_made_ends_the_run(corridor: Path) -> None:
    with pytest.raises(ConfigError, match=r"broken cannot be made: ValueError: no door"):
        environment(path=f"{corridor}:broken").tasks("train")[0]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'relax-rl\[gymnasium\]'"):
        environment(env="FrozenLake-v1").tasks("train")[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "one of them"), ({"env": "a", "path": "b:c"}, "one of them"), ({"env": "a", "pattern": "("}, "pattern")],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        environment(**settings)


# --- observations -----------------------------------------------------------------------------------------------------

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("You see a door.", "You see a door."),
        (3, "3"),
        (np.int64(3), "3"),
        (np.float32(0.1), "0.1"),
        (1 / 3, "0.3333"),
        (True, "True"),
        (np.array([0.5, -1.25, 1e-9], np.float32), "0.5 -1.25 1e-09"),
        (np.eye(2, dtype=np.int8), "1 0\n0 1"),
        ((1, 2, False), "1 2 False"),
        (("a", 2), "a\n2"),
        ({"at": 1, "map": np.eye(2, dtype=np.int8), "who": "you"}, "at: 1\nmap:\n1 0\n0 1\nwho: you"),
        (np.zeros((2, 2), np.uint8), "0 0\n0 0"),
        ("x" * 100, "xxxxxxxxxx\n[80 characters left out]\nxxxxxxxxxx"),
    ],
)
def test_observations_are_readable(observation: Any, text: str) -> None:
    assert shown(observation, 20 if isinstance(observation, str) else 1000) == (Text(text),)


def test_pictures_stay_pictures_and_are_copied() -> None:
    pixels = PIXELS.copy()
    first, picture, last = shown({"at": 1, "view": pixels, "left": 2}, 100)
    pixels[:] = 0
    assert (first, last) == (Text("at: 1\nview:"), Text("left: 2"))
    assert picture == Image(Decoded("image", PIXELS))
    assert shown([Text("a"), Image(Path("b.png"))], 100) == (Text("a"), Image(Path("b.png")))


# --- actions ----------------------------------------------------------------------------------------------------------


def test_the_action_is_what_the_pattern_finds_last_behind_the_reasoning() -> None:
    actions = Actions({"left": 0, "right": 1}, r"<act>(.*?)</act>", None)
    assert actions.read("<think><act>left</act></think> I go. <act>left</act>, no: <act> Right </act>") == 1
    with pytest.raises(ValueError, match=r"There is no action in your reply\. Write one of: left, right\."):
        actions.read("<think><act>left</act></think> right")


def test_spaces_decide_what_json_becomes() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    both = spaces.Dict({"go": spaces.Discrete(3), "by": spaces.Box(0, 1, (2,), np.float32)})
    found = Actions(None, None, both).read('{"go": 2, "by": [0, 0.5]}')
    assert found["go"] == 2 and found["by"].dtype == np.float32 and found["by"].tolist() == [0, 0.5]
    assert Actions(None, None, spaces.MultiDiscrete([3, 4])).read("[2, 3]").tolist() == [2, 3]
    assert Actions(None, None, spaces.Tuple([spaces.Discrete(2), spaces.Text(5)])).read('[1, "ab"]') == (1, "ab")
    assert Actions(None, None, spaces.Box(-1, 1, (), np.float32)).read("0.5") == np.float32(0.5)
    assert Actions(None, None, None).read('{"any": [1]}') == {"any": [1]}


@pytest.mark.parametrize("reply", ["4", "-1", "1.0", "true", '"1"', "[1]", "", "go 1", "NaN", "[" * 5000, "9" * 5000])
def test_what_is_not_in_the_space_is_no_action(reply: str) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    with pytest.raises(ValueError, match=r"is not an action\. Write a JSON value for Discrete\(4\)\.") as error:
        Actions(None, None, spaces.Discrete(4)).read(reply)
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("reply", ["[1]", '["1", "2"]', "[0.5, 1]", "[[1, 2]]", "[1, [2]]", "[null, 1]"])
def test_lists_are_not_bent_into_a_space(reply: str) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    with pytest.raises(ValueError, match="is not an action"):
        Actions(None, None, spaces.MultiDiscrete([3, 4])).read(reply)


# --- the reward -------------------------------------------------------------------------------------------------------


def of(**metrics: float) -> Trajectory:
    trajectory = a_play("a", answer="a")
    trajectory.metrics.update(metrics)
    return trajectory


def test_the_reward_metric_is_the_number_of_that_name() -> None:
    trajectory = of()
    trajectory.metrics["return"] = -2.5
    assert rewarded(Metric, trajectory) == -2.5
    assert rewarded(Metric, of(found=1.0), metric="found") == 1.0
    assert rewarded(Metric, of(found=1.0)) is None
    assert rewarded(Metric, a_play("a", answer="a", failed=True)) is None
