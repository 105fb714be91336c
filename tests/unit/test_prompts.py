"""Prompts over the limit: an error, left out, or cut by whole words of text, never through a medium."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from relax_core.config.schema import DataSection
from relax_core.errors import ConfigError, DataError
from relax_core.media import MediaStore
from relax_core.prompts import Prompts, TooLong
from relax_core.types import Decoded, Encoded, Image, MediaRef, Message, Part, Task, Text, system, user

PICTURE = Image(Decoded("image", np.zeros((2, 2, 3), np.uint8)))
TOKENS = 5
"""Of a picture."""


class Words:
    """A token for each word, and some for each picture."""

    def __init__(self) -> None:
        self.media = MediaStore({}, 10**6)

    def encode(self, history: Sequence[Message]) -> Encoded:
        ids: list[int] = []
        refs = []
        for part in (part for message in history for part in message.parts):
            if isinstance(part, Image):
                self.media.features("picture", lambda: {"x": np.zeros(4, np.uint8)})
                refs.append(MediaRef("image", "picture", len(ids), TOKENS))
                ids += [-1] * TOKENS
            elif isinstance(part, Text):
                ids += [1] * len(part.text.split())
        return Encoded(ids, tuple(refs))


def prompts(limit: int | None, rule: str = "error") -> Prompts:
    adapter: Any = Words()
    return Prompts(
        adapter, DataSection.model_validate_json(json.dumps({"max_prompt_tokens": limit, "long_prompts": rule}))
    )


def task(*parts: str | Part, before: Sequence[Message] = ()) -> Task:
    return Task("t", (*before, user(*parts)))


LONG = " ".join(f"w{i}" for i in range(100))


def test_a_prompt_that_fits_stays_as_it_is() -> None:
    made = prompts(105).make(found := task(PICTURE, LONG))
    assert made.task is found and not made.cut and len(made.encoded.ids) == 105
    assert len(prompts(None).make(found).encoded.ids) == 105


def test_one_that_does_not_is_an_error_or_is_left_out() -> None:
    with pytest.raises(ConfigError, match=r"task 't': its prompt has 105 tokens, data\.max_prompt_tokens allows 104"):
        prompts(104).make(task(PICTURE, LONG))
    with pytest.raises(TooLong, match="105 tokens"):
        prompts(104, "skip").make(task(PICTURE, LONG))


@pytest.mark.parametrize(("rule", "kept"), [("cut_start", "w95 w96 w97 w98 w99"), ("cut_end", "w0 w1 w2 w3 w4")])
def test_cutting_keeps_the_other_end_and_all_media(rule: str, kept: str) -> None:
    made = prompts(20, rule).make(task("look", PICTURE, "at this:", LONG, PICTURE, before=[system("be brief")]))
    assert made.cut and len(made.encoded.ids) == 20
    assert made.task.messages[0].text == "be brief"
    parts = [part.text.strip() if isinstance(part, Text) else part for part in made.task.messages[1].parts]
    assert parts == ["look", PICTURE, "at this:", kept, PICTURE]


def test_the_longest_text_may_go_altogether() -> None:
    made = prompts(6, "cut_end").make(task("look", PICTURE, LONG))
    assert [type(part).__name__ for part in made.task.messages[0].parts] == ["Text", "Image"]


@pytest.mark.parametrize("found", [task("a b", PICTURE, PICTURE, "c"), task(PICTURE), task("a", before=[system(LONG)])])
def test_what_cannot_be_cut_is_a_bad_row(found: Task) -> None:
    """Media and the system's words are never taken away."""
    with pytest.raises(DataError, match=r"task 't': .*(no text to cut|does not suffice)") as error:
        prompts(4, "cut_end").make(found)
    assert not isinstance(error.value, TooLong)


def test_media_are_held_until_released() -> None:
    made = prompts(None)
    store = made.adapter.media
    prompt = made.make(task(PICTURE, PICTURE))
    assert prompt.keys == ["picture", "picture"]
    store.release(prompt.keys)
    with pytest.raises(DataError, match="released"):
        store.release(["picture"])
