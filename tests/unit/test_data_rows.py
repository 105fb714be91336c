"""From a row to a task: conversations in every spelling, placeholders, tools, media; and why a row is no task."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest

from relax_core.types import Audio, Image, Message, Task, Text, ToolCall, ToolResult, Video, message, system, user
from relax_envs.data.columns import Columns
from relax_envs.data.rows import TaskMaker, row_id, task_of
from relax_envs.data.values import RowError

GOOD = {"prompt": "two + two ?", "answer": "four"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with media; nobody decodes them here."""
    for name in ("a.png", "b.png", "c.wav", "d.mp4", "two words.png"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def messages(folder: Path, **row: Any) -> tuple[Message, ...]:
    return task_of({"answer": "x", **row}, folder, "1").messages


def reason(folder: Path, row: Any, columns: Columns | None = None) -> str:
    """Why a row is no task."""
    with pytest.raises(RowError) as error:
        TaskMaker(columns or Columns()).task(row, folder, "1")
    assert "\n" not in str(error.value)
    return str(error.value)


# --- prompts and conversations ------------------------------------------------------------------------------------


def test_prompt_and_messages(folder: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert messages(folder, prompt="Hi") == (user("Hi"),)
    assert messages(folder, prompt=said) == messages(folder, messages=said) == (system("Be brief."), user("Hi"))
    assert messages(folder, system="Be brief.", prompt="Hi") == (system("Be brief."), user("Hi"))
    assert messages(folder, prompt=[{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}]) == (
        user("Hi"),
    )


def test_sharegpt(folder: Path) -> None:
    said = [
        {"from": "system", "value": "Use tools."},
        {"from": "human", "value": "<image>Oslo ?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "It rains."},
        {"from": "user", "value": "and then ?"},
    ]
    expected = (
        system("Use tools."),
        user(Image(folder / "a.png"), "Oslo ?"),
        message("assistant", ToolCall("weather", {"city": "Oslo"})),
        message("tool", ToolResult((Text("rain"),))),
        message("assistant", "It rains."),
        user("and then ?"),
    )
    assert messages(folder, conversations=said, images=["a.png"]) == expected
    assert messages(folder, messages=said, image="a.png") == expected


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
@pytest.mark.parametrize("nested", [True, False])
def test_tool_calls_and_results(nested: bool, arguments: Any, folder: Path) -> None:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function} if nested else {"id": "c1", **function}
    said = [
        {"role": "user", "content": "Oslo ?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain <image>"},
        {"role": "assistant", "content": "Rain.", "tool_calls": []},
        {"role": "user", "content": "sure ?"},
    ]
    assert messages(folder, messages=said, images=["a.png"]) == (
        user("Oslo ?"),
        message("assistant", ToolCall("weather", {"city": "Oslo"}, "c1")),
        message("tool", ToolResult((Text("rain "), Image(folder / "a.png")), "c1")),
        message("assistant", "Rain."),
        user("sure ?"),
    )


def test_a_call_without_arguments_and_a_result_without_content(folder: Path) -> None:
    said = [
        {"role": "user", "content": "time ?"},
        {"role": "assistant", "content": "wait", "tool_calls": [{"function": {"name": "now", "arguments": None}}]},
        {"role": "tool", "content": ""},
    ]
    assert messages(folder, messages=said)[1:] == (
        message("assistant", "wait", ToolCall("now", {})),
        message("tool", ToolResult(())),
    )


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])])
def test_tools_are_kept(tools: Any, folder: Path) -> None:
    assert task_of({**GOOD, "tools": tools}, folder, "1").metadata == {"tools": [WEATHER]}
    flat = {"name": "weather", "parameters": {}}
    assert task_of({**GOOD, "tools": [flat]}, folder, "1").metadata == {"tools": [flat]}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ("[{]", "'tools' is not JSON (Expecting property name enclosed in double quotes): '[{]'"),
        ("weather", "'tools' is not JSON (Expecting value): 'weather'"),
        (WEATHER, "'tools' is an object; a list of objects, or its JSON text, is allowed"),
        (["weather"], "tool 1 is text; an object with 'name'"),
        ([WEATHER, {"function": {}}], "tool 2 is an object without a name"),
        ([WEATHER, {"name": ""}], "tool 2 is an object without a name"),
    ],
)
def test_tools_that_are_none(tools: Any, expected: str, folder: Path) -> None:
    assert reason(folder, {**GOOD, "tools": tools}).startswith(expected)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"function": {"name": "f", "arguments": '{"a": 1'}}, "'arguments' is not JSON (Expecting ',' delimiter)"),
        ({"function": {"name": "f", "arguments": ""}}, "'arguments' is not JSON (Expecting value): ''"),
        ({"function": {"name": "f", "arguments": '{"a": "x\ny"}'}}, "'arguments' is not JSON (Invalid control"),
        ({"function": {"name": "f", "arguments": "{}{}"}}, "'arguments' is not JSON (Extra data)"),
        ({"function": {"name": "f", "arguments": "[" * 100_000}}, "'arguments' is not JSON (nested too deeply"),
        ({"function": {"name": "f", "arguments": "3"}}, "'arguments' is a number; an object, or its JSON text"),
        ({"function": {"name": "f", "arguments": [1]}}, "'arguments' is a list"),
        ({"function": {"arguments": {}}}, "its 'name' is null; a tool's name is needed"),
        ({"function": {"name": ""}}, "its 'name' is empty"),
        ({"function": {"name": "f"}, "id": 3}, "'id' is a number; text is allowed"),
    ],
)
def test_tool_calls_that_are_none(call: Any, expected: str, folder: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = reason(folder, {"messages": said, "answer": "a"})
    assert found.startswith(f"message 2: tool call 1: {expected}")
    assert len(found) < 300


def test_last_reply(folder: Path) -> None:
    said = [{"role": "user", "content": "2 + 2 ?"}, {"role": "assistant", "content": "4"}]
    row = {"messages": said}

    def maker(rule: Any) -> TaskMaker:
        return TaskMaker(Columns(last_reply=rule))

    expected = "the last message is the assistant's: nothing is asked; put the right reply into 'answer', or set "
    assert reason(folder, {**row, "answer": "4"}) == expected + "columns.last_reply: answer (or drop)"
    assert maker("answer").task(row, folder, "1") == Task("1", (user("2 + 2 ?"),), "4")
    assert maker("drop").task({**row, "answer": "four"}, folder, "1") == Task("1", (user("2 + 2 ?"),), "four")
    assert "no 'answer'" in reason(folder, row, Columns(last_reply="drop"))
    assert "and there is an 'answer'" in reason(folder, {**row, "answer": "4"}, Columns(last_reply="answer"))
    assert "nothing is asked" in reason(folder, {"messages": said[1:]}, Columns(last_reply="answer"))
    calls = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    assert "not just text" in reason(folder, {"messages": [said[0], calls]}, Columns(last_reply="answer"))
    asked = {"messages": said[:1], "answer": "4"}
    assert maker("answer").task(asked, folder, "1") == maker("error").task(asked, folder, "1")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "?", "anser": "a"}, "no 'answer'; did you mean 'anser'? (need_answer: false allows it)"),
        ({"message": [], "answer": "a"}, "neither 'messages' nor 'prompt'; did you mean 'message'?: give one of them"),
        ({**GOOD, "messages": [{}]}, "both 'messages' and 'prompt': give one of them"),
        ({"messages": [], "answer": "a"}, "'messages' is empty; a list of messages is allowed"),
        ({"prompt": "", "answer": "a"}, "'prompt' is empty; a list of messages, or text, is allowed"),
        ({"prompt": None, "answer": "a"}, "'prompt' is null; a list of messages, or text, is allowed"),
        ({"messages": math.nan, "answer": "a"}, "'messages' is null; a list of messages is allowed"),
        ({"prompt": 3, "answer": "a"}, "'prompt' is a number; a list of messages is allowed"),
        ({"messages": "hi", "answer": "a"}, "'messages' is text; a list of messages is allowed"),
        ({"messages": ["hi"], "answer": "a"}, "message 1 is text; an object with 'role' and 'content' is allowed"),
        ({"messages": [{"role": "human", "content": "a"}]}, "message 1: role 'human'; allowed are system, user"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "message 1: role ['user']; allowed are system, user"),
        ({"messages": [{"from": "bot", "value": "a"}]}, "message 1: from 'bot'; allowed are human, user, gpt"),
        ({"messages": [{"from": "gpt", "value": None}]}, "message 1: 'value' is null; text is allowed"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1: 'content' is null; text or a list of parts"),
        ({"messages": [{"role": "user", "content": ""}]}, "message 1: 'content' is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "message 1: 'content' is empty"),
        ({"messages": [{"role": "user", "content": [3]}]}, "message 1: a part is a number; text or an object"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "message 1: unknown part of type 'smell'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1: 'text' of a part is null"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
            "message 1: 'tool_calls' cannot be used here; 'role', 'content' and 'name' are allowed",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
            "message 1: 'tool_call_id' cannot be used here",
        ),
        ({"prompt": "half \ud83d", "answer": "a"}, "'prompt': its text holds half of a surrogate pair"),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]},
            "'system' is given, and the messages have a system message of their own",
        ),
        ({**GOOD, "metadata": "m"}, "'metadata' is text; an object is allowed"),
        ({**GOOD, "system": 3}, "'system' is a number; text is allowed"),
        ({**GOOD, "prompt": "<image> ?"}, "1 <image> in the messages, but 0 in 'images'"),
        ({**GOOD, "images": ["a.png"]}, "0 <image> in the messages, but 1 in 'images'"),
        ({**GOOD, "prompt": "<image><image>", "images": ["a.png"]}, "2 <image> in the messages, but 1 in 'images'"),
        ({**GOOD, "prompt": "<audio>", "images": ["a.png"]}, "0 <image> in the messages, but 1 in 'images'"),
        ({**GOOD, "prompt": "<video>"}, "1 <video> in the messages, but 0 in 'videos'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "answer": "a"},
            "1 <image> in the messages, but 0 in 'images'",
        ),
    ],
)
def test_bad_rows_say_why(row: Any, expected: str, folder: Path) -> None:
    assert reason(folder, row).startswith(expected)


