"""Conversations by real HTTP: the unmodified openai client, tools, streams, branches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from relax_core.testing.dialogues import QWEN3, model_folder
from relax_envs.agent.session import Session
from tests.unit.agent_table import ADD, CALL, TOOLS_FIRST, Table, ask, asks, client, counted, says

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_reply(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello")

    async def agent(session: Session) -> None:
        async with client(session) as c:
            found = await c.chat.completions.create(**asks(says("what")))
        (choice,) = found.choices
        assert choice.message.content == "hello" and choice.message.role == "assistant"
        assert choice.finish_reason == "stop" and found.model == "gpt-9" and found.id.startswith("chatcmpl-")
        ((prompt, reply),) = table.talker.given()
        assert found.usage is not None
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), len(reply))

    chat = table.play(agent)
    assert chat.turns[0].prompt[0].text == "what" and len(chat.samples) == 1


def tools_then_answer(prompt: str) -> str:
    return "The answer is 7" if "tool\n7" in prompt else "think " + CALL


@pytest.mark.parametrize("stream", [False, True])
def test_tools_over_several_turns_are_one_sample(folder: Path, stream: bool) -> None:
    """The client's own objects are sent back, as agents do it."""
    table = Table(folder, tools_then_answer, TOOLS_FIRST)

    async def agent(session: Session) -> str:
        messages: list[Any] = [{"role": "system", "content": "hello"}, says("what")]
        async with client(session) as c:
            for _ in range(2):
                if stream:
                    async with c.chat.completions.stream(
                        **asks(*messages, tools=[ADD]), stream_options={"include_usage": True}
                    ) as events:
                        found: Any = await events.get_final_completion()
                else:
                    found = await c.chat.completions.create(**asks(*messages, tools=[ADD]))
                (choice,) = found.choices
                assert found.usage.total_tokens == sum(map(len, table.talker.gave[-1][1:])) + found.usage.prompt_tokens
                messages.append(choice.message)
                if choice.finish_reason != "tool_calls":
                    break
                (call,) = choice.message.tool_calls
                assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 3, "b": "é"}
                assert choice.message.content == "think"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
        assert choice.finish_reason == "stop"
        return str(choice.message.content)

    chat = table.play(agent)
    assert chat.answer == "The answer is 7" and len(chat.turns) == 2
    (sample,) = chat.samples
    assert sum(sample.mask) == sum(len(ids) for _, ids in table.talker.gave)
    assert "think <tool_call>" in chat.history[2].text  # as sampled, not as sent back


def test_a_stream_begins_at_once_and_stays_alive(folder: Path) -> None:
    async def slowly(text: str) -> str:
        await asyncio.sleep(0.3)
        return text

    said = " ".join(["hello"] * 30)
    table = Table(folder, lambda prompt: slowly(said))

    async def agent(session: Session) -> None:
        lines: list[str] = []
        async with (
            httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}) as c,
            c.stream("POST", f"{session.base_url}/chat/completions", json=asks(says("what"), stream=True)) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if not lines:
                    assert table.talker.waiting and not table.talker.gave
                lines += [line] if line else []
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert sum(line.startswith(":") for line in lines) >= 2 and lines[-1] == "data: [DONE]"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == said and len(chunks) > 3
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and "usage" not in chunks[-1]

    table.play(agent, heartbeat=0.1)


def test_a_reply_may_be_cut(folder: Path) -> None:
    table = Table(folder, lambda prompt: "hello hello hello")

    async def agent(session: Session) -> None:
        async with client(session) as c:
            short = await c.chat.completions.create(**asks(says("what"), max_completion_tokens=1))
            assert short.choices[0].finish_reason == "length" and short.usage and short.usage.completion_tokens == 1
            long = await c.chat.completions.create(**asks(says("what"), max_tokens=500))
            assert long.choices[0].finish_reason == "length"

    chat = table.play(agent, table.chat(most=2))
    assert [turn.tokens for turn in chat.turns] == [1, 2]


@pytest.mark.parametrize(
    ("said", "content", "finish"),
    [
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", "stop"),
        (CALL + "<tool_call>{</tool_call>", "<tool_call>{</tool_call>", "tool_calls"),
        ("<think>" + CALL + "</think>no", "<think>" + CALL + "</think>no", "stop"),
    ],
)
def test_a_malformed_call_stays_text(folder: Path, said: str, content: str, finish: str) -> None:
    table = Table(folder, lambda prompt: said, TOOLS_FIRST)

    async def agent(session: Session) -> None:
        async with client(session) as c:
            found = await c.chat.completions.create(**asks(says("what"), tools=[ADD]))
            assert found.choices[0].finish_reason == finish and found.choices[0].message.content == content
            again = await c.chat.completions.create(**asks(says("what"), tools=[ADD], tool_choice="none"))
            assert again.choices[0].finish_reason == "stop" and again.choices[0].message.content == said
            assert again.choices[0].message.tool_calls is None

    table.play(agent, table.chat(most=200))


# --- branches ---------------------------------------------------------------------------------------------------------


def test_an_agent_that_rewrites_branches(folder: Path) -> None:
    table = Table(folder, counted)

    async def agent(session: Session) -> None:
        first = await ask(session, says("what"))
        second = await ask(session, says("what"), first, says("and"))
        changed = {"role": "assistant", "content": "sunny"}
        await ask(session, says("what"), first, says("and"), changed, says("how"))  # from the first reply
        await ask(session, says("what"), first, says("and"), second, says("how"))  # goes on
        await ask(session, says("how"))  # from nothing

    chat = table.play(agent)
    assert [turn.after for turn in chat.turns] == [-1, 0, 0, 1, -1]
    trunk, other, alone = chat.samples
    assert sum(trunk.mask) == sum(t.tokens for t in (chat.turns[0], chat.turns[1], chat.turns[3]))
    assert "sunny" in str(table.adapter.tokenizer.decode(other.ids)) and sum(other.mask) == chat.turns[2].tokens
    n = chat.turns[0].tokens + len(table.talker.gave[0][0].prompt.ids)
    assert other.ids[:n] == trunk.ids[:n] and not any(other.mask[:n])
    assert sum(alone.mask) == chat.turns[4].tokens


def test_sub_agents_talk_at_once(folder: Path) -> None:
    gate = asyncio.Event()

    async def together(prompt: str) -> str:
        if prompt.count("<|im_start|>") > 2:
            if table.talker.waiting == 7:
                gate.set()
            await gate.wait()  # all eight are on their way
        return counted(prompt)

    table = Table(folder, together)

    async def agent(session: Session) -> None:
        first = await ask(session, says("what"))
        await asyncio.gather(*(ask(session, says("what"), first, says("and")) for _ in range(8)))

    chat = table.play(agent)
    assert len(chat.turns) == 9 and len(chat.samples) == 8 and [t.after for t in chat.turns] == [-1, *[0] * 8]
    assert len({request.key.turn for request, _ in table.talker.gave}) == 9


def test_a_template_that_drops_thinking(folder: Path) -> None:
    table = Table(folder, lambda prompt: "<think>\nget\n</think>\n\nhello", QWEN3)

    async def agent(session: Session) -> None:
        messages: list[Any] = []
        for _ in range(3):
            messages.append(says("what"))
            messages.append(await ask(session, *messages))

    chat = table.play(agent)
    assert len(chat.samples) == 3 == len(chat.rewrites) + 1 and [t.after for t in chat.turns] == [-1, 0, 1]
