"""What rewards read in a reply: its reasoning, its answer, its boxes; and what they say of an unreadable gold."""

from __future__ import annotations

import re
from typing import Any, Literal

from relax_core.errors import DataError
from relax_core.types import Trajectory

OPENED, CLOSED = "<think>", "</think>"

AnswerPart = Literal["reply", "final", "answer", "boxed", "auto"]
"""Which part of a reply is its answer; see ``answer_part``."""

_END_TOKEN = re.compile(r"(?:<[|｜][^<>\s]{1,60}[|｜]>|</s>|<eos>|<pad>|<end_of_turn>|<end_of_utterance>)$")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s{0,20}")
_WORD = re.compile(r"[^\s{}$\\]+")
_BRACE = re.compile(r"\\[{}]|[{}]")
_LONGEST_TOKEN = 64
_STAGES = 8


def abstains(trajectory: Trajectory) -> bool:
    """Whether there is nothing to compare: the play failed, or the task has no answer."""
    return trajectory.error is not None or trajectory.task.answer is None


def unreadable(trajectory: Trajectory, found: Any, allowed: str) -> DataError:
    """The error of a task whose answer a reward cannot read; it is counted, and the play abstains."""
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return DataError(f"task {trajectory.task.id!r}: the answer {shown} cannot be read; allowed: {allowed}: fix the row")


def without_end_tokens(text: str) -> str:
    """The text without the special tokens that end a turn (``<|im_end|>``, ``</s>`` ...), and stripped."""
    return end_token_stages(text)[-1]


def end_token_stages(text: str) -> list[str]:
    """The stripped text, then that without its last special token, and so on until none is left at its end.

    Of many tokens only the first stages and the last are listed. What looks like a token may be a tag that was asked
    for, such as ``</s>``: who asks for tags looks at every stage.
    """
    end = _stripped(text, len(text))
    ends = [end]
    while end and text[end - 1] == ">" and (token := _END_TOKEN.search(text, max(0, end - _LONGEST_TOKEN), end)):
        end = _stripped(text, token.start())
        ends.append(end)
    return [text[:end].lstrip() for end in (ends[:_STAGES] + ends[-1:] if len(ends) > _STAGES else ends)]


def _stripped(text: str, end: int) -> int:
    while end and text[end - 1].isspace():
        end -= 1
    return end


def final_part(reply: str) -> str:
    """What a reply says after its reasoning: after the last ``</think>``, which a template may have opened.

    Without any tag this is the whole reply; reasoning that never ended has no answer behind it.
    """
    _, closed, rest = reply.rpartition(CLOSED)
    text = rest if closed else reply
    return without_end_tokens(text.partition(OPENED)[0])


def answer_part(reply: str, part: AnswerPart) -> str | None:
    """The part of a reply that is compared; None where it has no such part.

    ``reply``: all of it. ``final``: what comes after the reasoning. ``answer``: what stands in the last
    ``<answer>`` tags of that. ``boxed``: what stands in the last ``\\boxed{}`` of that. ``auto``: the tags' content if
    there are any, else that of the box if there is one, else the final part. White space at the ends is left out.
    """
    if part == "reply":
        return reply
    final = final_part(reply)
    if part == "final":
        return final
    if part != "boxed" and (found := tagged(final, "answer")) is not None:
        return found
    if part != "answer" and (found := boxed(final)) is not None:
        return found
    return final if part == "auto" else None


def tagged(text: str, tag: str) -> str | None:
    """What stands between the last ``<tag>`` and its ``</tag>``, stripped; None where none is complete."""
    spans = tagged_spans(text, tag)
    return text[slice(*spans[-1])].strip() if spans else None


def tagged_spans(text: str, tag: str) -> list[tuple[int, int]]:
    """Start and end of the content of every complete pair of tags, in order; the innermost where they are nested."""
    opened, closed = f"<{tag}>", f"</{tag}>"
    spans, place = [], 0
    while (end := text.find(closed, place)) >= 0:
        start = text.rfind(opened, place, end)
        if start >= 0:
            spans.append((start + len(opened), end))
        place = end + len(closed)
    return spans


def boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{}``, ``\\fbox{}`` or ``\\boxed 5``, stripped; None where no box is complete."""
    spans = boxed_spans(text, most=1)
    return text[slice(*spans[-1])].strip() if spans else None


def boxed_spans(text: str, most: int = 100) -> list[tuple[int, int]]:
    """Start and end of the content of the last boxes, ``most`` of them at most, in order; time linear in the text.

    Of nested boxes only the innermost counts.
    """
    found: list[tuple[int, int]] = []
    limit = len(text)
    for match in reversed([*_BOX.finditer(text)]):
        if len(found) == most:
            break
        span = _box_content(text, match.end(), limit)
        limit = match.start()
        if span is not None:
            found.append(span)
    return found[::-1]


def _box_content(text: str, start: int, limit: int) -> tuple[int, int] | None:
    """The span of a group in braces that begins at ``start``, or of a word without braces; it ends before ``limit``."""
    if text[start : start + 1] != "{":
        word = _WORD.match(text, start, limit)
        return word.span() if word else None
    depth = 0
    for brace in _BRACE.finditer(text, start, limit):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return start + 1, brace.start()
    return None
