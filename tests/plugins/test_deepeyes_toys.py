"""The toys of relax-plugin-deepeyes: a glimpse hides the answer, the right call shows it, wrong ones do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.chat import Chat, PlayOver, Seat
from relax_core.config.resolve import resolve
from relax_core.config.schema import PlayLimits
from relax_core.config.yaml import read
from relax_core.content_hash import content_hash
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.keys import generator
from relax_core.types import Decoded, Sampling, Stop, Text, ToolResult, Version
from relax_core.weights import WeightUpdate
from relax_plugin_deepeyes.boxes import Box
from relax_plugin_deepeyes.toy import listen, watch, zoom
from relax_plugin_deepeyes.toy.base import LookToy, answer_word
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.testing import tiny_omni

PLUGIN = Path(__file__).resolve().parents[2] / "relax_plugins" / "relax-plugin-deepeyes"
TOYS: list[tuple[type[LookToy], Any]] = [(zoom.Zoom, zoom), (listen.Listen, listen), (watch.Watch, watch)]
each_toy = pytest.mark.parametrize(("cls", "module"), TOYS)


def made(cls: type[LookToy], place: int, answer: str, seed: int = 0) -> tuple[Decoded, Decoded]:
    """Whole and glimpse, of the same noise for equal seeds."""
    whole, glimpse = cls(cls.Config()).make(generator(seed, "scene"), place, answer)
    assert isinstance(glimpse.source, Decoded)
    return whole, glimpse.source


@each_toy
def test_the_glimpse_shows_where_and_nothing_of_the_answer(cls: type[LookToy], module: Any) -> None:
    places = range(len(cls.places))
    for place in places:
        assert len({made(cls, place, answer)[1].hash for answer in cls.answers}) == 1
        assert len({made(cls, place, answer)[0].hash for answer in cls.answers}) == 4
    assert len({made(cls, place, cls.answers[0])[1].hash for place in places}) == len(places)


@each_toy
def test_scenes_are_functions_of_their_place_in_the_split(cls: type[LookToy], module: Any) -> None:
    first, second = (cls(cls.Config(size=20, eval_size=20)) for _ in range(2))
    assert list(first.tasks("train")) == [second.tasks("train")[i] for i in reversed(range(20))][::-1]
    hashes = [content_hash(task) for split in ("train", "eval") for task in first.tasks(split)]
    assert len(set(hashes)) == 40
    other = cls(cls.Config(seed=1, size=20))
    assert not set(hashes) & {content_hash(task) for task in other.tasks("train")}


@each_toy
def test_run_files_hold_the_words_of_their_toy(cls: type[LookToy], module: Any) -> None:
    raw = read(PLUGIN / f"{cls.name.removeprefix('deepeyes-')}.yaml")
    resolve(raw)
    assert tuple(raw["model"]["tiny"]["words"]) == module.WORDS
    assert raw["environments"][0]["id"] == cls.name and raw["evaluation"][0]["size"] <= cls.Config().eval_size
    [reward] = raw["rewards"]
    assert reward["tool"] == 0, "nothing is paid for calling the tool"


# --- plays with a scripted policy through real templates, parser, checks, tools and features ------------------------


class Scripted(Engine):
    """Replies with given words of the vocabulary."""

    def __init__(self, replies: list[list[int]]) -> None:
        super().__init__(None)
        self.replies = replies

    async def generate(self, request: Request) -> Completion:
        ids = self.replies.pop(0)
        return Completion(ids, [-1.0] * len(ids), [Version(0, 0)] * len(ids), Stop.LENGTH)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


@cache
def reader(name: str, words: tuple[str, ...]) -> OmniAdapter:
    return tiny_omni(tiny={"words": list(words), "unknown_words": "keep"})


def played(cls: type[LookToy], module: Any, *words: str, index: int = 0) -> tuple[Chat, Any]:
    """The chat of a play in which the policy says these words, and what the tool messages said."""
    adapter = reader(cls.name, module.WORDS)
    ids: Any = [[adapter.tokenizer.convert_tokens_to_ids(word)] for word in words]
    chat = Chat(Scripted(ids), adapter, Sampling(), Seat(0, "t", 0, 0, (0,)), limits=PlayLimits(turns=len(words)))
    environment = cls(cls.Config(size=8))

    async def play() -> None:
        try:
            await environment.play(environment.tasks("train")[index], chat)
        except PlayOver as over:
            assert over.stop is Stop.TURNS

    asyncio.run(play())
    chat.close()
    said = [m for m in chat.history if m.role == "tool"]
    return chat, [part.parts for m in said for part in m.parts if isinstance(part, ToolResult)]


@each_toy
@pytest.mark.parametrize("index", range(3))
def test_the_right_call_shows_the_place_and_is_noted(cls: type[LookToy], module: Any, index: int) -> None:
    scene = cls(cls.Config(size=8)).scene("train", index)
    calls = [word for word in module.WORDS if word.startswith("<tool_call>")][: len(cls.places)]
    chat, results = played(cls, module, calls[scene.place], answer_word(scene.answer), index=index)
    assert chat.metrics == {"called": 1.0, "right_call": 1.0}
    [[shown]] = results
    assert shown.source.kind == scene.whole.kind
    [sample] = chat.samples
    assert sum(sample.mask) == 2 and [ref.kind for ref in sample.media] == [scene.whole.kind] * 2
    wrong = calls[scene.place - 1]
    assert played(cls, module, wrong, answer_word(scene.answer), index=index)[0].metrics["right_call"] == 0.0


@each_toy
def test_the_right_call_alone_tells_answers_apart(cls: type[LookToy], module: Any) -> None:
    """What the right call shows differs by the answer; what the others show does not."""
    name = {"image": "image_zoom_in_tool", "audio": "audio_zoom_in_tool", "video": "video_zoom_in_tool"}

    def shown(place: int, at: int, answer: str) -> bytes:
        whole, _ = made(cls, place, answer)
        tool = cls(cls.Config()).tool(_source(whole), lambda where: None)
        assert tool.name == name[whole.kind]
        key = "bbox_2d" if whole.kind == "image" else "span"
        part: Any = asyncio.run(tool({key: list(cls.places[at])}))
        found: bytes = part.source.data.tobytes()
        return found

    for at in range(len(cls.places)):
        assert len({shown(1, at, answer) for answer in cls.answers}) == (4 if at == 1 else 1)


def _source(whole: Decoded) -> Any:
    async def source(kind: str, index: int) -> Decoded:
        return whole

    return source


@each_toy
def test_wrong_calls_are_told_to_the_model_and_never_run(cls: type[LookToy], module: Any) -> None:
    calls = [word for word in module.WORDS if word.startswith("<tool_call>")]
    assert (len(calls) - 3) % len(cls.places) == 0
    for word in calls[-3:]:
        chat, [[said]] = played(cls, module, word, answer_word(cls.answers[0]))
        assert isinstance(said, Text) and said.text[-1] in ".?" and "\n" not in said.text
        assert chat.metrics == {"called": 0.0, "right_call": 0.0} and len(chat.turns) == 2


def test_a_crop_that_shows_too_much_is_not_the_right_one() -> None:
    toy = zoom.Zoom(zoom.Zoom.Config())
    box = zoom.TAGS[3]
    assert toy.shows(box, box) and toy.shows(Box(64, 64, 128, 128), box)
    assert not toy.shows(Box(0, 0, 128, 128), box) and not toy.shows(Box(90, 80, 112, 112), box)


def test_the_tag_is_grey_from_afar() -> None:
    _, glimpse = made(zoom.Zoom, 1, "red")
    assert glimpse.data.shape == (32, 32, 3)
    assert (glimpse.data[4:12, 20:28] == 127).all() and np.abs(glimpse.data.astype(int)[:, :16] - 70).max() < 12
