"""What of a play the judge sees, made harmless: nothing that was played can look like the template's own marks."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, get_args

from relax_core.types import (
    MEDIA_KINDS,
    Audio,
    Image,
    Message,
    Part,
    Role,
    Text,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Video,
)
from relax_envs.rewards.conversation import plain
from relax_envs.rewards.reply import final_part
from relax_plugin_genrm.template import joined

NOT_GIVEN = Text("(empty)")
_CONTROL = re.compile(
    r"<(?=[|｜][^<>\s]{1,60}[|｜]>|/?s>|(?:bos|eos|pad|unk|mask)>|(?:start|end)_of_\w{1,30}>)", re.IGNORECASE
)
"""Where a control token of one of the common chat templates begins."""
_WIDE = "‹"
_BREAK = "\u200b"


class Defuser:
    """Breaks marks and control tokens in what was played, so that it reads the same to a reader and is neither.

    ``marks``: names of the template's tags; those of roles are always some. ``tokens``: the judge's own control tokens,
    where they are known.
    """

    def __init__(self, marks: Collection[str], tokens: Collection[str] = ()) -> None:
        names = "|".join(map(re.escape, sorted({*marks, *get_args(Role)})))
        self._mark = re.compile(rf"<(?=\s*/?\s*(?:{names})\b)", re.IGNORECASE)
        known = "|".join(map(re.escape, sorted((t for t in tokens if t), key=len, reverse=True)))
        self._token = re.compile(known) if known else None

    def __call__(self, text: str) -> str:
        text = self._mark.sub(_WIDE, _CONTROL.sub(_WIDE, text))
        if self._token is not None:
            text = self._token.sub(lambda found: _broken(found[0]), text)
        return text


def _broken(token: str) -> str:
    return _WIDE + token[1:] if token.startswith("<") else token[0] + _BREAK + token[1:]


class Shown:
    """Parts for a template's places. ``media`` False: a note in their place; ``reasoning``: whether it is shown."""

    def __init__(self, defuse: Defuser, *, media: bool, reasoning: bool) -> None:
        self.defuse, self.media, self.reasoning = defuse, media, reasoning

    def task(self, trajectory: Trajectory) -> list[Part]:
        """What was said before the first reply."""
        turns = _line(trajectory.turns)
        return self._messages(turns[0].prompt if turns else trajectory.task.messages)

    def last(self, trajectory: Trajectory) -> list[Part]:
        """The last reply."""
        turns = trajectory.turns
        return self._reply(turns[-1].reply) if turns else [NOT_GIVEN]

    def conversation(self, trajectory: Trajectory) -> list[Part]:
        """Everything from the first reply to the last one, what was said between them included; messages stand between
        marks of their roles where there are several."""
        said: list[Message] = []
        for place, turn in enumerate(_line(trajectory.turns)):
            said += [*(turn.prompt if place else ()), turn.reply]
        if len(said) < 2:
            return self.last(trajectory)
        return self._messages(said)

    def reference(self, trajectory: Trajectory) -> list[Part]:
        """The task's answer; nothing where it has none."""
        answer = trajectory.task.answer
        if answer is None:
            return []
        text = answer if isinstance(answer, str) else json.dumps(plain(answer), ensure_ascii=False)
        return [Text(self.defuse(text))]

    def _messages(self, messages: Sequence[Message]) -> list[Part]:
        if len(messages) == 1 and messages[0].role != "assistant":
            return self._parts(messages[0])
        found: list[Part] = []
        for message in messages:
            parts = self._reply(message) if message.role == "assistant" else self._parts(message)
            found += [Text(f"<{message.role}>\n"), *parts, Text(f"\n</{message.role}>\n")]
        return joined([*found[:-1], Text(f"\n</{messages[-1].role}>")]) if found else []

    def _reply(self, message: Message) -> list[Part]:
        if self.reasoning:
            return self._parts(message) or [NOT_GIVEN]
        text = self.defuse(final_part(message.text))
        media = [part for part in message.parts if not isinstance(part, Text)]
        return joined([Text(text), *(p for part in media for p in self._part(part))]) or [NOT_GIVEN]

    def _parts(self, message: Message) -> list[Part]:
        return joined([shown for part in message.parts for shown in self._part(part)])

    def _part(self, part: Part) -> list[Part]:
        if isinstance(part, Text):
            return [Text(self.defuse(part.text))]
        if isinstance(part, Image | Audio | Video):
            return [part] if self.media else [Text(f"[{MEDIA_KINDS[type(part)]}]")]
        if isinstance(part, ToolResult):
            return [shown for inner in part.parts for shown in self._part(inner)]
        if isinstance(part, ToolCall):
            return [Text(self.defuse(f"[calls {part.name} {_json(dict(part.arguments))}]"))]
        return []  # how tools are declared is nothing to judge


def _line(turns: Sequence[Turn]) -> list[Turn]:
    """The turns of the conversation that ends with the last one; a play may have others."""
    found: list[Turn] = []
    place = len(turns) - 1
    while place >= 0:
        found.insert(0, turns[place])
        place = turns[place].after
    return found


def _json(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)
