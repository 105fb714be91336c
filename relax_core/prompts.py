"""Prompts made ready: a task's messages as tokens with their media decoded, and what is too long treated by rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relax_core.errors import ConfigError, DataError
from relax_core.types import Encoded, Message, Task, Text

if TYPE_CHECKING:
    from relax_core.config.schema import DataSection
    from relax_core.interfaces import ModelAdapter


LONGEST_WORD = 40
"""Characters without a space between them that are taken for a word."""

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task and its messages as tokens. ``cut``: text was taken away so that it fits."""

    task: Task
    encoded: Encoded
    cut: bool = False

    @property
    def keys(self) -> list[str]:
        """The media that it needs, by their keys in the store."""
        return [ref.key for ref in self.encoded.media]


class TooLong(DataError):
    """A prompt over the limit that ``long_prompts: skip`` leaves out."""


class Prompts:
    """Makes prompts. Thread-safe: several workers use one at the same time."""

    def __init__(self, adapter: ModelAdapter, settings: DataSection) -> None:
        self.adapter, self.limit, self.rule = adapter, settings.max_prompt_tokens, settings.long_prompts

    def make(self, task: Task) -> Prompt:
        """Encode a task and retain its media: whoever gets the prompt releases ``prompt.keys``.

        Raises DataError for what cannot be read, TooLong for what is to be left out, and ConfigError for a prompt that
        is too long where that ends the run.
        """
        media = self.adapter.media
        with media.holding():
            prompt = Prompt(task, self.adapter.encode(task.messages))
            if self.limit is not None and len(prompt.encoded.ids) > self.limit:
                prompt = self._shortened(prompt, self.limit)
            media.retain(prompt.keys)
        return prompt

    def _shortened(self, prompt: Prompt, limit: int) -> Prompt:
        tokens = len(prompt.encoded.ids)
        found = f"task {prompt.task.id!r}: its prompt has {tokens} tokens, data.max_prompt_tokens allows {limit}"
        if self.rule == "error":
            raise ConfigError(f"{found}: allow more, or set data.long_prompts to skip, cut_start or cut_end")
        if self.rule == "skip":
            raise TooLong(found)
        return self._cut(prompt, limit, found)

    def _cut(self, prompt: Prompt, limit: int, found: str) -> Prompt:
        """The most of the longest piece of text that fits, by halving; media and all other text stay whole."""
        place = max(_texts(prompt.task), key=lambda at: len(at[2]), default=None)
        if place is None:
            raise DataError(f"{found}, and there is no text to cut")
        message, part, text = place
        pieces = _pieces(text, self.rule == "cut_start")
        fitting: Prompt | None = None
        least, most = 0, len(pieces) - 1
        while least <= most:
            middle = (least + most) // 2
            tried = self._encoded(_with_text(prompt.task, message, part, pieces[middle]))
            if len(tried.encoded.ids) <= limit:
                fitting, least = tried, middle + 1
            else:
                most = middle - 1
        if fitting is None:
            raise DataError(f"{found}, and cutting its longest text does not suffice")
        return fitting

    def _encoded(self, task: Task) -> Prompt:
        return Prompt(task, self.adapter.encode(task.messages), cut=True)


def _texts(task: Task) -> Iterator[tuple[int, int, str]]:
    """(message, part, text) of every piece of text that may be cut: a system message never is."""
    for i, message in enumerate(task.messages):
        if message.role != "system":
            yield from ((i, j, part.text) for j, part in enumerate(message.parts) if isinstance(part, Text))


def _pieces(text: str, from_end: bool) -> list[str]:
    """Beginnings (or ends) of a text, shortest first, the whole of it left out: words stay whole.

    Only what is longer than any word, as text of scripts without spaces is, may be cut anywhere.
    """
    borders = {0}
    for word in _WORD.finditer(text):
        start, end = word.span()
        borders |= set(range(start, end + 1)) if end - start > LONGEST_WORD else {start if from_end else end}
    if from_end:
        return [text[i:] for i in sorted((borders - {0}) | {len(text)}, reverse=True)]
    return [text[:i] for i in sorted(borders - {len(text)})]


def _with_text(task: Task, message: int, part: int, text: str) -> Task:
    """The task with another text in one place; a part that becomes empty is left out, unless it is the only one."""
    old = task.messages[message]
    new = [Text(text)] if text or len(old.parts) == 1 else []
    parts = (*old.parts[:part], *new, *old.parts[part + 1 :])
    messages = list(task.messages)
    messages[message] = Message(old.role, parts)
    return replace(task, messages=tuple(messages))
