"""Plays that made other frameworks crash or train on wrong numbers: engines, tools, masks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_core.bus import Bus
from relax_core.chat import Chat, Seat
from relax_core.errors import DataError, EngineError
from relax_core.interfaces import Batch, Completion, Engine, Environment, Interrupt, Loss, Outputs, Request
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.models.tool_calls import HermesParser
from relax_core.players import Player, rows_of
from relax_core.testing.decoding import decoder, mixed_requests, run
from relax_core.testing.gradients import assert_close, caught, gradients
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import row, tiny_run, train
from relax_core.types import CallError, Group, Message, Sampling, Stop, Task, Text, ToolCall, Trajectory, Version, user
from relax_core.weights import WeightUpdate
from relax_envs.cut import cut

torch.set_num_threads(1)
WORDS = ("red", "green", "blue", '{"name":', '"zoom",', '"arguments":', '{"x":', "3}}", "<tool_call>", "</tool_call>")
SEAT = Seat(0, "task", 0, 0, ())


class Answers(Engine):
    """Gives completions, or what else it was told to, in order."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(None)
        self.answers = list(answers)

    async def generate(self, request: Request) -> Completion:
        return cast(Completion, self.answers.pop(0))

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


def text_adapter() -> TextAdapter:
    tiny = {"words": WORDS, "unknown_words": "keep"}
    return TextAdapter(TextConfig.model_validate({"tiny": tiny}), MediaStore({}, 0))


def completion(ids: list[int], /, **changed: Any) -> Completion:
    n = len(ids)
    return replace(Completion(ids, [-0.5] * n, [Version(0, 1)] * n, Stop.EOS), **changed)


# --- engines ----------------------------------------------------------------------------------------------------------

INCOMPLETE: dict[str, dict[str, Any]] = {
    "no ids": {"ids": None},
    "no log-probs": {"logprobs": None},
    "no versions": {"versions": None},
    "empty ids": {"ids": []},
    "empty log-probs": {"logprobs": []},
    "a log-prob less": {"logprobs": [-0.5]},
    "a log-prob more": {"logprobs": [-0.5] * 3},
    "one log-prob missing": {"logprobs": [None, -0.5]},
    "one id missing": {"ids": [7, None]},
    "one version missing": {"versions": [None, Version(0, 1)]},
    "NaN": {"logprobs": [-0.5, float("nan")]},
    "inf": {"logprobs": [-0.5, float("-inf")]},
    "nothing at all": {"ids": [], "logprobs": [], "versions": []},
}


@pytest.mark.parametrize("changed", INCOMPLETE.values(), ids=INCOMPLETE)
def test_an_answer_without_ids_or_logprobs_is_an_engine_error(changed: dict[str, Any]) -> None:
    chat = Chat(Answers(completion([7, 1], **changed)), tiny_adapter(), Sampling(), SEAT)
    with pytest.raises(EngineError, match=r"^engine: .*(ids|log-probs|versions)"):
        asyncio.run(chat(user("w01")))
    assert not any(sample.sampled for sample in chat.samples), "nothing of it is kept"


def test_such_a_play_fails_by_itself_and_says_why() -> None:
    engine = Answers(completion([7, 1], logprobs=None))
    trajectory = _played(Asks(), engine, tiny_adapter())
    assert trajectory.error is not None and trajectory.error.type == "EngineError"
    assert "log-probs" in trajectory.error.text and trajectory.stop is Stop.ERROR
    assert rows_of(Group("g", 0, trajectory.task, 0, [trajectory])) == {}


def test_a_prefix_that_is_given_back_may_be_empty() -> None:
    engine = Answers(completion([], stop=Stop.ABORT), completion([7, 1]))
    chat = Chat(engine, tiny_adapter(), Sampling(), SEAT)
    assert asyncio.run(chat(user("w01"))).tokens == 2


# --- padding that equals the end --------------------------------------------------------------------------------------


class Seeing(Grpo):
    def __init__(self) -> None:
        super().__init__(Grpo.Config())
        self.batches: list[Batch] = []

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        self.batches.append(batch)
        return super().loss(batch, outputs)


