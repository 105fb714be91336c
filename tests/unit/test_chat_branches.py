"""Plays that branch, replies that fail, limits, and media that arrive in the middle of a play."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from relax_core.chat import Chat, PlayOver, Reply, Seat
from relax_core.config.schema import PlayLimits
from relax_core.conversations import ends, said
from relax_core.errors import EngineError, TooManyTokens
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.media import MediaStore
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.types import CallError, Decoded, Image, Message, Sampling, Stop, ToolCall, ToolResult, Version, user
from relax_core.weights import WeightUpdate

SEAT = Seat(3, "t", 0, 1, (5,))
EOS = 1


class Answering(Engine):
    """Answers with given ids; an exception is raised, an event is waited for first."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(None)
        self.answers, self.asked = list(answers), list[Request]()

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            event, answer = answer
            await event.wait()
        if isinstance(answer, BaseException):
            raise answer
        ids = answer[: request.sampling.max_new_tokens]
        stop = Stop.EOS if ids == answer else Stop.LENGTH
        return Completion(ids, [-0.5] * len(ids), [Version(0, 2)] * len(ids), stop)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


def chat_of(*answers: Any, adapter: TinyAdapter | None = None, **limits: Any) -> tuple[Chat, Answering]:
    engine = Answering(*answers)
    adapter = adapter or tiny_adapter("red green blue")
    return Chat(engine, adapter, Sampling(max_new_tokens=8), SEAT, limits=PlayLimits(**limits)), engine


def test_a_branch_goes_on_from_a_past_whose_tokens_are_trained_once() -> None:
    async def play() -> tuple[Chat, Chat]:
        chat, _ = chat_of([3, EOS], [4, EOS], [5, EOS])
        await chat("red")
        await chat("green")
        other = chat.branch(1)
        await other("blue")
        return chat, other

    chat, other = asyncio.run(play())
    first, second = chat.samples
    assert sum(first.mask) == 4 and sum(second.mask) == 2
    begun = first.ids[: len(second.ids) - len(tail(second.ids, first.ids))]
    assert second.ids[: len(begun)] == begun and begun[-2:] == [3, EOS]
    assert second.ids[-2:] == [5, EOS] and second.mask[-2:] == [1, 1]
    assert second.logprobs[: len(begun)] == [0.0] * len(begun)
    assert [turn.after for turn in chat.turns] == [-1, 0, 0]
    assert ends(chat.turns) == [1, 2]
    assert other.history == said(chat.turns, 2) and chat.history == said(chat.turns, 1)
    assert [m.text for m in other.history] == ["red", "red", "blue", "blue"]


def tail(ids: list[int], other: list[int]) -> list[int]:
    """What follows the common beginning of two rows."""
    n = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
    return ids[n:]


def test_branches_draw_side_by_side_each_with_a_key_of_its_own() -> None:
    async def play() -> tuple[Chat, Answering, list[Reply]]:
        gate = asyncio.Event()
        chat, engine = chat_of([3, EOS], (gate, [4, EOS]), (gate, [5, EOS]))
        await chat("red")
        one, two = asyncio.create_task(chat("green")), asyncio.create_task(chat.branch(0)("blue"))
        while len(engine.asked) < 3:
            await asyncio.sleep(0)
        gate.set()
        return chat, engine, [await one, await two]

    chat, engine, replies = asyncio.run(play())
    assert [r.key.turn for r in engine.asked] == [0, 1, 2] and len({r.id for r in engine.asked}) == 3
    assert [r.tokens for r in replies] == [2, 2]
    assert [sum(s.mask) for s in chat.samples] == [4, 2]
    assert sorted(turn.after for turn in chat.turns) == [-1, -1, 0]


def test_one_conversation_gives_one_reply_at_a_time() -> None:
    async def play() -> None:
        gate = asyncio.Event()
        chat, engine = chat_of((gate, [3, EOS]))
        first = asyncio.create_task(chat("red"))
        while not engine.asked:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"still on its way; chat.branch"):
            await chat("green")
        gate.set()
        assert (await first).tokens == 2

    asyncio.run(play())


@pytest.mark.parametrize("new", [(user("green"),), (user(Image(Decoded("image", np.zeros((2, 2, 3), np.uint8)))),)])
def test_what_got_no_reply_was_not_said(new: tuple[Message, ...]) -> None:
    async def play() -> Chat:
        chat, _ = chat_of([3, EOS], EngineError("lost"), [4, EOS], adapter=tiny_adapter("red green", images=True))
        await chat("red")
        before = ([*chat.history], [*chat.samples[0].ids], [*chat.samples[0].mask], chat.samples[0].media)
        with pytest.raises(EngineError, match="lost"):
            await chat(*new)
        assert (chat.history, chat.samples[0].ids, chat.samples[0].mask, chat.samples[0].media) == before
        await chat("green")
        return chat

    chat = asyncio.run(play())
    (sample,) = chat.samples
    assert [i for i, m in zip(sample.ids, sample.mask, strict=True) if m] == [3, EOS, 4, EOS]
    assert len(chat.turns) == 2


