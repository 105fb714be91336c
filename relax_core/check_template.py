"""What the deep check finds out about a chat template: where a conversation goes on in the same sample, and where not.

A fabricated conversation is played through the very code that plays it in training, and each kind of turn is tried
alone: what follows a reply either extends the tokens that were sampled, or the template rewrites them and a new sample
starts, or the template refuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from relax_core.chat import Chat, Seat
from relax_core.chat_state import advanced
from relax_core.errors import DataError
from relax_core.interfaces import Rewritten
from relax_core.scripted import ScriptedEngine
from relax_core.types import (
    Audio,
    Decoded,
    Encoded,
    Image,
    MediaKind,
    MediaPart,
    MediaRef,
    Message,
    Sampling,
    Task,
    Text,
    ToolResult,
    Video,
    message,
    user,
)

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter

TURNS = 3
"""Samplings of the fabricated conversation that tries the template."""


# --- each kind of turn ------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of turn: what follows what. ``plain``: the kind that it is but for the reasoning in its reply."""

    name: str
    reply: str
    new: tuple[Message, ...]
    plain: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    what: Literal["same sample", "new sample", "refused"]
    why: str = ""


def template_lines(adapter: ModelAdapter, task: Task) -> list[str]:
    """One line for all kinds of turn that go on in the same sample, and one for each reason why others do not.

    What a reason says of the text is shown of the first kind that it holds for.
    """
    outcomes = [outcome(adapter, task, kind) for kind in kinds_of_turn(adapter, task)]
    going_on = {o.kind.name for o in outcomes if o.what == "same sample"}
    opened = _opens_reasoning(adapter, task)
    groups: dict[tuple[str, bool, str], list[Outcome]] = {}
    for o in sorted(outcomes, key=lambda o: o.what != "same sample"):
        thinking = o.what == "new sample" and (opened or o.kind.plain in going_on)
        groups.setdefault((o.what, thinking, o.why.split(": ")[0]), []).append(o)
    lines = []
    for (what, thinking, _), alike in groups.items():
        why = "reasoning in earlier replies is not kept as it was sampled: " * thinking + alike[0].why
        lines.append(f"template: {what}: {', '.join(o.kind.name for o in alike)}{why and f': {why}'}")
    return lines


def kinds_of_turn(adapter: ModelAdapter, task: Task) -> list[Kind]:
    """In words of the task, so that a tiny vocabulary has them. Reasoning that the template opens, replies close."""
    word, asked = _words(task), user(_words(task, ask=True))
    result = ToolResult((Text(word),), "1")
    one, two = Message("tool", (result,)), Message("tool", (result, ToolResult((Text(word),), "2")))
    answered, called = "user after answer", "tool result after call"
    opened = _opens_reasoning(adapter, task)
    said, thought = (CLOSE if opened else ""), ("" if opened else OPEN) + word + CLOSE
    kinds = [
        Kind(answered, said + word, (asked,)),
        Kind(called, said + CALL, (one,)),
        Kind("two tool results after two calls", f"{said}{CALL}\n{CALL}", (two,)),
        Kind("user after reasoning", thought + word, (asked,), answered),
        Kind("tool result after reasoning and call", thought + CALL, (one,), called),
    ]
    for medium in sorted(adapter.kinds):
        part = blank(medium)
        kinds += [
            Kind(f"user with {medium}", said + word, (user(part, Text(word)),)),
            Kind(f"tool result with {medium}", said + CALL, (Message("tool", (ToolResult((part,), "1"),)),)),
        ]
    return kinds


def _opens_reasoning(adapter: ModelAdapter, task: Task) -> bool:
    return adapter.decode(adapter.encode(task.messages).ids).rstrip().endswith(OPEN.rstrip())


def outcome(adapter: ModelAdapter, task: Task, kind: Kind) -> Outcome:
    """What the template does with a turn of this kind, behind the task's own messages."""
    prompt = adapter.encode(task.messages)
    end = sorted(adapter.stop_ids)[:1]  # a model may have none, and end at its limit alone
    past = Encoded([*prompt.ids, *end], prompt.media, advanced(prompt.positions, len(end)))
    try:
        result = adapter.extend([*task.messages, Message("assistant", (Text(kind.reply),))], past, kind.new)
    except DataError as error:
        return Outcome(kind, "refused", str(error))
    if isinstance(result, Rewritten):
        return Outcome(kind, "new sample", result.reason)
    return Outcome(kind, "same sample")


