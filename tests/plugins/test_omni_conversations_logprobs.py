"""Conversations about every medium, sampled by the embedded engine and scored by the trainer: log-probs agree.

Members of a group see the same first; pictures, sounds and films come from the user and from tools, in any turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from relax_core.chat import Chat, Seat
from relax_core.interfaces import Row
from relax_core.setup import EngineSetup
from relax_core.testing.conversation_strategies import contents, profile, said
from relax_core.testing.noise import film, picture, sound
from relax_core.testing.training import forward, row, tiny_trainer
from relax_core.torch.config import EngineConfig
from relax_core.torch.engine import TorchEngine
from relax_core.types import Message, Sample, Sampling, Text, ToolResult, message, user
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.testing import WORDS, tiny_omni

torch.set_num_threads(1)

TOLERANCE = 1e-4
MEMBERS = 2
TINY = {"words": list(WORDS), "init_std": 0.3}
"""Weights so large that log-probs differ by much more than the tolerance where anything is amiss."""

Adapters = Callable[[bool], OmniAdapter]
Turns = tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class Play:
    """``branch``: one more conversation goes on behind so many replies. ``sleeps``: the engine is put to sleep amid
    its replies so many times, so that these are given back and continued."""

    turns: Turns
    branch: int | None = None
    sleeps: int = 0
    rewriting: bool = False


WORD = st.lists(st.sampled_from(WORDS).map(lambda word: f"{word} "), min_size=1, max_size=3).map("".join)
MEDIA: st.SearchStrategy[Any] = st.one_of(
    st.builds(picture, st.sampled_from((32, 64)), st.sampled_from((32, 64)), st.integers(0, 3)),
    st.builds(sound, st.sampled_from((3000, 8000, 20000)), seed=st.integers(0, 3)),
    st.builds(film, st.sampled_from((2, 4, 5)), seed=st.integers(0, 3)),
)
PLAYS = st.builds(
    Play,
    st.builds(
        lambda first, later: (first, *later),
        contents(WORD, MEDIA).map(lambda parts: (user(*parts),)),
        st.lists(said(WORD, MEDIA), min_size=1, max_size=3),
    ),
    st.one_of(st.none(), st.integers(0, 2)),
    st.integers(0, 2),
    st.booleans(),
)


def returned(*parts: Any) -> tuple[Message]:
    return (Message("tool", (ToolResult(tuple(parts)),)),)


EVERY = Play(
    (
        (user("what colour ? ", picture(64, 32)),),
        returned(picture(32, 32, seed=1), Text("red ")),
        returned(sound(seed=1), sound(20000, seed=2)),
        returned(film(4, seed=1), Text("which way ? ")),
        (message("user", "what tone ? ", sound(3000), film(2, seed=2)),),
    ),
    branch=2,
    sleeps=1,
)
"""Every medium from a tool."""


async def played(adapter: OmniAdapter, play: Play) -> list[list[Sample]]:
    """The samples of each member, drawn side by side."""
    engine = TorchEngine(EngineConfig(device="cpu"), EngineSetup(adapter, 3, False))
    await engine.start()

    async def member(number: int) -> list[Sample]:
        chat = Chat(engine, adapter, Sampling(max_new_tokens=6), Seat(0, "task", 0, number, (0,)))
        for new in play.turns:
            await chat(*new)
        if play.branch is not None:
            await chat.branch(min(play.branch, len(play.turns)))(user("which way ? "))
        chat.close()
        return chat.samples

    async def disturb() -> None:
        for _ in range(play.sleeps):
            while not (await engine.health())["running"]:
                await asyncio.sleep(0)
            await engine.sleep()
            await engine.wake()

    disturbing = asyncio.create_task(disturb())
    try:
        return await asyncio.gather(*map(member, range(MEMBERS)))
    finally:
        disturbing.cancel()
        await engine.stop()


def rows_of(plays: Sequence[Sequence[Sample]]) -> list[Row]:
    return [
        row(f"task/{member}/{i}", [], s.ids, s.mask, media=s.media, positions=s.positions)
        for member, samples in enumerate(plays)
        for i, s in enumerate(samples)
    ]


def largest_difference(adapter: OmniAdapter, plays: Sequence[Sequence[Sample]], layout: str) -> float:
    """Between the engine's log-probs and the trainer's, of all sampled tokens."""
    columns = forward(tiny_trainer(adapter, layout=layout), rows_of(plays))
    samples = [s for samples in plays for s in samples]
    off = [
        np.abs(c["logprobs"] - np.array(s.logprobs))[np.array(s.mask) == 1]
        for s, c in zip(samples, columns, strict=True)
    ]
    return float(np.concatenate(off).max())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """One that goes on, and one whose template marks all messages but the last: it rewrites the past at each turn."""

    @cache
    def made(rewriting: bool) -> OmniAdapter:
        plain = tiny_omni(tiny=TINY)
        if not rewriting:
            return plain
        file = tmp_path_factory.mktemp("template") / "rewriting.jinja"
        role = "{{ message.role + ' ' }}"
        assert role in plain.template.source
        file.write_text(plain.template.source.replace(role, role + "{{ '' if loop.last else 'low ' }}"))
        return tiny_omni(tiny=TINY, chat_template=file)

    return made


LAYOUTS = ["shared", "packed", "padded"]


@pytest.mark.parametrize("layout", LAYOUTS)
@profile(5)
@example(play=EVERY)
@given(play=PLAYS)
def test_the_trainer_scores_what_the_engine_sampled(adapters: Adapters, layout: str, play: Play) -> None:
    check(adapters(play.rewriting), layout, play)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@profile(100)
@given(play=PLAYS)
def test_the_trainer_scores_very_many_conversations(adapters: Adapters, layout: str, play: Play) -> None:
    check(adapters(play.rewriting), layout, play)


def check(adapter: OmniAdapter, layout: str, play: Play) -> None:
    plays = asyncio.run(asyncio.wait_for(played(adapter, play), 60))
    count = (len(play.turns) if play.rewriting else 1) + (play.branch is not None)
    assert [len(samples) for samples in plays] == [count] * MEMBERS
    assert largest_difference(adapter, plays, layout) < TOLERANCE


def test_a_difference_would_be_seen(adapters: Adapters) -> None:
    """The same rows with the positions of text."""
    adapter = adapters(False)
    plays = asyncio.run(asyncio.wait_for(played(adapter, EVERY), 60))
    for sample in plays[0]:
        assert sample.positions is not None
        sample.positions = np.broadcast_to(np.arange(len(sample.ids), dtype=np.int32), (3, len(sample.ids)))
    assert largest_difference(adapter, plays, "padded") > 100 * TOLERANCE