# --- what is missing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, math.nan, [], "", {}], ids=repr)
def test_null_nan_and_empty_are_missing(value: Any, folder: Path) -> None:
    names = ("images", "image", "audios", "videos", "metadata", "id", "system", "tools", "messages", "conversations")
    row = {**GOOD, **dict.fromkeys(names, value)}
    assert task_of(row, folder, "1") == Task("1", (user("two + two ?"),), "four")
    assert row_id(row, 7) == "7"
    assert reason(folder, {"prompt": "?", "answer": value}).startswith("no 'answer'")
    assert task_of({"prompt": "?", "answer": value}, folder, "1", need_answer=False).answer is None


@pytest.mark.parametrize("answer", ["four", 4, 0, 4.5, False, ["four", "4"], {"x": [1]}])
def test_answers_of_every_kind(answer: Any, folder: Path) -> None:
    found = task_of({"prompt": "?", "answer": answer}, folder, "1").answer
    assert found == answer and type(found) is type(answer)


def test_metadata_and_other_columns(folder: Path) -> None:
    row: dict[str, Any] = {
        **GOOD,
        "level": 1,
        "source": "s",
        "gone": None,
        "empty": "",
        "none": [],
        "metadata": {"level": 2},
    }
    assert task_of(row, folder, "1").metadata == {"level": 2, "source": "s", "empty": "", "none": []}


