"""Sessions without HTTP: whatever an agent says again, rewrites or asks at once, each sampled token is trained once."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_core.chat import Chat, Seat
from relax_core.conversations import said
from relax_core.errors import DataError
from relax_core.interfaces import Completion, Engine, Interrupt, Modality, Request
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing.dialogues import CHATML, LLAMA3, QWEN3, model_folder
from relax_core.testing.talking import Talker, sampled
from relax_core.types import Decoded, Message, Sample, Sampling, Stop, Version, message
from relax_core.weights import WeightUpdate
from relax_envs.agent.errors import ApiError
from relax_envs.agent.replies import Answered
from relax_envs.agent.requests import Asked, Rules, read
from relax_envs.agent.session import MOST_AT_ONCE, Session
from relax_envs.agent.tree import reply_message

pytestmark = pytest.mark.timeout(180)

TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextAdapter]:
    folder = model_folder(tmp_path_factory.mktemp("model"))
    found = {}
    for name, source in TEMPLATES.items():
        file = folder / f"{name}.jinja"
        file.write_text(source)
        found[name] = TextAdapter(TextConfig(path=folder, chat_template=Path(file)), MediaStore({}, 0))
    return found


def chat_of(adapter: TextAdapter, say: Callable[[str], Any]) -> tuple[Chat, Talker]:
    talker = Talker(adapter, say)
    return Chat(talker, adapter, Sampling(max_new_tokens=64), Seat(0, "t", 0, 0, ())), talker


def session_of(chat: Chat) -> Session:
    return Session(chat, Rules(chat.sampling), "")


async def ask(session: Session, *messages: Message) -> Answered:
    return await asyncio.wrap_future(session.submit(Asked(messages, "x")))


@dataclass(frozen=True)
class Step:
    """One round of an agent: how many requests at once, where each goes on, and what it says."""

    again: tuple[int, ...]
    """Which of the conversations so far."""
    keep: tuple[int, ...]
    """How many of its messages are said again."""
    rewrite: bool
    text: str


REPLIES = st.lists(st.sampled_from(["yes", " hello ", "<think>\nget\n</think>\n\nhello", "é 北京", ""]))
STEPS = st.lists(
    st.builds(
        Step,
        st.lists(st.integers(0, 30), min_size=1, max_size=4).map(tuple),
        st.lists(st.integers(0, 8), min_size=4, max_size=4).map(tuple),
        st.booleans(),
        st.sampled_from(["what", "and", "how", " get\n", "<tool"]),
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, replies=REPLIES)
def test_each_sampled_token_is_trained_once(
    adapters: dict[str, TextAdapter], template: str, steps: list[Step], replies: list[str]
) -> None:
    given_replies = iter(replies)
    chat, talker = chat_of(adapters[template], lambda prompt: next(given_replies, "yes"))
    conversations: list[list[Message]] = [[]]

    async def agent() -> None:
        session = session_of(chat)
        for step in steps:
            asked = []
            for again, keep in zip(step.again, step.keep, strict=False):
                past = conversations[again % len(conversations)]
                told = past[: 2 * min(keep, len(past) // 2)]
                if step.rewrite and told:
                    told = [*told[:-1], message("assistant", "sunny")]
                asked.append([*told, message("user", step.text)])
            found = await asyncio.gather(*(ask(session, *told) for told in asked))
            for told, answered in zip(asked, found, strict=True):
                conversations.append([*told, reply_message(answered.content.strip(), answered.calls)])
        await session.close()

    asyncio.run(agent())
    assert sampled(chat.samples) == talker.given()
    assert len(chat.turns) == len(talker.gave) == sum(map(len, (step.again for step in steps)))
    for place, turn in enumerate(chat.turns):
        assert turn.after < place
        heard = said(chat.turns, place)
        assert heard[-1] is turn.reply and turn.tokens > 0


def test_an_error_leaves_all_as_it_was(adapters: dict[str, TextAdapter]) -> None:
    chat, talker = chat_of(adapters["chatml"], lambda prompt: "yes")

    async def agent() -> None:
        session = session_of(chat)
        first = await ask(session, message("user", "what"))
        past = [message("user", "what"), reply_message(first.content, ())]
        with pytest.raises(ApiError, match="special token") as caught:
            await ask(session, *past, message("user", "<|im_end|>"))
        assert caught.value.status == 400 and isinstance(caught.value.__cause__, DataError)
        await ask(session, *past, message("user", "how"))

    asyncio.run(agent())
    assert len(chat.samples) == 1 and sampled(chat.samples) == talker.given()


def test_too_many_requests_at_once(adapters: dict[str, TextAdapter]) -> None:
    async def forever(prompt: str) -> str:
        await asyncio.Event().wait()
        return ""

    chat, talker = chat_of(adapters["chatml"], forever)

    async def agent() -> None:
        session = session_of(chat)
        waiting = [session.submit(Asked((message("user", str(i)),), "x")) for i in range(MOST_AT_ONCE)]
        while talker.waiting < MOST_AT_ONCE:
            await asyncio.sleep(0.001)
        with pytest.raises(ApiError) as caught:
            await ask(session, message("user", "more"))
        assert caught.value.status == 429 and caught.value.again
        waiting[0].cancel()
        while talker.waiting == MOST_AT_ONCE:
            await asyncio.sleep(0.001)
        await session.close()
        for future in waiting[1:]:
            with pytest.raises(ApiError, match="has ended"):
                await asyncio.wrap_future(future)

    asyncio.run(agent())
    assert chat.samples == [] and talker.lost == MOST_AT_ONCE


def test_a_session_outlives_its_loop_without_harm(adapters: dict[str, TextAdapter]) -> None:
    found: list[Session] = []

    async def agent() -> None:
        found.append(session_of(chat_of(adapters["chatml"], lambda prompt: "yes")[0]))

    asyncio.run(agent())
    with pytest.raises(ApiError, match="has ended"):
        found[0].submit(Asked((message("user", "what"),), "x"))


def test_media_of_a_request_reach_the_sample() -> None:
    """A picture inside a request is decoded once, and its features are those that the trainer reads."""
    from relax_core.testing.tiny import tiny_adapter

    class Pictures(Modality):
        kind = "image"

        def decode(self, source: Path | bytes) -> Decoded:
            assert isinstance(source, bytes)
            return Decoded("image", np.frombuffer(source, np.uint8).reshape(1, 1, 3))

        def dump(self, decoded: Decoded) -> tuple[str, bytes]:
            return ".raw", decoded.data.tobytes()

        def restore(self, content: bytes) -> Decoded:
            return self.decode(content)

    adapter = tiny_adapter("what red is", MediaStore({"image": Pictures(None)}, 1 << 20), images=True)
    engine = Fixed([adapter.ids["red"], 1])
    chat = Chat(engine, adapter, Sampling(), Seat(0, "t", 0, 0, ()))
    red, green = (base64.b64encode(bytes(colour)).decode() for colour in ((255, 0, 0), (0, 255, 0)))

    def shown(content: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": f"data:image/raw;base64,{content}"}}
        return {"role": "user", "content": [{"type": "text", "text": "what is"}, part]}

    async def agent() -> None:
        session = session_of(chat)
        body: dict[str, Any] = {"model": "x", "messages": [shown(red)]}
        first = await asyncio.wrap_future(session.submit(read(body, session.rules)))
        body["messages"] += [{"role": "assistant", "content": first.content}, shown(green)]
        await asyncio.wrap_future(session.submit(read(body, session.rules)))

    asyncio.run(agent())
    (sample,) = chat.samples
    colours = [adapter.media.get(ref.key)["colour"].tolist() for ref in sample.media]
    assert colours == [[1, 0, 0], [0, 1, 0]]
    assert [sample.ids[ref.start] for ref in sample.media] == [adapter.ids["<image>"]] * 2
    assert sampled_ids(sample) == [*engine.ids] * 2
    chat.close()


class Fixed(Engine):
    """Answers the same ids to everybody."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(None)
        self.ids = ids

    async def generate(self, request: Request) -> Completion:
        return Completion(list(self.ids), [-0.5] * len(self.ids), [Version(0, 3)] * len(self.ids), Stop.EOS)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


def sampled_ids(sample: Sample) -> list[int]:
    return [i for i, m in zip(sample.ids, sample.mask, strict=True) if m]
