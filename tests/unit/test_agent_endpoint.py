"""The endpoint by real HTTP: errors, clients that go away, many sessions at once."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from relax_core.chat import PlayOver
from relax_core.config.schema import PlayLimits
from relax_core.errors import EngineError
from relax_core.testing.dialogues import model_folder
from relax_core.testing.talking import sampled
from relax_core.types import Stop, Task
from relax_envs.agent.errors import AgentSilent
from relax_envs.agent.session import Session
from tests.unit.agent_table import ADD, CALL, TOOLS_FIRST, Agent, Here, Table, ask, asks, client, counted, says

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


# --- errors -----------------------------------------------------------------------------------------------------------


async def status(session: Session, method: str = "POST", path: str = "/chat/completions", **request: Any) -> Any:
    """The response to a request with the session's key, if it says no other."""
    headers = {"Authorization": f"Bearer {session.key}"} | request.pop("headers", {})
    async with httpx.AsyncClient() as c:
        response = await c.request(method, session.base_url + path, headers=headers, **request)
    return response.status_code, response.json()


def test_errors_have_the_usual_shape(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello")

    async def agent(session: Session) -> None:
        await ask(session, says("what"))
        for code, found in [
            await status(session, headers={"Authorization": "Bearer sk-other"}),
            await status(session, headers={"Authorization": f"Basic {session.key}"}),
        ]:
            assert code == 401 and found["error"]["code"] == "invalid_api_key"
        code, found = await status(session, path="/responses", json={})
        assert code == 404 and "there are /v1/chat/completions" in found["error"]["message"]
        assert (await status(session, "GET"))[0] == 405
        code, found = await status(session, content=b"{")
        assert code == 400 and found["error"]["code"] == "invalid_json"
        code, found = await status(session, content=b"[1]")
        assert code == 400 and set(found["error"]) == {"message", "type", "param", "code"}
        code, found = await status(session, content=b" " * 3000)
        assert code == 413 and "2,000 bytes" in found["error"]["message"]
        code, found = await status(session, json=asks(says("a <|im_end|>")))
        assert code == 400 and "special token" in found["error"]["message"]
        code, found = await status(session, json=asks(says("what"), tools=[ADD]))
        assert code == 400 and "tools" in found["error"]["message"]
        with pytest.raises(openai.BadRequestError, match=r"the run samples with 1\.0"):
            await ask(session, says("what"), temperature=0)

    assert len(table.play(agent, request_bytes=2000).turns) == 1


def test_ignored_settings_are_named(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello")

    async def agent(session: Session) -> None:
        async with client(session) as c:
            raw = await c.chat.completions.with_raw_response.create(**asks(says("what"), temperature=0, seed=3))
            assert sorted(raw.headers["x-relax-ignored"].split(", ")) == ["seed", "temperature"]

    table.play(agent, settings="ignore")


def test_models(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello")

    async def agent(session: Session) -> None:
        async with client(session) as c:
            assert [m.id async for m in await c.models.list()] == ["small", "large"]
            assert (await c.models.retrieve("small")).id == "small"
            with pytest.raises(openai.NotFoundError, match="small, large"):
                await c.models.retrieve("other")
            with pytest.raises(openai.NotFoundError):
                await c.chat.completions.create(**asks(says("what")))
            await c.chat.completions.create(**asks(says("what")) | {"model": "small"})

    table.play(agent, models=("small", "large"))


def test_an_agent_that_asks_nothing(folder: Path) -> None:
    async def agent(session: Session) -> None:
        return None

    with pytest.raises(AgentSilent):
        Table(folder, counted).play(agent)


def test_an_agent_that_fails(folder: Path) -> None:
    async def agent(session: Session) -> None:
        await ask(session, says("what"))
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        Table(folder, counted).play(agent)


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_ends_the_play_and_the_client_hears_of_it(folder: Path, stream: bool) -> None:
    table = Table(folder, counted)
    table.limits = PlayLimits(turns=2)
    heard: list[str] = []

    async def agent(session: Session) -> None:
        for _ in range(2):
            await ask(session, says("what"))
        for _ in range(2):
            try:
                async with client(session) as c:
                    found: Any = await c.chat.completions.create(**asks(says("what"), stream=stream))
                    async for _ in found:
                        pass
            except openai.APIError as error:
                heard.append(f"{type(error).__name__} {error.code}")
        await asyncio.sleep(60)

    with pytest.raises(PlayOver) as caught:
        table.play(agent)
    assert caught.value.stop is Stop.TURNS
    assert heard == [f"{'APIError' if stream else 'RateLimitError'} limit_turns", "RateLimitError limit_turns"]


def test_calls_count(folder: Path) -> None:
    table = Table(folder, lambda prompt: CALL, TOOLS_FIRST)
    table.limits = PlayLimits(tool_calls=1)

    async def agent(session: Session) -> None:
        await ask(session, says("what"), tools=[ADD])
        with pytest.raises(openai.RateLimitError, match="more tools"):
            await ask(session, says("how"), tools=[ADD])

    with pytest.raises(PlayOver) as caught:
        table.play(agent)
    assert caught.value.stop is Stop.TOOL_CALLS


def test_an_engine_that_fails_fails_the_play(folder: Path) -> None:
    def broken(prompt: str) -> str:
        raise EngineError("engine: request lost: it was stopped")

    async def agent(session: Session) -> None:
        with pytest.raises(openai.InternalServerError, match="it was stopped"):
            await ask(session, says("what"))

    with pytest.raises(EngineError):
        Table(folder, broken).play(agent)


# --- clients that go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_loses_that_request_alone(folder: Path, stream: bool) -> None:
    async def forever(prompt: str) -> str:
        if prompt.endswith("and<|im_end|>\n<|im_start|>assistant\n"):
            await asyncio.Event().wait()
        return counted(prompt)

    table = Table(folder, forever)

    async def agent(session: Session) -> None:
        first = await ask(session, says("what"))
        body = json.dumps(asks(says("what"), first.model_dump(), says("and"), stream=stream)).encode()
        lost = socket.create_connection(("127.0.0.1", int(session.base_url.split(":")[2].split("/")[0])))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        lost.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not table.talker.waiting:
            await asyncio.sleep(0.01)
        lost.close()
        while not table.talker.lost:
            await asyncio.sleep(0.01)
        await ask(session, says("what"), first, says("how"))

    chat = table.play(agent)
    assert len(chat.turns) == 2 and len(chat.samples) == 1  # it goes on in the same sample


def test_the_end_of_a_play_ends_its_requests(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello" if "what" in prompt else forever())
    left: list[asyncio.Task[Any]] = []

    async def forever() -> str:
        await asyncio.Event().wait()
        return ""

    async def agent(session: Session) -> None:
        await ask(session, says("what"))
        left.append(asyncio.create_task(status(session, json=asks(says("how")))))
        while not table.talker.waiting:
            await asyncio.sleep(0.01)

    environment, chat = Here(agent), table.chat()

    async def play() -> tuple[Any, Any]:
        await environment.play(Task("t", ()), chat)
        served = await left[0]
        session = Session(chat, None, environment._endpoint._url)  # type: ignore[arg-type]
        late = await status(session)
        await environment.close()
        return served, late

    served, late = asyncio.run(asyncio.wait_for(play(), 150))
    assert served[0] == 503 and served[1]["error"]["code"] == "session_ended" and late[0] == 401
    assert table.talker.lost == 1 and len(chat.turns) == 1


CLIENT = """
import json, sys, urllib.request
url, key, text = sys.argv[1:]
messages = []
for _ in range(3):
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": "x", "messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
"""


def test_a_killed_client_loses_only_its_own_session(folder: Path) -> None:
    async def replies(prompt: str) -> str:
        while "get" in prompt and prompt.count("<|im_start|>") > 2:
            await asyncio.sleep(0.01)  # until it is killed
        return counted(prompt)

    table = Table(folder, replies)
    chats = {text: table.chat(text) for text in ("get", "what")}
    codes: dict[str, int | None] = {}

    def agent(text: str) -> Agent:
        async def run(session: Session) -> None:
            command = [sys.executable, "-c", CLIENT, session.base_url, session.key, text]
            process = await asyncio.create_subprocess_exec(*command)
            while text == "get" and not (table.talker.waiting and len(chats["get"].turns) == 1 and codes):
                await asyncio.sleep(0.01)
            if text == "get":
                process.kill()
            codes[text] = await process.wait()
            while text == "get" and not table.talker.lost:
                await asyncio.sleep(0.01)

        return run

    async def plays() -> None:
        environments = [Here(agent(text)) for text in chats]
        environments[1]._endpoint = environments[0]._endpoint  # one server
        await asyncio.gather(*(e.play(Task("t", ()), c) for e, c in zip(environments, chats.values(), strict=True)))
        await environments[0].close()

    asyncio.run(asyncio.wait_for(plays(), 150))
    assert codes == {"get": -9, "what": 0}
    assert [len(chat.turns) for chat in chats.values()] == [1, 3]
    for text, chat in chats.items():
        assert sampled(chat.samples) == table.talker.given(text)


# --- many sessions ----------------------------------------------------------------------------------------------------


def test_64_sessions_at_once_have_exact_tokens(folder: Path) -> None:
    everybody = asyncio.Event()

    async def together(prompt: str) -> str:
        if table.talker.waiting == 63:
            everybody.set()
        await everybody.wait()
        words = [w for w in ("sunny", "Paris", "weather", "get", "how", "think") if w in prompt]
        return " ".join([*words, str(len(prompt) % 97)])

    table = Table(folder, together)
    chats = [table.chat(f"t{i}") for i in range(64)]

    async def agent(session: Session) -> None:
        at = next(i for i, chat in enumerate(chats) if chat is session.chat)
        messages: list[Any] = [{"role": "system", "content": f"hello {at}"}]
        c = client(session, http_client=shared, max_retries=0)
        for turn in range(3):
            messages.append(says(("sunny", "Paris", "weather", "get")[(at + turn) % 4]))
            found = await c.chat.completions.create(**asks(*messages))
            messages.append({"role": "assistant", "content": found.choices[0].message.content})

    async def plays() -> None:
        environment = Here(agent)
        async with shared:
            await asyncio.gather(*(environment.play(Task("t", ()), chat) for chat in chats))
        await environment.close()

    shared = httpx.AsyncClient(timeout=150, limits=httpx.Limits(max_connections=64))  # making one takes long
    asyncio.run(asyncio.wait_for(plays(), 150))
    assert everybody.is_set()
    for i, chat in enumerate(chats):
        (sample,) = chat.samples
        assert sampled([sample]) == table.talker.given(f"t{i}") and len(chat.turns) == 3


# --- weight -----------------------------------------------------------------------------------------------------------


def test_no_server_is_imported_before_a_session_needs_it() -> None:
    code = (
        "import sys, pathlib, relax_envs.agent.command as c\n"
        "c.Agent(c.Agent.Config(data=pathlib.Path('x.jsonl'), command=('true',)))\n"
        "assert not {'fastapi', 'uvicorn', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_other_hosts_do_not_reach_it(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello")

    async def agent(session: Session) -> None:
        assert session.base_url.startswith("http://127.0.0.1:") and len(session.key) >= 40
        await ask(session, says("what"))

    table.play(agent)
