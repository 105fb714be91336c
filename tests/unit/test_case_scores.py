"""Scores that other frameworks got wrong, or lost: cancelled tasks, busy servers, threads, functions of many forms."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import RewardSection
from relax_core.interfaces import Reward
from relax_core.scoring import Scorer
from relax_core.types import Group, Stop, Task, Trajectory, Turn, message, user
from relax_envs.rewards.exact import Exact
from relax_envs.rewards.function import Function
from relax_envs.rewards.math import Math
from relax_envs.rewards.remote import Remote

pytestmark = pytest.mark.timeout(60)


def played(*replies: str, answer: Any = "7") -> Group:
    """A group whose plays said these."""
    task = Task("t", (user("what is 3 + 4 ?"),), answer)
    turns = [[Turn(task.messages, message("assistant", reply), Stop.EOS, 3)] for reply in replies]
    return Group("g", 0, task, 0, [Trajectory(task, 0, i, found) for i, found in enumerate(turns)])


def scored(group: Group, *rewards: tuple[str, Reward], timeout: float = 60.0) -> Scorer:
    """Score the group, and give back what the rewards hold."""
    sections = [(RewardSection(id="x", name=name, timeout=timeout), reward) for name, reward in rewards]
    scorer = Scorer(sections, lambda _: None)

    async def score() -> None:
        await scorer.score(group)
        await scorer.close()

    asyncio.run(score())
    return scorer


def values(group: Group, name: str) -> list[float | None]:
    return [trajectory.rewards[name] for trajectory in group.trajectories]


# --- cancellation -----------------------------------------------------------------------------------------------------


class Calls(Reward):
    """What a function of this test returns."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        call: Callable[[], Awaitable[float | None]] = self.config
        return await call()


def test_a_task_that_is_cancelled_while_it_is_scored_is_cancelled() -> None:
    """No score of 0 is left behind, and the grader did not fail."""
    group = played("7")

    async def cancelled() -> Scorer:
        began, ended = asyncio.Event(), asyncio.Event()

        async def wait() -> float:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return 0.0

        scorer = Scorer([(RewardSection(id="x"), Calls(wait))], lambda _: None)
        scoring = asyncio.create_task(scorer.score(group))
        await began.wait()
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert scoring.cancelled() and ended.is_set(), "the grader was told to end, too"
        return scorer

    scorer = asyncio.run(asyncio.wait_for(cancelled(), 20))
    assert not scorer.failures
    assert group.trajectories[0].reward is None and group.trajectories[0].rewards == {}


def test_a_grader_that_cancels_itself_abstains_and_the_others_go_on() -> None:
    async def cancel() -> float:
        raise asyncio.CancelledError

    async def one() -> float:
        return 1.0

    group = played("7", "8")
    scorer = scored(group, ("broken", Calls(cancel)), ("right", Calls(one)))
    assert values(group, "broken") == [None, None] and values(group, "right") == [1.0, 1.0]
    assert [t.reward for t in group.trajectories] == [1.0, 1.0] and scorer.failures == {"broken": 2}


# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def server(*statuses: int) -> Iterator[tuple[str, list[Any]]]:
    """Answers with these statuses in turn, the last one for ever; a 200 gives 0.25. Yields address and bodies asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status = statuses[min(len(asked), len(statuses)) - 1]
            content = b'{"reward": 0.25}' if status == 200 else b"busy"
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None: ...

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/score", asked
    finally:
        running.shutdown()
        running.server_close()
        thread.join(10)


@pytest.mark.parametrize("status", [503, 500, 502, 504, 429, 408])
def test_a_server_that_is_busy_is_asked_again(status: int) -> None:
    group = played("7")
    with server(status, status, 200) as (url, asked):
        scorer = scored(group, ("remote", Remote(Remote.Config(url=url, retries=3, backoff=0.01))))
    assert values(group, "remote") == [0.25] and len(asked) == 3 and not scorer.failures
    assert all(body == asked[0] and body["response"] == "7" for body in asked)


def test_a_server_that_stays_busy_is_no_reward_of_0() -> None:
    group = played("7")
    with server(503) as (url, asked):
        scorer = scored(group, ("remote", Remote(Remote.Config(url=url, retries=2, backoff=0.01))))
    assert values(group, "remote") == [None] and len(asked) == 3
    assert group.trajectories[0].reward is None
    assert scorer.failures == {"remote": 1} and "503" in scorer.last_failure["remote"]


def test_a_server_that_is_gone_abstains_and_the_other_rewards_count() -> None:
    with server(200) as (url, _):
        pass
    group = played("7")
    remote = Remote(Remote.Config(url=url, retries=1, backoff=0.01, request_timeout=5))
    scored(group, ("remote", remote), ("exact", Exact(Exact.Config())))
    assert group.trajectories[0].rewards == {"remote": None, "exact": 1.0} and group.trajectories[0].reward == 1.0


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_grader_gives_the_same_score_from_any_thread() -> None:
    """Graders that set an alarm for their deadline work in the main thread only; an event loop may be anywhere."""

    def score(_: int) -> list[float | None]:
        group = played("The answer is \\boxed{\\frac{14}{2}} .", "\\boxed{8}", answer="7")
        scored(group, ("math", Math(Math.Config())))
        return values(group, "math")

    here = score(0)
    assert here == [1.0, 0.0]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(score, range(2))) == [here, here]


# --- functions --------------------------------------------------------------------------------------------------------

GRADERS = """\
from functools import partial

def length(response, least=3):
    return float(len(response) >= least)

async def later(response):
    return float(response == "7")

class Counter:
    def __init__(self, word="7"):
        self.word = word

    def __call__(self, response):
        return float(response.count(self.word))

    def method(self, trajectory):
        return 0.5

at_least_one = partial(length, least=1)
twice = partial(partial(length, least=9), least=1)
counts = Counter()
method = counts.method
async_partial = partial(later)
lam = lambda response: 0.75
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", [0.0, 1.0]),
        ("at_least_one", [1.0, 1.0]),
        ("twice", [1.0, 1.0]),
        ("counts", [1.0, 2.0]),
        ("Counter", [1.0, 2.0]),
        ("method", [0.5, 0.5]),
        ("later", [1.0, 0.0]),
        ("async_partial", [1.0, 0.0]),
        ("lam", [0.75, 0.75]),
    ],
)
def test_a_reward_may_be_any_callable_and_keeps_the_name_of_the_run_file(
    tmp_path: Path, name: str, expected: list[float]
) -> None:
    file = tmp_path / "graders.py"
    file.write_text(GRADERS)
    for _ in range(2):  # the name does not change from one time to the next
        group = played("7", "7 + 7")
        scorer = scored(group, ("mine", Function(Function.Config(call=f"{file}:{name}"))))
        assert values(group, "mine") == expected and not scorer.failures
        assert all(list(trajectory.rewards) == ["mine"] for trajectory in group.trajectories)


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("3 + 4 is 7\n</think>\n\n7", True),  # the template opened the reasoning
        ("<think>\n3 + 4 is 8\n</think>\n\n7", True),
        ("7\n</think>\n\n8", False),
        ("<think>7", False),
        ("7", True),
        ("</think>7<|im_end|>", True),
    ],
)
def test_the_answer_is_what_comes_after_the_reasoning_whoever_opened_it(reply: str, right: bool) -> None:
    group = played(reply)
    scored(group, ("exact", Exact(Exact.Config(part="final"))))
    assert values(group, "exact") == [float(right)]
