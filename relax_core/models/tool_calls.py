"""Tool calls in the text of a reply: what may be run, and for every other call what to tell the model.

A call is run exactly as written or not at all: nothing here mends JSON, and no call gets arguments that it did not
state.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from relax_core.types import CallError, ToolCall

MOST_CALLS = 64
"""Calls of one reply that are read."""
MOST_DEPTH = 64
"""Objects and lists inside each other in one call."""


@dataclass(frozen=True, slots=True)
class Found:
    """A call, and where it is in the text, its tags included."""

    call: ToolCall | CallError
    start: int
    end: int


class ToolCallParser(ABC):
    """Reads the calls of one format of reply."""

    @abstractmethod
    def find(self, text: str) -> list[Found]:
        """The calls of a reply, in order; those made in its reasoning do not count. Raises nothing, whatever it says.

        Whether a tool of that name exists, and takes these arguments, is the caller's to check.
        """

    def parse(self, text: str) -> list[ToolCall | CallError]:
        """The calls alone."""
        return [found.call for found in self.find(text)]


def without_calls(text: str, calls: Sequence[Found]) -> str:
    """The text of a reply without the calls that can be run; what cannot stays in it."""
    pieces, place = [], 0
    for found in calls:
        if isinstance(found.call, ToolCall):
            pieces.append(text[place : found.start])
            place = found.end
    return "".join([*pieces, text[place:]]).strip() if pieces else text


class HermesParser(ToolCallParser):
    """``<tool_call>{"name": "zoom", "arguments": {"x": 3}}</tool_call>``, once for each call: Hermes, Qwen2.5, Qwen3.

    ``arguments`` may be the text of an object instead, as in OpenAI's messages.
    """

    def find(self, text: str) -> list[Found]:
        found: list[Found] = []
        place = 0
        while tag := _TAG.search(text, place):
            place = tag.end()
            if tag[0] == "<think>":
                closed = text.find("</think>", place)
                if closed < 0:
                    break
                place = closed + len("</think>")
            elif tag[0] == "</think>":  # the template opened it: all of this was reasoning
                found.clear()
            elif len(found) == MOST_CALLS:
                error = CallError(f"More than {MOST_CALLS} tool calls in one reply: the others were not run.")
                found.append(Found(error, tag.start(), len(text)))
                break
            elif tag[0] == "</tool_call>":
                found.append(Found(_error(len(found) + 1, "its opening tag is missing"), *tag.span()))
            else:
                call, place = _call(text, place, len(found) + 1)
                found.append(Found(call, tag.start(), place))
        return found


# --- one call ---------------------------------------------------------------------------------------------------------

_TAG = re.compile(r"</?(?:think|tool_call)>")
_BORDER = re.compile(r"</?tool_call>")
_SPACE = re.compile(r"\s*+")
_LEXEME = re.compile(r'"[^"\\]*+(?:\\(?:.|\Z)[^"\\]*+)*+(?:"|\Z)|[\[\]{}]|</?tool_call>', re.DOTALL)


class _Refused(ValueError):
    """JSON that Python would read, and that cannot be run as written."""


def _call(text: str, start: int, number: int) -> tuple[ToolCall | CallError, int]:
    """The ``number``-th call, whose content begins at ``start``, and where to go on behind it."""
    start = read = _space(text, start)
    try:
        _check_depth(text, start)
        value, read = _DECODER.raw_decode(text, start)
        read = _space(text, read)
        if not text.startswith("</tool_call>", read):
            _refuse_rest(text, read)
        return _tool_call(value), read + len("</tool_call>")
    except (ValueError, RecursionError) as error:
        border = _BORDER.search(text, read)  # not from the start: a string of the object may hold such a tag
        end = border.start() if border else len(text)
        content = text[start:end].rstrip()
        closing = border is not None and border[0] == "</tool_call>"
        return _error(number, _reason(error, start + len(content), not content)), end + len("</tool_call>") * closing


def _tool_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise _Refused("it is not an object")
    if value.keys() != {"name", "arguments"}:
        missing = " and ".join(f'"{key}"' for key in ("name", "arguments") if key not in value)
        raise _Refused(f"{missing} is missing" if missing else 'it has other keys than "name" and "arguments"')
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        raise _Refused('"name" is not the name of a tool')
    if isinstance(arguments, str):
        arguments = _from_text(arguments)
    if not isinstance(arguments, dict):
        raise _Refused('"arguments" is not an object; a tool that needs none takes {}')
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _Refused("it holds half of a surrogate pair, which is no character") from error
    return ToolCall(name, arguments)


def _from_text(text: str) -> Any:
    try:
        _check_depth(text, _space(text, 0))
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        content = text.rstrip()
        raise _Refused(f'"arguments" is text, and in it {_reason(error, len(content), not content)}') from error


def _check_depth(text: str, start: int) -> None:
    """Before anything is decoded, since the decoder calls itself for each level."""
    depth = 0
    for lexeme in _LEXEME.finditer(text, start):
        if lexeme[0] in "{[":
            depth += 1
        elif lexeme[0] in "}]":
            depth -= 1
        if depth > MOST_DEPTH:
            raise _Refused(f"it is nested more than {MOST_DEPTH} deep")
        if depth <= 0 or lexeme[0][0] == "<":
            return


def _refuse_rest(text: str, end: int) -> NoReturn:
    """Something stands between the object and the closing tag."""
    border = _BORDER.search(text, end)
    if border is None or border[0] == "<tool_call>" or border.start() == end:
        raise _Refused("its closing tag is missing")
    if text[end] in "{[":
        raise _Refused("it holds more than one object; each call needs tags of its own")
    raise _Refused("there is more than the object between the tags")


# --- JSON -------------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Refused("a key is given twice in one object")
    return found


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused("a number is too large")
    return number


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:  # Python reads no more than some thousand digits
        raise _Refused("a number is too large") from error


def _constant(text: str) -> NoReturn:
    raise _Refused(f"{text} is not a number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_constant)


def _space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _reason(error: ValueError | RecursionError, end: int, empty: bool) -> str:
    """What is wrong with JSON that should end before ``end``."""
    if empty:
        return "there is nothing to read"
    if isinstance(error, RecursionError):
        return f"it is nested more than {MOST_DEPTH} deep"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if error.pos >= end or error.msg.startswith("Unterminated string"):
        return "the JSON is not complete"
    if error.msg.startswith("Invalid control character"):
        return "a string holds a raw line break, tab or other control character, which JSON writes as \\n, \\t ..."
    return f"it is not valid JSON ({error.msg})"


def _error(number: int, reason: str) -> CallError:
    return CallError(
        f"Tool call {number} was not run: {reason}. Write each call as one JSON object with two keys, "
        '"name" and "arguments" (an object), between the tags of a call.'
    )