def padding_with(id: int) -> TinyAdapter:
    adapter = tiny_adapter()
    adapter.pad_id = id
    return adapter


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_the_end_is_trained_and_padding_of_the_same_id_is_not(layout: str) -> None:
    """Also where the prompt holds that id."""
    rows = [row("g/0", [5, 1, 6], [7, 8, 1], advantage=1.5), row("g/1", [5, 1, 6], [9, 1, 10, 11, 12, 1], advantage=-1)]
    algorithm, found = Seeing(), []
    for pad in (1, 0):
        trainer = caught(padding_with(pad), layout=layout)
        train(trainer, 0, [rows], algorithm)
        found.append(gradients(trainer))
    assert_close(found[0], found[1], 0)
    batch = algorithm.batches[0]
    masks = [m.tolist() for m in batch.mask_BT]
    tokens = [t.tolist() for t in batch.tokens_BT]
    assert [[t for t, m in zip(*pair, strict=True) if m] for pair in zip(tokens, masks, strict=True)] == [
        [7, 8, 1],
        [9, 1, 10, 11, 12, 1],
    ]
    alone = caught(padding_with(1), layout=layout)
    train(alone, 0, [rows[:1], rows[1:]], algorithm)
    assert_close(gradients(alone), found[0], 1e-5)


def test_an_engine_that_pads_with_the_end_samples_the_same() -> None:
    results = [run(decoder(padding_with(pad)), mixed_requests(12)) for pad in (1, 0)]
    assert results[0] == results[1]
    assert any(c.stop is Stop.EOS for c in results[0])
    assert all(c.ids.count(1) == (c.ids[-1] == 1) for c in results[0]), "one end, and nothing behind it"


# --- tools ------------------------------------------------------------------------------------------------------------


class Asks(Environment):
    """The default play: ask once."""

    def __init__(self) -> None:
        super().__init__(None)

    def tasks(self, split: Any) -> list[Task]:
        return []


class UsesTools(Asks):
    """Runs calls until a reply has none."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Mapping[str, Any]] = []

    async def play(self, task: Task, chat: Chat) -> None:
        reply = await chat(*task.messages)
        while calls := HermesParser().parse(reply.text):
            reply = await chat(*(Message("tool", (Text(self.run(call)),)) for call in calls))

    def run(self, call: ToolCall | CallError) -> str:
        if isinstance(call, CallError):
            return call.text
        self.ran.append(call.arguments)
        return cut("blue " * 50, 9, "head")


RIGHT = '{"name": "zoom", "arguments": {"x": 3}}'
BROKEN = {
    "truncated": '<tool_call> {"name": "zoom", "arguments": {"x":',
    "no arguments": '<tool_call> {"name": "zoom", </tool_call>',
    "two objects": f"<tool_call> {RIGHT} {RIGHT} </tool_call>",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_malformed_call_is_answered_and_the_play_goes_on(broken: str) -> None:
    adapter = text_adapter()
    said = [
        adapter.tokenizer(f"{text} <|im_end|>")["input_ids"]
        for text in (broken, f"<tool_call> {RIGHT} </tool_call>", "blue")
    ]
    environment = UsesTools()
    trajectory = _played(environment, Answers(*map(completion, said)), adapter)
    assert trajectory.error is None and trajectory.stop is Stop.EOS and len(trajectory.turns) == 3
    assert environment.ran == [{"x": 3}], "the broken one was never run"
    answers = [turn.prompt[0].text for turn in trajectory.turns[1:]]
    assert answers[0].startswith("Tool call 1 was not run: ")
    assert answers[1] == "blue blue\n[241 characters left out]"
    assert [i for s in trajectory.samples for i, m in zip(s.ids, s.mask, strict=True) if m] == [
        i for a in said for i in a
    ]


def test_what_a_template_refuses_leaves_the_conversation_as_it_was() -> None:
    """So an environment may catch the error and say something else."""
    adapter = text_adapter()
    end = adapter.tokenizer("<|im_end|>")["input_ids"]

    def played(*sayings: str) -> Chat:
        chat = Chat(
            Answers(*(completion([*adapter.tokenizer("blue")["input_ids"], *end]) for _ in sayings)),
            adapter,
            Sampling(),
            SEAT,
        )

        async def play() -> None:
            for text in sayings:
                try:
                    await chat(text)
                except DataError:
                    assert "<|im_end|>" in text

        asyncio.run(play())
        return chat

    refused, clean = played("<|im_end|>", "red", "<|im_end|>", "green"), played("red", "green")
    assert refused.history == clean.history and refused.samples == clean.samples and refused.turns == clean.turns


# --- helpers ----------------------------------------------------------------------------------------------------------


def _played(environment: Environment, engine: Engine, adapter: Any) -> Trajectory:
    """One play of a task that says ``red``."""
    task = Task("t", (user("red" if isinstance(adapter, TextAdapter) else "w01"),), environment="toy")
    player = Player(tiny_run(), engine, adapter, {"toy": environment}, Bus(1, 1))
    return asyncio.run(player.single(task, SEAT, Sampling(), None, {}))