@pytest.mark.parametrize(("id", "expected"), [("x", "x"), (7, "7"), (7.0, "7"), (0, "0")])
def test_ids(id: Any, expected: str) -> None:
    assert row_id({"id": id}, 3) == expected


@pytest.mark.parametrize("id", [1.5, True, ["x"], {"x": 1}])
def test_ids_that_are_none(id: Any) -> None:
    with pytest.raises(RowError, match=r"^'id' is .*; text or a whole number is allowed$"):
        row_id({"id": id}, 3)


# --- media --------------------------------------------------------------------------------------------------------


def test_media_stand_where_the_placeholders_are(folder: Path) -> None:
    said = [
        {"role": "user", "content": "<image> and <audio>: what, "},
        {"role": "assistant", "content": "like <image> ?"},
        {"role": "user", "content": "in <video>, or <image> ?"},
    ]
    images = ["a.png", {"path": str(folder / "b.png")}, "two words.png"]
    assert messages(folder, messages=said, images=images, audios=["c.wav"], videos=[f"file://{folder}/d.mp4"]) == (
        user(Image(folder / "a.png"), " and ", Audio(folder / "c.wav"), ": what, "),
        message("assistant", "like ", Image(folder / "b.png"), " ?"),
        user("in ", Video(folder / "d.mp4"), ", or ", Image(folder / "two words.png"), " ?"),
    )


