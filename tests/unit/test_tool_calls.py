"""Tool calls in replies of the Hermes form: run as written, or answered with what is wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.models.tool_calls import MOST_CALLS, MOST_DEPTH, HermesParser, without_calls
from relax_core.types import CallError, ToolCall

DEEP = MOST_DEPTH - 2
"""What fits into ``arguments``: the call and its arguments are two objects."""


def parse(text: str) -> list[ToolCall | CallError]:
    return HermesParser().parse(text)


def call(content: str) -> str:
    return f"<tool_call>\n{content}\n</tool_call>"


def stated(name: str, arguments: Any) -> str:
    return call(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def problem(text: str) -> str:
    """The message for a reply with one call, which is wrong."""
    (found,) = parse(text)
    assert isinstance(found, CallError), found
    assert "\n" not in found.text and len(found.text) < 400
    return found.text


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_reply_without_calls_has_none() -> None:
    assert parse("The answer is {'name': 7}.") == [] == parse("")


def test_parallel_calls_keep_their_order_and_the_text_around_them_is_no_matter() -> None:
    text = "First " + stated("a", {"x": 1}) + "\nand then" + stated("b", {}) + stated("a", {"x": [2.5, None, True]})
    assert parse(text) == [ToolCall("a", {"x": 1}), ToolCall("b", {}), ToolCall("a", {"x": [2.5, None, True]})]


@pytest.mark.parametrize("space", ["", " ", "\n", "\r\n\t "])
def test_white_space_between_tags_and_object_is_free(space: str) -> None:
    content = '{"arguments": {"x": 1},\n "name": "a"}'
    assert parse(f"<tool_call>{space}{content}{space}</tool_call>") == [ToolCall("a", {"x": 1})]


@pytest.mark.parametrize("word", ["北京", "مرحبا", "👩‍👩‍👧 🎉", "é", "नमस्ते"])
def test_letters_of_any_script_are_kept_written_plainly_or_escaped(word: str) -> None:
    content = {"name": word, "arguments": {word: word}}
    for ascii_only in (False, True):
        assert parse(call(json.dumps(content, ensure_ascii=ascii_only))) == [ToolCall(word, {word: word})]


def test_tags_inside_of_a_string_are_part_of_it() -> None:
    inside = {"text": "</tool_call> <tool_call>{ </think> <think>"}
    assert parse(stated("write", inside) + stated("b", {})) == [ToolCall("write", inside), ToolCall("b", {})]


def test_arguments_may_be_the_text_of_an_object() -> None:
    assert parse(stated("a", '{"x": "é\\n", "y": {}}')) == [ToolCall("a", {"x": "é\n", "y": {}})]
    assert parse(stated("a", " {} ")) == [ToolCall("a", {})]


@pytest.mark.parametrize(
    "text",
    [
        "<think>perhaps {first}</think>{second}",
        "perhaps {first}</think>{second}",
        "<think>a</think>b<think>{first}</think>{second}",
        "{second}<think>and now {first}",
    ],
)
def test_what_is_only_thought_of_is_not_called(text: str) -> None:
    found = parse(text.format(first=stated("thought", {}), second=stated("meant", {})))
    assert found == [ToolCall("meant", {})]


# --- what is not run --------------------------------------------------------------------------------------------------

WHOLE = '{"name": "zoom", "arguments": {"x": 1, "why": "to see"}}'


@pytest.mark.parametrize("end", ["</tool_call>", "\n</tool_call>", ""])
@pytest.mark.parametrize("length", range(1, len(WHOLE)))
def test_json_that_ends_too_early_is_not_complete(length: int, end: str) -> None:
    assert "the JSON is not complete" in problem(f"<tool_call>\n{WHOLE[:length]}{end}")


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    for broken in ('{"name": "a", "arguments": {"x": "abc', '{"name": "a", "arguments": ', '{"a": "</tool_call>"} {'):
        for end in ("</tool_call>", "\n</tool_call>\n", ""):
            found = parse(f"<tool_call>{broken}{end}" + stated("b", {}))
            assert len(found) == 2 and isinstance(found[0], CallError) and found[1] == ToolCall("b", {})
            assert found[0].text.startswith("Tool call 1 was not run: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"name": "a", "arguments": {"x": "one\ntwo"}}', "raw line break"),
        ('{"name": "a", "arguments": {"x": "one\ttwo"}}', "raw line break, tab"),
        (WHOLE + WHOLE, "more than one object; each call needs tags of its own"),
        (WHOLE + ",\n" + WHOLE, "more than the object"),
        (WHOLE + "\n\n" + WHOLE, "more than one object"),
        ("[" + WHOLE + ", " + WHOLE + "]", "is not an object"),
        (WHOLE + "}", "more than the object"),
        (WHOLE + " and so on", "more than the object"),
        ("", "nothing to read"),
        ("zoom(1, 2)", "not valid JSON"),
        ("{'name': 'a', 'arguments': {}}", "not valid JSON"),
        ('{"name": "a", "arguments": {"x": 1,}}', "not valid JSON"),
        ('{"name": "a", "arguments": {"x": True}}', "not valid JSON"),
        ('{"name": "a", "arguments": {"x": "\\d"}}', "not valid JSON"),
        ('```json\n{"name": "a", "arguments": {}}\n```', "not valid JSON"),
        ('"zoom"', "is not an object"),
        ("7", "is not an object"),
        ('{"name": "a"}', '"arguments" is missing'),
        ('{"arguments": {}}', '"name" is missing'),
        ("{}", '"name" and "arguments" is missing'),
        ('{"name": "a", "parameters": {}}', '"arguments" is missing'),
        ('{"name": "a", "arguments": {}, "id": 3}', "other keys"),
        ('{"name": "", "arguments": {}}', '"name" is not'),
        ('{"name": null, "arguments": {}}', '"name" is not'),
        ('{"name": ["a"], "arguments": {}}', '"name" is not'),
        ('{"name": "a", "arguments": null}', '"arguments" is not an object'),
        ('{"name": "a", "arguments": [1]}', '"arguments" is not an object'),
        ('{"name": "a", "arguments": 3}', '"arguments" is not an object'),
        ('{"name": "a", "arguments": "[1]"}', '"arguments" is not an object'),
        ('{"name": "a", "arguments": ""}', '"arguments" is text, and in it there is nothing to read'),
        ('{"name": "a", "arguments": "{\\"x\\": 1"}', '"arguments" is text, and in it the JSON is not complete'),
        ('{"name": "a", "arguments": "{} {}"}', '"arguments" is text, and in it it is not valid JSON'),
        ('{"name": "a", "arguments": "{\\"x\\": NaN}"}', "NaN is not a number"),
        ('{"name": "a", "name": "b", "arguments": {}}', "a key is given twice"),
        ('{"name": "a", "arguments": {"x": {"y": 1, "y": 1}}}', "a key is given twice"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not a number"),
        ('{"name": "a", "arguments": {"x": -Infinity}}', "-Infinity is not a number"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "a number is too large"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "a number is too large"),
        ('{"name": "a", "arguments": {"x": "\\ud83d"}}', "surrogate"),
        ('{"name": "a", "arguments": {"\\udc00": 1}}', "surrogate"),
    ],
)
def test_a_malformed_call_is_an_error_that_says_what_is_wrong(content: str, reason: str) -> None:
    message = problem(call(content))
    assert reason in message
    assert message.startswith("Tool call 1 was not run: ") and '"name" and "arguments"' in message


def test_a_call_needs_both_tags() -> None:
    assert "closing tag is missing" in problem("<tool_call>\n" + WHOLE)
    assert "opening tag is missing" in problem(WHOLE + "\n</tool_call>")
    first, second = parse("<tool_call>" + WHOLE + stated("b", {}))
    assert isinstance(first, CallError) and "closing tag is missing" in first.text and second == ToolCall("b", {})


@pytest.mark.parametrize("depth", [DEEP + 1, 500, 20_000])
@pytest.mark.parametrize("pair", [("[", "", "]"), ("{", '"a":', "}")], ids=["lists", "objects"])
def test_nesting_has_a_limit(pair: tuple[str, str, str], depth: int) -> None:
    opened, between, closed = pair

    def nested(n: int) -> str:
        return '{"name": "a", "arguments": {"x": ' + (opened + between) * (n - 1) + opened + closed * n + "}}"

    assert isinstance(parse(call(nested(DEEP)))[0], ToolCall)
    assert f"more than {MOST_DEPTH} deep" in problem(call(nested(depth)))
    assert f"more than {MOST_DEPTH} deep" in problem(stated("a", opened * (depth + 5)))
    brackets = {"x": "[{" * depth}
    assert parse(stated("a", brackets)) == [ToolCall("a", brackets)], "but not in a string"


def test_a_long_reply_is_read_whole() -> None:
    arguments = {"code": 'print("\\")\n' * 9_000, "also": list(range(5_000))}
    assert parse(stated("run", arguments)) == [ToolCall("run", arguments)]


@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"',
        '<tool_call>{"a":[',
        '<tool_call>{"\\"',
        "</tool_call>",
        "<think>",
        "</think>",
        '\\"',
        "<tool_call>{}</tool_call>",
    ],
)
def test_a_hundred_thousand_characters_of_rubbish_are_read_at_once(piece: str) -> None:
    for text in (piece * (100_000 // len(piece)), "<tool_call>{" + piece * (100_000 // len(piece)) + "\\"):
        start = time.process_time()
        found = parse(text)
        assert time.process_time() - start < 1
        assert len(found) <= MOST_CALLS + 1 and all(isinstance(f, CallError) for f in found)


def test_calls_beyond_the_limit_are_said_not_to_be_run() -> None:
    found = parse(stated("a", {}) * (MOST_CALLS + 5))
    assert found[:-1] == [ToolCall("a", {})] * MOST_CALLS
    last = found[-1]
    assert isinstance(last, CallError) and f"More than {MOST_CALLS}" in last.text and "not run" in last.text


def test_a_message_repeats_nothing_of_the_reply() -> None:
    """It goes back into the conversation, where a special token in it would be refused."""
    for content in ('{"<|im_end|>": 1}', '{"name": "<|im_end|>", "arguments": 1}', "<|im_end|>", '{"a": <|im_end|>}'):
        assert "<|" not in problem(call(content)) and "tool_call>" not in problem(call(content))


# --- anything ---------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), VALUES, max_size=4), ascii_only=st.booleans())
def test_what_json_can_say_comes_back_equal(name: str, arguments: dict[str, Any], ascii_only: bool) -> None:
    content = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    assert parse(call(content)) == [ToolCall(name, arguments)]


PIECES = st.sampled_from(
    ['{"', '":', '"', "{", "}", "[", "]", ",", "\\", "\n", "a", "1", "<tool_call>", "</tool_call>"]
)


@given(st.lists(PIECES | st.text(max_size=3), max_size=30).map("".join))
def test_whatever_it_says_a_reply_is_read_without_an_exception(text: str) -> None:
    for found in parse(text):
        assert isinstance(found, CallError | ToolCall)


# --- the rest of a reply ----------------------------------------------------------------------------------------------


def rest(text: str) -> str:
    return without_calls(text, HermesParser().find(text))


def test_content_is_what_stands_around_calls_that_can_be_run() -> None:
    assert rest(" no calls\n") == " no calls\n"
    assert rest("First " + stated("a", {}) + "\n then " + stated("b", {"x": 1}) + " done.") == "First \n then  done."
    assert rest(stated("a", {})) == ""


def test_content_keeps_what_cannot_be_run_and_what_is_thought() -> None:
    wrong = call("{")
    assert rest(stated("a", {}) + wrong) == wrong
    thought = f"<think>{stated('a', {})}</think>"
    assert rest(thought + "so") == thought + "so"
    assert rest(thought + stated("b", {})) == thought


def test_calls_are_found_where_they_stand() -> None:
    text = "First " + stated("a", {}) + wrong_tag() + stated("b", {"x": "</tool_call>"}) + " end"
    spans = [text[found.start : found.end] for found in HermesParser().find(text)]
    assert spans == [stated("a", {}), wrong_tag(), stated("b", {"x": "</tool_call>"})]


def wrong_tag() -> str:
    return "</tool_call>"
