"""Reward ``remote``, against a real server on the loopback interface."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_core.config.schema import RewardSection
from relax_core.errors import ConfigError, RelaxError
from relax_core.scoring import Scorer, outcomes
from relax_core.testing.json_server import Answer, JsonServer
from relax_core.testing.reward_plays import group_of, played
from relax_core.types import Audio, Decoded, Image, Task, ToolCall, ToolResult, Trajectory, Turn, message, user
from relax_envs.rewards.exact import Exact
from relax_envs.rewards.remote import Remote


@pytest.fixture
def server() -> Iterator[JsonServer]:
    running = JsonServer("/score")
    yield running
    running.close()


def asked(server: JsonServer, *plays: Trajectory, **settings: Any) -> list[Any]:
    """What the reward gives for plays of one group, errors as values; its connections are closed."""

    async def ask() -> list[Any]:
        reward = Remote(Remote.Config(url=server.url, **{"backoff": 0.01, **settings}))
        try:
            return list(await outcomes(reward, group_of(plays or [played("4", answer="4")]), 20))
        finally:
            await reward.close()

    return asyncio.run(ask())


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ({"reward": 1.0}, 1.0),
        ({"reward": 0}, 0.0),
        ({"reward": 0.0, "score": 1.0}, 0.0),
        ({"reward": -0.5}, -0.5),
        ({"reward": True}, 1.0),
        ({"reward": None}, None),
        (b'\n {"reward": 1}\n', 1.0),
    ],
)
def test_the_server_gives_the_reward(server: JsonServer, content: Any, reward: float | None) -> None:
    server.answer = lambda number, body: (200, content)
    assert asked(server) == [reward] and len(server.bodies) == 1


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, b"not json", "the answer is not JSON: not json"),
        (200, b"", "the answer is not JSON"),
        (200, b"[" * 100_000, "the answer is not JSON"),
        (200, [1.0], "the answer is no object: [1.0]"),
        (200, 1.0, "the answer is no object"),
        (200, {}, "the server's answer has no 'reward': {}"),
        (200, {"score": 1.0}, "has no 'reward': {'score': 1.0}"),
        (200, {"reward": "1.0"}, "the server's 'reward' is '1.0': give a finite number, or null"),
        (200, b'{"reward": NaN}', "'reward' is nan"),
        (200, b'{"reward": 1e999}', "'reward' is inf"),
        (200, b'{"reward": 1' + b"0" * 400 + b"}", "give a finite number"),
        (200, {"reward": [1.0]}, "'reward' is [1.0]"),
        (200, {"reward": {"a": 1}}, "give a finite number"),
        (200, b" " * 10_000_001, "longer than 10000000 bytes"),
        (400, {"detail": "bad request"}, 'HTTP 400: {"detail": "bad request"}'),
        (401, b"who?", "HTTP 401: who?"),
        (404, b"", "HTTP 404"),
        (422, b"x" * 500, "HTTP 422: xxx"),
        (302, b"moved", "HTTP 302: moved"),
    ],
)
def test_other_answers_abstain_and_are_not_asked_again(
    server: JsonServer, status: int, content: Any, said: str
) -> None:
    server.answer = lambda number, body: (status, content)
    (error,) = asked(server)
    assert isinstance(error, RelaxError) and said in str(error) and len(server.bodies) == 1
    assert len(str(error)) < 300


# --- trying again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(server: JsonServer, status: int) -> None:
    server.answer = lambda number, body: (200, {"reward": 0.5}) if number == 2 else (status, b"busy")
    assert asked(server) == [0.5]
    assert len(server.bodies) == 3 and server.bodies[0] == server.bodies[2]


def test_a_server_that_stays_busy_abstains_in_the_end(server: JsonServer) -> None:
    server.answer = lambda number, body: (503, b"busy")
    (error,) = asked(server, retries=2)
    assert isinstance(error, RelaxError) and str(error) == f"{server.url}: HTTP 503, after 3 tries"
    assert len(server.bodies) == 3


def test_a_busy_server_is_counted_and_the_other_rewards_stand(server: JsonServer) -> None:
    server.answer = lambda number, body: (503, b"busy")
    play, notes = played("4", answer="4"), list[str]()
    remote = Remote(Remote.Config(url=server.url, retries=1, backoff=0.01))
    scorer = Scorer(
        [(RewardSection(id="remote"), remote), (RewardSection(id="exact"), Exact(Exact.Config()))], notes.append
    )

    async def score() -> None:
        await scorer.score(group_of([play]))
        await scorer.close()

    asyncio.run(score())
    assert play.rewards == {"remote": None, "exact": 1.0} and play.reward == 1.0
    assert scorer.failures == {"remote": 1} and "HTTP 503, after 2 tries" in notes[0]


def test_pauses_double_up_to_a_limit(server: JsonServer) -> None:
    server.answer = lambda number, body: (500, b"")
    asked(server, retries=4, backoff=0.1, max_wait=0.25)
    pauses = np.diff(server.times)
    for pause, least in zip(pauses, [0.1, 0.2, 0.25, 0.25], strict=True):
        assert least <= pause < least + 0.5


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("0", 0.0, 0.5),
        ("1", 1.0, 5.0),
        ("3600", 0.3, 1.0),  # bounded by max_wait
        ("soon", 0.01, 0.5),  # unreadable: the usual pause
        ("an hour from now", 0.3, 1.0),
        ("an hour ago", 0.0, 0.5),
    ],
)
def test_retry_after_is_honoured_within_bounds(server: JsonServer, header: str, least: float, most: float) -> None:
    if "hour" in header:
        header = formatdate(time.time() + (3600 if "from" in header else -3600), usegmt=True)
    server.answer = lambda number, body: (429, b"", {"retry-after": header}) if number == 0 else (200, {"reward": 1})
    assert asked(server, max_wait=1.0 if header == "1" else 0.3) == [1.0]
    assert least <= server.times[1] - server.times[0] < most


def test_a_connection_that_breaks_is_tried_again(server: JsonServer) -> None:
    server.answer = lambda number, body: (0, b"") if number == 0 else (200, {"reward": 1})
    assert asked(server) == [1.0] and len(server.bodies) == 2


def test_no_server_at_all_abstains() -> None:
    running = JsonServer("/score")
    running.close()
    (error,) = asked(running, retries=1)
    assert isinstance(error, RelaxError) and "ConnectError" in str(error) and "after 2 tries" in str(error)


def test_a_server_that_does_not_answer_is_not_waited_for(server: JsonServer) -> None:
    ended = threading.Event()

    def answer(number: int, body: Any) -> Answer:
        ended.wait(10)
        return 200, {"reward": 1}

    server.answer = answer
    started = time.monotonic()
    (error,) = asked(server, retries=1, request_timeout=0.2)
    seconds = time.monotonic() - started
    ended.set()
    assert isinstance(error, RelaxError) and "no answer within 0.2 s, after 2 tries" in str(error) and seconds < 5


def test_the_run_does_not_wait_longer_than_the_timeout_of_the_reward(server: JsonServer) -> None:
    server.answer = lambda number, body: (503, b"", {"retry-after": "20"})
    play = played("4", answer="4")
    remote = Remote(Remote.Config(url=server.url))
    scorer = Scorer([(RewardSection(id="remote", timeout=0.3), remote)], lambda line: None)
    started = time.monotonic()
    asyncio.run(scorer.score(group_of([play])))
    assert time.monotonic() - started < 3 and play.rewards == {"remote": None}
    assert scorer.last_failure["remote"] == "TimeoutError: no answer within 0.3 s"


def test_a_cancelled_request_is_cancelled(server: JsonServer) -> None:
    server.answer = lambda number, body: (503, b"", {"retry-after": "20"})

    async def cancel() -> None:
        reward = Remote(Remote.Config(url=server.url))
        asking = asyncio.create_task(reward(played("4")))
        while not server.bodies:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await reward.close()

    asyncio.run(asyncio.wait_for(cancel(), 10))


# --- what is sent -----------------------------------------------------------------------------------------------------


def conversation(picture: Image | Audio) -> Trajectory:
    task = Task("env/row-1#0", (user(picture, "What?"),), {"gold": np.float32(0.5)}, {"n": np.arange(2)}, "env")
    call = message("assistant", "let me see", ToolCall("zoom", {"x": 1}, "c1"))
    result = message("tool", ToolResult((picture,), "c1"))
    first = Turn(task.messages, call, played("").stop, 3)
    return Trajectory(task, 0, 0, [first, Turn((result,), message("assistant", "猫 \ud800"), first.stop, 4, 0)])


def test_the_body_of_a_request(server: JsonServer) -> None:
    asked(server, conversation(Image(b"bytes")))
    image = {"type": "image"}
    assert server.bodies == [
        {
            "id": "env/row-1#0",
            "environment": "env",
            "messages": [
                {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "let me see"},
                        {"type": "tool_call", "name": "zoom", "arguments": {"x": 1}, "id": "c1"},
                    ],
                },
                {"role": "tool", "content": [{"type": "tool_result", "content": [image], "id": "c1"}]},
            ],
            "response": "猫 \ud800",
            "answer": {"gold": 0.5},
            "metadata": {"n": [0, 1]},
            "stop": "done",
            "tokens": 7,
        }
    ]
    assert server.headers[0]["content-type"] == "application/json" and "authorization" not in server.headers[0]


def test_media_are_sent_when_asked_for(server: JsonServer, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    asked(server, conversation(Image(b"bytes")), media=True)
    asked(server, conversation(Audio(tmp_path / "a.wav")), media=True)
    sent = [body["messages"][0]["content"][0] for body in server.bodies]
    assert sent == [
        {"type": "image", "data": base64.b64encode(b"bytes").decode()},
        {"type": "audio", "data": base64.b64encode(b"sound").decode()},
    ]


def test_media_that_cannot_be_sent_abstain(server: JsonServer, tmp_path: Path) -> None:
    made = Image(Decoded("image", np.zeros((1, 1, 3), np.uint8)))
    for medium, said in ((made, "has no encoded bytes"), (Image(tmp_path / "none.png"), "none.png: No such file")):
        (error,) = asked(server, conversation(medium), media=True)
        assert isinstance(error, RelaxError) and said in str(error)
    assert not server.bodies


def test_a_value_that_json_cannot_say_abstains(server: JsonServer) -> None:
    (error,) = asked(server, played("4", answer=object()))
    assert isinstance(error, TypeError) and "a object cannot be said in JSON" in str(error)
    (error,) = asked(server, played("4", answer=float("nan")))
    assert isinstance(error, ValueError) and not server.bodies


def test_the_token_comes_from_the_environment_and_stays_there(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    reward = Remote(Remote.Config(url=server.url, token_env="SCORER_TOKEN"))
    assert asked(server, token_env="SCORER_TOKEN") == [1.0]
    assert server.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(reward.config) + reward.config.model_dump_json()
    server.answer = lambda number, body: (403, b"no")
    (error,) = asked(server, token_env="SCORER_TOKEN")
    assert "s3cret" not in str(error)


@pytest.mark.parametrize("value", [None, ""])
def test_a_token_that_is_not_there_stops_the_run(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORER_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("SCORER_TOKEN", value)
    with pytest.raises(ConfigError, match="token_env: the environment variable 'SCORER_TOKEN' is not set"):
        Remote(Remote.Config(url="http://127.0.0.1/", token_env="SCORER_TOKEN"))


@pytest.mark.parametrize(
    "settings",
    [{"url": "127.0.0.1:8000"}, {"url": "ftp://host/"}, {"url": "http://me:secret@host/"}, {"url": "http://a b/"},
     {"url": "http://host/", "request_timeout": 0.0}, {"url": "http://host/", "retries": -1},
     {"url": "http://host/", "concurrency": 0}, {}],
)  # fmt: skip
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Remote.Config(**settings)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_may_be_asked_for_at_once(server: JsonServer) -> None:
    server.answer = lambda number, body: (200, {"rewards": [len(item["response"]) for item in body["items"]]})
    plays = [played("a"), played("bb"), played("ccc")]
    assert asked(server, *plays, batch=True) == [1.0, 2.0, 3.0]
    assert [[item["response"] for item in body["items"]] for body in server.bodies] == [["a", "bb", "ccc"]]


def test_failed_plays_are_not_sent(server: JsonServer) -> None:
    server.answer = lambda number, body: (200, {"rewards": [1] * len(body["items"])})
    assert asked(server, played("a"), played("b", failed=True), played("c"), batch=True) == [1.0, None, 1.0]
    assert asked(server, played("b", failed=True), batch=True) == [None]
    assert asked(server, played("b", failed=True)) == [None]
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ({"rewards": [1, None]}, [1.0, None]),
        ({"rewards": [0, "x"]}, [0.0, "'x'"]),
        ({"rewards": [1]}, ["answered 1 rewards to 2 plays"] * 2),
        ({"rewards": 1}, ["answered {'rewards': 1} to 2 plays"] * 2),
        ({"reward": 1}, ["answered {'reward': 1} to 2 plays"] * 2),
    ],
)
def test_answers_to_a_group(server: JsonServer, content: Any, right: list[Any]) -> None:
    server.answer = lambda number, body: (200, content)
    found = asked(server, played("a"), played("b"), batch=True)
    for value, wanted in zip(found, right, strict=True):
        assert wanted in str(value) if isinstance(wanted, str) else value == wanted


# --- connections ------------------------------------------------------------------------------------------------------


def test_no_more_requests_than_allowed_are_made_at_once(server: JsonServer) -> None:
    def slowly(number: int, body: Any) -> Answer:
        time.sleep(0.05)
        return 200, {"reward": 1}

    server.answer = slowly
    assert asked(server, *(played(str(i)) for i in range(12)), concurrency=3) == [1.0] * 12
    assert 1 < server.most_at_once <= 3


def test_several_loops_and_threads_may_ask(server: JsonServer) -> None:
    """A grader may be called from a worker thread, with a loop of its own."""
    reward = Remote(Remote.Config(url=server.url))
    server.answer = lambda number, body: (200, {"reward": float(body["response"])})

    async def ask(value: int) -> float | None:
        try:
            return await reward(played(str(value)))
        finally:
            await reward.close()

    assert [asyncio.run(ask(i)) for i in range(3)] == [0.0, 1.0, 2.0]

    async def threads() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, ask(i)) for i in range(4)))

    assert asyncio.run(threads()) == [0.0, 1.0, 2.0, 3.0]