def blank(kind: MediaKind) -> MediaPart:
    """A small medium with nothing to see or hear in it."""
    import numpy as np

    if kind == "image":
        return Image(Decoded("image", np.full((64, 64, 3), 128, np.uint8)))
    if kind == "audio":
        return Audio(Decoded("audio", np.zeros(8000, np.float32), 16000))
    return Video(Decoded("video", np.full((4, 64, 64, 3), 128, np.uint8), 2))


# --- a conversation ---------------------------------------------------------------------------------------------------


def conversation_problems(adapter: ModelAdapter, task: Task, rewrites: list[str]) -> Iterator[str]:
    """Play a task for some turns with made-up replies, through the very code that plays it in training.

    At each sampling the tokens so far must be those of the template for the whole history; where the template rewrites
    what was sampled, a new sample must start. The reasons for that go into ``rewrites``.
    """
    reply: list[int] = []
    engine = ScriptedEngine(lambda request: reply, adapter.stop_ids)
    chat = Chat(engine, adapter, Sampling(), Seat(0, task.id, 0, 0, (0,)))
    said = Message("assistant", (Text(_words(task)),))
    more = message("user", _words(task, ask=True))
    try:
        for turn in range(TURNS):
            new = [more] if turn else list(task.messages)
            wanted = adapter.encode([*chat.history, *new])
            reply[:] = _reply(adapter, wanted.ids, adapter.encode([*chat.history, *new, said, more]).ids)
            asyncio.run(chat(*new))
            yield from (f"turn {turn}: {line}" for line in difference(engine.prompt, wanted))
        rewrites += chat.rewrites
    finally:
        chat.close()


def _words(task: Task, ask: bool = False) -> str:
    """Something to say in words of the task, so that a tiny vocabulary has them."""
    answer = task.answer if isinstance(task.answer, str) and task.answer.strip() and not ask else ""
    texts = [m.text.strip() for m in task.messages if m.text.strip()]
    return answer or (texts[-1] if ask and texts else (texts or ["yes"])[-1].split()[-1])


def _reply(adapter: ModelAdapter, prompt: Sequence[int], whole: Sequence[int]) -> list[int]:
    """The made-up reply as the template writes it, its end of turn included; else a word of the prompt.

    A reply that no policy could sample is none: a tiny vocabulary may lack its words.
    """
    rest = list(whole[len(prompt) :]) if list(whole[: len(prompt)]) == list(prompt) else []
    end = next((i for i, token in enumerate(rest) if token in adapter.stop_ids), None)
    if end is not None and not set(rest[:end]) & set(adapter.banned_token_ids):
        return rest[: end + 1]
    word = next((t for t in reversed(prompt) if adapter.decode([t]).strip() and t not in adapter.stop_ids), None)
    return [token for token in (word, min(adapter.stop_ids, default=None)) if token is not None]


def difference(found: Encoded, wanted: Encoded) -> Iterator[str]:
    """How the tokens of a conversation differ from those of the template for the same history."""
    if found.ids != wanted.ids:
        pairs = enumerate(zip(found.ids, wanted.ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(found.ids), len(wanted.ids)))
        yield (
            f"tokens differ from the template's at {at}: {found.ids[at : at + 5]} of {len(found.ids)}, the template "
            f"has {wanted.ids[at : at + 5]} of {len(wanted.ids)}: extend() must go on as it does, or say Rewritten"
        )
    elif found.media != wanted.media:
        yield f"media are at {[where(r) for r in found.media]}, the template has {[where(r) for r in wanted.media]}"
    elif not _equal(found.positions, wanted.positions):
        yield "positions differ from those of the whole history"


def _equal(one: Any, other: Any) -> bool:
    return one is other if one is None or other is None else bool((one == other).all())


def where(ref: MediaRef) -> str:
    return f"{ref.kind} at tokens {ref.start} to {ref.start + ref.length}"
