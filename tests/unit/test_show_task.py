"""A task in lines: roles, text, media, tool calls, answer and metadata, whatever is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.show_task import WIDTH, describe_task
from relax_core.types import (
    Audio,
    Decoded,
    Image,
    Task,
    Text,
    ToolCall,
    ToolResult,
    Video,
    message,
    system,
    user,
)


def test_a_line_for_each_message() -> None:
    task = Task(
        "1",
        (
            system("Be brief."),
            user("what digit ? ", Image(Path("images/7.png")), " and ", Audio(b"x" * 35_400), Video(b"x" * 2_500_000)),
            message("assistant", "wait", ToolCall("weather", {"city": "Zürich"}, "c1")),
            message("tool", ToolResult((Text("rain "), Image(b"xy")), "c1")),
        ),
        "7",
        {"source": "s", "level": 3},
    )
    assert describe_task(task) == [
        "system: Be brief.",
        "user: what digit ? <image: 7.png> and <audio: 35 kB><video: 2.5 MB>",
        'assistant: wait<call c1: weather({"city": "Zürich"})>',
        "tool: <result c1: rain <image: 2 bytes>>",
        "answer: '7'",
        "metadata: source, level",
    ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(None, "None"), (4.5, "4.5"), (["a", 1], '["a", 1]'), ({"x": "é"}, '{"x": "é"}'), ({"x": b"y"}, "{'x': b'y'}")],
)
def test_answers(answer: Any, expected: str) -> None:
    assert describe_task(Task("1", (user("?"),), answer)) == ["user: ?", f"answer: {expected}"]


def test_decoded_media() -> None:
    task = Task("1", (user(Image(Decoded("image", np.zeros((2, 3, 3), np.uint8)))),))
    assert describe_task(task)[0] == "user: <image: 2 x 3 x 3 decoded>"


def test_every_line_is_one_line() -> None:
    odd = "a\nb\r\tc\x1b[31m\x00\x85\u2028 half \ud83d whole 😀"
    call = ToolCall(odd, {odd: odd}, odd)
    task = Task("1", (user(odd, Image(Path(odd))), message("assistant", call)), [odd], {odd: 1})
    for line in describe_task(task):
        assert len(line.splitlines()) == 1 and "\x1b" not in line and "\x00" not in line
        assert line.encode().decode() == line
    assert describe_task(task)[0].startswith(r"user: a\nb\r\tc\x1b[31m\x00\x85\u2028 half \ud83d whole 😀")


def test_long_text_is_shortened_in_its_middle() -> None:
    text = "begin" + "x" * 100_000 + "end"
    task = Task("1", (user(text), user(text, Image(Path("a.png")), text)), text, {"k" * 10_000: 1})
    first, second, answer, metadata = describe_task(task)
    assert first.startswith("user: beginxxx") and first.endswith("xxxend") and " 99,609 characters ..." in first
    assert second.count("begin") == 2 and "<image: a.png>" in second
    assert all(len(line) < WIDTH + 150 for line in (first, second, answer, metadata))


def test_sizes() -> None:
    sizes = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 9999: "10.0 kB", 35_000: "35 kB", 1_000_000: "1.0 MB"}
    for size, expected in sizes.items():
        assert describe_task(Task("1", (user(Audio(bytes(size))),)))[0] == f"user: <audio: {expected}>"