def test_a_first_thing_that_got_no_reply_leaves_no_sample() -> None:
    async def play() -> Chat:
        chat, _ = chat_of(EngineError("lost"), [4, EOS])
        with pytest.raises(EngineError):
            await chat("red")
        assert chat.samples == [] and chat.history == []
        await chat("green")
        return chat

    assert len(asyncio.run(play()).samples) == 1


def test_limits_end_a_play_where_one_more_is_asked_for() -> None:
    async def play(**limits: Any) -> PlayOver:
        chat, _ = chat_of([3, EOS], [4, EOS], **limits)
        await chat("red")
        chat.count_calls(2)
        await chat("green")
        with pytest.raises(PlayOver) as over:
            chat.count_calls(1)
            await chat("blue")
        assert len(chat.turns) == 2 and len(chat.history) == 4
        return over.value

    assert asyncio.run(play(turns=2)).stop is Stop.TURNS
    assert asyncio.run(play(tool_calls=2)).stop is Stop.TOOL_CALLS
    length = len(asyncio.run(lengths()))
    assert asyncio.run(play(tokens=length + 1)).stop is Stop.TOKENS


async def lengths() -> list[int]:
    chat, _ = chat_of([3, EOS], [4, EOS])
    await chat("red")
    await chat("green")
    return chat.samples[0].ids


def test_a_reply_stops_where_no_token_fits_any_more() -> None:
    async def play() -> tuple[Reply, Chat]:
        chat, engine = chat_of([3, 4, 5, 3, EOS], tokens=len(tiny_adapter().encode([user("red")]).ids) + 2)
        reply = await chat("red")
        assert engine.asked[0].sampling.max_new_tokens == 2
        with pytest.raises(PlayOver):
            await chat("red")
        return reply, chat

    reply, chat = asyncio.run(play())
    assert reply.stop is Stop.TOKENS and reply.tokens == 2 and chat.turns[0].stop is Stop.TOKENS


def test_a_flood_of_observations_is_an_error() -> None:
    async def play() -> None:
        chat, _ = chat_of([3, EOS], tokens=50)
        await chat("red")
        with pytest.raises(TooManyTokens, match=r"tokens are said at once, and limits\.tokens allows 50"):
            await chat("red " * 1000)

    asyncio.run(play())


def test_nothing_is_drawn_once_a_play_is_over() -> None:
    async def play() -> None:
        gate = asyncio.Event()
        chat, engine = chat_of((gate, [3, EOS]))
        late = asyncio.create_task(chat("red"))
        while not engine.asked:
            await asyncio.sleep(0)
        chat.end()
        gate.set()
        with pytest.raises(RuntimeError, match="the play is over"):
            await late
        with pytest.raises(RuntimeError, match="the play is over"):
            await chat.branch(0)("red")
        assert chat.samples == []

    asyncio.run(play())


def test_media_of_tools_are_read_in_a_thread_and_given_back_when_the_play_is_cancelled() -> None:
    went_in, go_on = threading.Event(), threading.Event()
    threads: list[str] = []
    made: list[str] = []

    class Store(MediaStore):
        def features(self, key: str, make: Any) -> str:
            threads.append(threading.current_thread().name)
            went_in.set()
            assert go_on.wait(10)
            made.append(super().features(key, make))
            return made[-1]

    async def play() -> None:
        store = Store({}, 0)  # what nobody holds is dropped at once
        chat, _ = chat_of([3, EOS], [4, EOS], adapter=tiny_adapter("red green", store, images=True))
        await chat("red")
        shown = Message("tool", (ToolResult((Image(Decoded("image", np.ones((2, 2, 3), np.uint8))),), "a"),))
        saying = asyncio.create_task(chat(shown))
        assert await asyncio.to_thread(went_in.wait, 10)  # the loop runs on while the thread is at work
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        assert len(chat.samples[0].ids) == len(chat.samples[0].mask) and len(chat.history) == 2
        go_on.set()
        while not made or made[0] in store:
            await asyncio.sleep(0.005)
        chat.close()

    asyncio.run(asyncio.wait_for(play(), 20))
    assert threads and all(name != threading.main_thread().name for name in threads)


def test_a_reply_has_the_calls_that_its_text_makes() -> None:
    words = '<tool_call>{"name":"look","arguments":{"at":1}}</tool_call> <tool_call>{"name":</tool_call> red'
    adapter = tiny_adapter(words)
    good, bad, red = (adapter.ids[word] for word in words.split())

    async def play() -> list[Reply]:
        chat, _ = chat_of([good, EOS], [bad, good, EOS], [red, EOS], adapter=adapter)
        return [await chat("red"), await chat("red"), await chat("red")]

    first, second, third = asyncio.run(play())
    assert first.calls == (ToolCall("look", {"at": 1}),)
    assert isinstance(second.calls[0], CallError) and second.calls[1] == ToolCall("look", {"at": 1})
    assert third.calls == () and third.text == "red"