RAW = b"\x89PNG\x00\xff+/="
BASE64 = base64.b64encode(RAW).decode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.png", "a.png"),
        ("./a.png", "a.png"),
        ("{folder}/a.png", "a.png"),
        ("file://{folder}/a.png", "a.png"),
        ("file://localhost{folder}/a.png", "a.png"),
        ("FILE://{folder}/two%20words.png", "two words.png"),
        ("file://a.png", "a.png"),
        ({"path": "a.png"}, "a.png"),
        ({"url": "a.png"}, "a.png"),
        ({"bytes": None, "path": "a.png"}, "a.png"),
        ({"bytes": math.nan, "path": "a.png"}, "a.png"),
        ({"path": "a.png", "width": 3}, "a.png"),
        ({"image": "a.png"}, "a.png"),
        ({"image_url": {"url": "a.png"}}, "a.png"),
        (RAW, RAW),
        ({"bytes": RAW, "path": None}, RAW),
        ({"bytes": RAW, "path": "nowhere.png"}, RAW),
        ({"bytes": BASE64, "path": None}, RAW),
        ({"bytes": list(RAW)}, RAW),
        ({"data": BASE64, "format": "png"}, RAW),
        ({"base64": BASE64}, RAW),
        ({"bytes": f"{BASE64[:5]}\n{BASE64[5:]}\n"}, RAW),
        ({"type": "base64", "source": {"data": BASE64}}, RAW),
        (f"data:image/png;base64,{BASE64}", RAW),
        (f"DATA:image/png;charset=utf-8;name=a.png;BASE64,{BASE64}", RAW),
        (f"data:;base64,{BASE64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}", RAW),
        ("data:image/png,%89PNG%00%FF+/=", RAW),
        ({"url": f"data:image/png;base64,{BASE64}"}, RAW),
        ({"data": f"data:image/png;base64,{BASE64}"}, RAW),
    ],
    ids=lambda v: str(v)[:60],
)
def test_a_medium_in_every_spelling(value: Any, expected: Any, folder: Path) -> None:
    value = value.replace("{folder}", str(folder)) if isinstance(value, str) else value
    [found] = messages(folder, prompt="<image>", images=[value])
    assert found == user(Image(folder / expected if isinstance(expected, str) else expected))
    assert messages(folder, prompt="<image>", images=value) == (found,), "one medium instead of a list"
    assert messages(folder, prompt="<image>", image=value) == (found,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "image: a number; a path is allowed"),
        (None, "image 2: null; a path is allowed"),
        ("", "image 2: empty; a path is allowed"),
        (b"", "image 2: empty; a path is allowed"),
        ({}, "image 2: an object; a path is allowed"),
        ({"bytes": None, "path": None}, "image 2: an object with 'bytes', 'path'; 'path', 'url' or 'bytes' is needed"),
        ({"pth": "a.png"}, "image: an object with 'pth'; 'path', 'url' or 'bytes' is needed, and not null"),
        ({"path": "a.png", "url": "b.png"}, "image: both 'path' and 'url': give one of them"),
        ({"path": "a.png", "max_pixels": 99}, "image: 'max_pixels' of a row is not heeded"),
        ({"bytes": [1, 300]}, "image: a list that is not of bytes"),
        ({"bytes": 3}, "image: its bytes are a number"),
        ({"bytes": "§"}, "image: not base64"),
        (
            "http://x.org/a.png",
            "image http://x.org/a.png: an address; download it and give the path, or allow it by urls",
        ),
        ("s3://bucket/a.png", "image s3://bucket/a.png: an address; download it"),
        ("data:image/png;base64,#", "image: not base64"),
        ("data:image/png;base64,", "image: empty"),
        ("data:image/png,", "image: a data URI without content"),
        ("A" * 5000, "image "),
        ("a\x00b.png", "image "),
        (["a.png"], "image: a list; a path is allowed"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_a_medium_that_is_none(value: Any, expected: str, folder: Path) -> None:
    numbered = expected.startswith("image 2")
    images = ["a.png", value] if numbered else [value]
    found = reason(folder, {"prompt": "<image>" * len(images), "images": images, "answer": "a"})
    assert found.startswith(expected) and len(found) < 600


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    row = {"prompt": "<image>", "images": ["no.png"], "answer": "a"}
    assert reason(folder, row) == f"image {folder / 'no.png'}: no such file"
    row["images"] = ["."]
    assert reason(folder, row) == f"image {folder}: a folder, not a file"


def test_media_root(folder: Path, tmp_path: Path) -> None:
    row = {"prompt": "<image>", "images": ["a.png"], "answer": "a"}
    other = tmp_path / "other"
    assert TaskMaker(Columns(), media_root=folder).task(row, other, "1").messages == (user(Image(folder / "a.png")),)
    with pytest.raises(RowError, match=r"other/a\.png: no such file"):
        TaskMaker(Columns()).task(row, other, "1")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("text <image>", (Text("text "), Image(Path("a.png")))),
        ({"type": "text", "text": "see"}, (Text("see"),)),
        ({"type": "text", "text": "<image>see"}, (Image(Path("a.png")), Text("see"))),
        ({"type": "input_text", "text": "see"}, (Text("see"),)),
        ({"text": "see", "image": None}, (Text("see"),)),
        ({"type": "image"}, (Image(Path("a.png")),)),
        ({"type": "image", "image": None, "text": None}, (Image(Path("a.png")),)),
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}", "detail": "low"}},
            (Image(RAW),),
        ),
        ({"type": "image_url", "image_url": "b.png"}, (Image(Path("b.png")),)),
        ({"type": "input_image", "image_url": "b.png"}, (Image(Path("b.png")),)),
        ({"type": "image", "image": "b.png"}, (Image(Path("b.png")),)),
        ({"type": "image", "path": "b.png"}, (Image(Path("b.png")),)),
        ({"type": "image", "url": "b.png"}, (Image(Path("b.png")),)),
        ({"type": "image", "image": {"bytes": RAW, "path": None}}, (Image(RAW),)),
        ({"image": "b.png"}, (Image(Path("b.png")),)),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}, (Image(RAW),)),
        ({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, (Audio(RAW),)),
        ({"type": "audio_url", "audio_url": {"url": "c.wav"}}, (Audio(Path("c.wav")),)),
        ({"type": "audio", "audio": "c.wav"}, (Audio(Path("c.wav")),)),
        ({"type": "video_url", "video_url": {"url": "d.mp4"}}, (Video(Path("d.mp4")),)),
        ({"type": "video", "video": "d.mp4"}, (Video(Path("d.mp4")),)),
    ],
    ids=lambda v: str(v)[:60],
)
def test_parts_in_the_usual_spellings(part: Any, expected: tuple[Any, ...], folder: Path) -> None:
    wanted = tuple(
        type(p)(folder / p.source) if not isinstance(p, Text) and isinstance(p.source, Path) else p for p in expected
    )
    images = ["a.png"] if Image(folder / "a.png") in wanted else []
    [found] = messages(folder, messages=[{"role": "user", "content": [part]}], images=images)
    assert found.parts == wanted


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "video", "video": "d.mp4", "fps": 2.0}, "message 1: video: 'fps' of a row is not heeded"),
        ({"type": "video", "fps": 2.0}, "message 1: video: 'fps' of a row is not heeded"),
        ({"type": "video", "video": ["a.png", "b.png"]}, "message 1: video: a list; a path is allowed"),
        ({"type": "image", "image": "no.png"}, "message 1: image "),
        ({"image": "a.png", "text": "see"}, "message 1: a part with text and image: give each a part of its own"),
        ({"type": "text", "text": "see", "image": "a.png"}, "message 1: a part with text and image"),
        ({"type": "image", "text": "see"}, "message 1: a part of type 'image' with text"),
        ({"type": "text", "image": "a.png"}, "message 1: 'text' of a part is null"),
        ({"type": "image_url", "image_url": {}, "video_url": {"url": "d.mp4"}}, "message 1: image: "),
    ],
)
def test_parts_that_are_none(part: Any, expected: str, folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": [part]}], "videos": [], "answer": "a"}
    assert reason(folder, row).startswith(expected)
