"""The chat's token book-keeping: one turn and many, prefixes given back, templates that rewrite the past."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_core.chat import Chat, Seat
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig, TinyModel
from relax_core.models.text import TextAdapter
from relax_core.testing.tiny import tiny_adapter
from relax_core.types import Decoded, DrawKey, Encoded, Image, Sampling, Stop, Version, message, user
from relax_core.weights import WeightUpdate

WORDS = ("red", "green", "blue", "again", "ok", "think", "so")

CHATML = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> again {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
FORGETS_REPLIES = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}assistant ok <|im_end|> "
    "{% else %}{{ m.role }} {{ m.content }} <|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


class Scripted(Engine):
    """Answers with given token ids, version by version; keeps what it was asked."""

    def __init__(self, *answers: tuple[list[int], Stop]) -> None:
        super().__init__(None)
        self.answers, self.asked = list(answers), list[Request]()

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        ids, stop = self.answers.pop(0)
        version = Version(0, len(self.asked))
        return Completion(ids, [-0.5] * len(ids), [version] * len(ids), stop)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


def text_adapter(tmp_path: Path, template: str = CHATML) -> TextAdapter:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    return TextAdapter(TextConfig(tiny=TinyModel(words=WORDS), chat_template=file), MediaStore({}, 0))


def picture(level: int) -> Image:
    return Image(Decoded("image", np.full((2, 2, 3), level, np.uint8)))


def ids(adapter: TextAdapter, text: str) -> list[int]:
    return [int(i) for i in adapter.tokenizer(text, add_special_tokens=False)["input_ids"]]


def chat_of(adapter: TextAdapter, engine: Engine, limit: int = 5) -> Chat:
    return Chat(engine, adapter, Sampling(max_new_tokens=limit), Seat(0, "task", 1, 2, (7,)))


def say(chat: Chat, *turns: str) -> list[str]:
    async def conversation() -> list[str]:
        return [(await chat(turn)).text for turn in turns]

    return asyncio.run(conversation())


def test_one_turn_is_recorded_as_sampled(tmp_path: Path) -> None:
    adapter = text_adapter(tmp_path)
    answer = ids(adapter, "green <|im_end|>")
    engine = Scripted((answer, Stop.EOS))
    chat = chat_of(adapter, engine)
    assert say(chat, "red") == ["green"]
    (sample,) = chat.samples
    prompt = ids(adapter, "user red <|im_end|> again assistant")
    assert sample.ids == prompt + answer
    assert sample.mask == [0] * len(prompt) + [1, 1]
    assert sample.logprobs == [0.0] * len(prompt) + [-0.5, -0.5]
    assert sample.versions == [-1] * len(prompt) + [1, 1]
    assert chat.turns[0].stop is Stop.EOS and chat.turns[0].tokens == 2
    assert engine.asked[0].key == DrawKey("task", 1, 2, 0) and engine.asked[0].order == (7, 2, 0)


def test_later_turns_append_observations_and_equal_the_template(tmp_path: Path) -> None:
    adapter = text_adapter(tmp_path)
    engine = Scripted((ids(adapter, "green <|im_end|>"), Stop.EOS), (ids(adapter, "blue <|im_end|>"), Stop.EOS))
    chat = chat_of(adapter, engine)
    assert say(chat, "red", "so") == ["green", "blue"]
    (sample,) = chat.samples
    rendered = (
        "user red <|im_end|> again assistant green <|im_end|> again user so <|im_end|> again assistant blue <|im_end|>"
    )
    assert sample.ids == ids(adapter, rendered)
    sampled = [adapter.tokenizer.decode([t]) for t, m in zip(sample.ids, sample.mask, strict=True) if m]
    assert sampled == ["green", "<|im_end|>", "blue", "<|im_end|>"]  # neither headers nor what follows the end of turn
    assert [r.key.turn for r in engine.asked] == [0, 1]
    assert [v for v in sample.versions if v >= 0] == [1, 1, 2, 2]


def test_a_cut_reply_gets_its_end_of_turn_as_an_observation(tmp_path: Path) -> None:
    adapter = text_adapter(tmp_path)
    engine = Scripted((ids(adapter, "green green"), Stop.LENGTH), (ids(adapter, "ok <|im_end|>"), Stop.EOS))
    chat = chat_of(adapter, engine)
    say(chat, "red", "so")
    (sample,) = chat.samples
    end = ids(adapter, "<|im_end|>")[0]
    place = [i for i, m in enumerate(sample.mask) if m][1] + 1
    assert sample.ids[place] == end and sample.mask[place] == 0


def test_a_rewritten_past_starts_a_new_sample_and_keeps_the_old_one(tmp_path: Path) -> None:
    adapter = text_adapter(tmp_path, FORGETS_REPLIES)
    answers = [ids(adapter, "think green <|im_end|>"), ids(adapter, "blue <|im_end|>")]
    chat = chat_of(adapter, Scripted(*((answer, Stop.EOS) for answer in answers)))
    say(chat, "red", "so")
    assert len(chat.samples) == 2 and len(chat.rewrites) == 1
    first, second = chat.samples
    assert first.ids[-3:] == answers[0] and sum(first.mask) == 3
    assert second.ids[-2:] == answers[1] and sum(second.mask) == 2
    assert ids(adapter, "think")[0] not in second.ids


def test_an_aborted_turn_goes_on_from_its_prefix(tmp_path: Path) -> None:
    adapter = text_adapter(tmp_path)
    parts = [ids(adapter, "green"), [], ids(adapter, "blue <|im_end|>")]
    engine = Scripted((parts[0], Stop.ABORT), (parts[1], Stop.ABORT), (parts[2], Stop.EOS))
    chat = chat_of(adapter, engine)
    assert say(chat, "red") == ["green blue"]
    (sample,) = chat.samples
    assert [r.drawn for r in engine.asked] == [0, 1, 1]
    assert [len(r.prompt.ids) for r in engine.asked] == [len(sample.ids) - 3, len(sample.ids) - 2, len(sample.ids) - 2]
    assert [v for v in sample.versions if v >= 0] == [1, 3, 3]  # the version of each token that was kept
    assert {r.key for r in engine.asked} == {DrawKey("task", 1, 2, 0)}


def test_a_limit_of_one_call(tmp_path: Path) -> None:
    adapter = text_adapter(tmp_path)
    engine = Scripted(*((ids(adapter, "ok <|im_end|>"), Stop.EOS) for _ in range(3)))
    chat = chat_of(adapter, engine, limit=5)

    async def play() -> None:
        await chat("red", max_new_tokens=2)
        await chat("red", max_new_tokens=50)
        await chat("red")

    asyncio.run(play())
    assert [r.sampling.max_new_tokens for r in engine.asked] == [2, 5, 5]


def test_draws_of_a_play_are_its_own_and_repeat(tmp_path: Path) -> None:
    adapter, engine = text_adapter(tmp_path), Scripted()
    seat = Seat(0, "task", 0, 0, ())
    seats = [
        seat,
        replace(seat, member=1),
        replace(seat, task="other"),
        replace(seat, attempt=1),
        replace(seat, seed=1),
    ]
    draws = [Chat(engine, adapter, Sampling(), s).random("a") for s in seats]
    assert len(set(draws)) == 5 and all(0 <= d < 1 for d in draws)
    again = Chat(engine, adapter, Sampling(), seat)
    assert again.random("a") == draws[0] != again.random("b")


def test_positions_of_three_axes_go_on_from_the_largest() -> None:
    adapter = tiny_adapter("red green blue")
    first = adapter.encode([user("red green")])
    places = np.array([[0, 0], [0, 3], [0, 1]], np.int32)

    def encode(history: Sequence[object]) -> Encoded:
        return replace(first, positions=places)

    engine = Scripted(([3, 4], Stop.LENGTH))
    chat = Chat(engine, adapter, Sampling(), Seat(0, "t", 0, 0, ()), encode)
    asyncio.run(chat(message("user", "red green")))
    found = chat.samples[0].positions
    assert found is not None and found.tolist() == [[0, 0, 4, 5], [0, 3, 4, 5], [0, 1, 4, 5]]


def test_media_are_held_until_the_play_is_closed() -> None:
    store = MediaStore({}, 0)  # what nobody holds is dropped at once
    adapter = tiny_adapter("red green blue", store, images=True)
    chat = Chat(Scripted(([3, 1], Stop.EOS)), adapter, Sampling(), Seat(0, "t", 0, 0, ()))
    asyncio.run(chat(user(picture(1), picture(2), "red")))
    keys = [ref.key for ref in chat.samples[0].media]
    assert len(keys) == 2 and all(key in store for key in keys)
    chat.close()
    chat.close()
    assert not any(key in store for key in keys)


@pytest.mark.parametrize("stop", [Stop.EOS, Stop.LENGTH])
def test_the_reply_says_how_it_ended(tmp_path: Path, stop: Stop) -> None:
    adapter = text_adapter(tmp_path)
    chat = chat_of(adapter, Scripted((ids(adapter, "ok"), stop)))
    reply = asyncio.run(chat("red"))
    assert reply.stop is stop and reply.tokens == 1
