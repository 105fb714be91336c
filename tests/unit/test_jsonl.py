"""The single_turn environment over JSONL files: good rows, bad rows, splits, and one-line errors."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from pydantic import ValidationError

from relax_core.errors import ConfigError, DataError
from relax_core.media import MediaStore
from relax_core.types import Audio, Image, Message, Task, Text, Video, content_hash, system, user
from relax_envs.single_turn import SingleTurn, Split

GOOD = {"prompt": "two + two ?", "answer": "four"}


def write(path: Path, *rows: Any) -> Path:
    """Rows as JSON, or as they are where they are text or bytes."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return path


def environment(path: Path, **settings: Any) -> SingleTurn:
    return SingleTurn(SingleTurn.Config(data=path, **settings))


def only(folder: Path, row: Any, **settings: Any) -> Task:
    """The task of a file of one row."""
    [task] = environment(write(folder / "data.jsonl", row), **settings).tasks("train")
    return task


def reason(folder: Path, row: Any, **settings: Any) -> str:
    """Why a row is left out of a file whose other row is good."""
    found = environment(write(folder / "data.jsonl", row, GOOD), max_bad_fraction=0.5, **settings)
    assert len(found.tasks("train")) == 1
    [line] = found.bad_rows
    assert "\n" not in line
    return line.removeprefix(f"{folder / 'data.jsonl'}:1: ")


def png(folder: Path, name: str, grey: int = 0) -> Path:
    Pillow.new("L", (4, 4), grey).save(folder / name)
    return folder / name


# --- good rows ----------------------------------------------------------------------------------------------------


def test_prompt_and_messages(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl",
        GOOD,
        {
            "id": "b",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "answer": 3,
        },
        {
            "id": 7,
            "prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}],
            "answer": ["x"],
        },
    )
    tasks = environment(path).tasks("train")
    assert list(tasks) == [
        Task("1", (user("two + two ?"),), "four"),
        Task("b", (system("Be brief."), user("Hi")), 3),
        Task("7", (user("Hi"),), ["x"]),
    ]
    assert tasks[-1] == tasks[2] and tasks[1:] == [tasks[1], tasks[2]]
    with pytest.raises(IndexError):
        tasks[3]


def test_media_stand_where_the_placeholders_are(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.wav", "d.mp4"):
        (tmp_path / name).write_bytes(b"x")
    row = {
        "messages": [
            {"role": "user", "content": "<image> and <audio>: what, "},
            {"role": "user", "content": "in <video>, or <image> ?"},
        ],
        "images": ["a.png", {"path": str(tmp_path / "b.png")}],
        "audios": ["c.wav"],
        "videos": [f"file://{tmp_path}/d.mp4"],
        "answer": "x",
    }
    assert only(tmp_path, row).messages == (
        user(Image(tmp_path / "a.png"), " and ", Audio(tmp_path / "c.wav"), ": what, "),
        user("in ", Video(tmp_path / "d.mp4"), ", or ", Image(tmp_path / "b.png"), " ?"),
    )


def test_parts_in_the_usual_spellings(tmp_path: Path) -> None:
    path = png(tmp_path, "a.png")
    data = base64.b64encode(path.read_bytes()).decode()
    content = [
        {"type": "text", "text": "see"},
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
    ]
    task = only(tmp_path, {"messages": [{"role": "user", "content": content}], "images": ["a.png"], "answer": "x"})
    raw = path.read_bytes()
    expected = (Text("see"), Image(path), Image(raw), Audio(raw), Image(path), Image(path))
    assert task.messages == (Message("user", expected),)


@pytest.mark.parametrize("value", [None, math.nan, []])
def test_null_nan_and_empty_are_missing(value: Any, tmp_path: Path) -> None:
    row = {**GOOD, "images": value, "audios": value, "videos": value, "metadata": value or None, "id": value or None}
    assert only(tmp_path, row) == Task("1", (user("two + two ?"),), "four")
    assert reason(tmp_path, {"prompt": "?", "answer": value or None}).startswith("no 'answer'")


def test_nan_written_as_json_does(tmp_path: Path) -> None:
    task = only(tmp_path, '{"prompt": "?", "answer": "a", "metadata": NaN, "images": NaN, "id": NaN}')
    assert task == Task("1", (user("?"),), "a")


def test_metadata_and_other_keys(tmp_path: Path) -> None:
    assert only(tmp_path, {**GOOD, "level": 1, "source": "s", "metadata": {"level": 2}}).metadata == {
        "level": 2,
        "source": "s",
    }


def test_bom_windows_line_ends_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n   \r\n" + row + b"\r\n\r\n" + row)
    found = environment(path)
    assert [task.id for task in found.tasks("train")] == ["1", "4", "6"]
    assert {task.messages for task in found.tasks("train")} == {(user("two + two ?"),)}
    assert list(found.bad_rows) == []


def test_letters_of_every_script(tmp_path: Path) -> None:
    text = "数字 رقم 🦉"
    for escaped in (True, False):
        row = json.dumps({"prompt": text, "answer": text}, ensure_ascii=escaped)
        assert only(tmp_path, row) == Task("1", (user(text),), text)


def test_an_answer_may_be_optional(tmp_path: Path) -> None:
    assert only(tmp_path, {"prompt": "?"}, need_answer=False).answer is None


def test_one_row_is_parsed_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *[{"prompt": f"{i} ?", "answer": str(i)} for i in range(200)])
    tasks = environment(path).tasks("train")
    assert len(tasks) == 200
    assert [tasks[i].answer for i in (199, 0, 57)] == ["199", "0", "57"]
    path.write_bytes(path.read_bytes().replace(b'"57 ?"', b'["57"]'))
    assert tasks[58].answer == "58"
    with pytest.raises(DataError, match=r"data\.jsonl:58: .* the file has changed"):
        tasks[57]


# --- bad rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"prompt": "?", "answer": "a",}', "not JSON: "),
        ("{'prompt': 1}", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8 (byte 13 of the line)"),
        ([GOOD], "a JSON list, not an object: a JSON array in one line? write one object a line"),
        ("3", "a JSON int, not an object"),
        ({"prompt": "?", "anser": "a"}, "no 'answer'; did you mean 'anser'?"),
        ({"message": [], "answer": "a"}, "neither 'messages' nor 'prompt'; did you mean 'message'?: give one of them"),
        ({**GOOD, "messages": []}, "both 'messages' and 'prompt': give one of them"),
        ({"messages": [], "answer": "a"}, "'messages' is empty; a list of messages is allowed"),
        ({"messages": "hi", "answer": "a"}, "'messages' is text; a list of messages is allowed"),
        ({"messages": ["hi"], "answer": "a"}, "message 1 is text; an object with 'role' and 'content' is allowed"),
        ({"messages": [{"role": "human", "content": "a"}]}, "message 1: role 'human'; allowed are system, user"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1: 'content' is null; text or a list of parts"),
        ({"messages": [{"role": "user", "content": ""}]}, "message 1: 'content' is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "message 1: unknown part of type 'smell'"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
            "message 1: 'tool_calls' cannot be used here; 'role' and 'content' are allowed",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "b"},
            "the last message is the assistant's: nothing is asked",
        ),
        ({**GOOD, "metadata": "m"}, "'metadata' is text; an object is allowed"),
        ({**GOOD, "id": 1.5}, "'id' is 1.5; text or a whole number is allowed"),
        ({**GOOD, "prompt": "<image> ?"}, "1 <image> in the messages, but 0 in 'images'"),
        ({**GOOD, "images": ["a.png"]}, "0 <image> in the messages, but 1 in 'images'"),
        ({**GOOD, "prompt": "<image><image>", "images": ["a.png"]}, "2 <image> in the messages, but 1 in 'images'"),
        ({**GOOD, "prompt": "<audio>", "images": ["a.png"]}, "0 <image> in the messages, but 1 in 'images'"),
        ({**GOOD, "images": "a.png"}, "'images' is text; a list of paths is allowed"),
        ({**GOOD, "images": [3]}, "image: a number; a path is allowed"),
        ({**GOOD, "images": ["http://x.org/a.png"]}, "image http://x.org/a.png: an address; download it"),
        ({**GOOD, "images": ["data:image/png;base64,#"]}, "media: not base64"),
    ],
)
def test_bad_rows_say_why(row: Any, expected: str, tmp_path: Path) -> None:
    png(tmp_path, "a.png")
    assert reason(tmp_path, row).startswith(expected)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    row = {"prompt": "<image>", "images": ["no.png"], "answer": "a"}
    assert reason(tmp_path, row) == f"image {tmp_path / 'no.png'}: no such file"


def test_bad_rows_are_skipped_up_to_the_fraction(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *[GOOD] * 9, "oops")
    found = environment(path)
    assert [task.id for task in found.tasks("train")] == [str(i) for i in range(1, 10)]
    assert len(found.bad_rows) == 1 and found.bad_rows[0].startswith(f"{path}:10: not JSON")
    with pytest.raises(
        DataError, match=r"data\.jsonl:10: not JSON.*: 1 of 10 rows are bad, max_bad_fraction allows 0:"
    ):
        environment(path, max_bad_fraction=0.0).tasks("train")


def test_more_bad_rows_than_allowed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *[GOOD] * 8, "oops", "oops")
    with pytest.raises(
        DataError, match=r":9: not JSON.*\(and 1 more\): 2 of 10 rows are bad, max_bad_fraction allows 0\.1"
    ):
        environment(path).tasks("train")
    with pytest.raises(DataError, match="1 of 1 rows are bad"):
        environment(write(tmp_path / "one.jsonl", "oops"), max_bad_fraction=0.99).tasks("train")


def test_unreadable_images_are_found_by_decoding(tmp_path: Path) -> None:
    from relax_modalities.image import Image as ImageModality

    png(tmp_path, "a.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    rows = [{"prompt": "<image>", "images": [name], "answer": "a"} for name in ["a.png"] * 9 + ["broken.png"]]
    path = write(tmp_path / "data.jsonl", *rows)
    media = MediaStore({"image": ImageModality(ImageModality.Config())}, 10**6)
    found = environment(path)
    before = found.tasks("train")
    assert len(before) == 10, "files are not opened until somebody asks"
    found.verify(media.decode)
    found.verify(media.decode)
    assert len(found.tasks("train")) == 9
    [line] = found.bad_rows
    assert line.startswith(f"{path}:10: image {tmp_path / 'broken.png'}: ") and "\n" not in line
    with pytest.raises(DataError, match=r"data\.jsonl:10: image .*broken\.png: .* 1 of 10 rows are bad"):
        environment(path, max_bad_fraction=0.0).verify(media.decode)


# --- files and splits ----------------------------------------------------------------------------------------------


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file .*: check the path"):
        environment(tmp_path / "nowhere.jsonl").tasks("train")
    with pytest.raises(DataError, match="Is a directory"):
        environment(tmp_path).tasks("train")
    for content in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"empty\.jsonl: the data set is empty: write one JSON object a line"):
            environment(tmp_path / "empty.jsonl").tasks("train")


def test_duplicate_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {**GOOD, "id": "x"}, GOOD, {**GOOD, "id": "x"})
    with pytest.raises(DataError, match=r"data\.jsonl:3: id 'x' was already used at .*data\.jsonl:1: make it unique"):
        environment(path).tasks("train")


def test_eval_data(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", GOOD, GOOD)
    held = write(tmp_path / "eval.jsonl", {**GOOD, "prompt": "other ?"}, *[GOOD] * 18, "oops")
    found = environment(train, eval_data=held)
    assert [task.id for task in found.tasks("train")] == ["1", "2"]
    assert [task.id for task in found.tasks("eval")][:2] == ["eval-1", "eval-2"]
    assert found.tasks("eval")[0].messages == (user("other ?"),)
    assert [line.rpartition("/")[2].split(": ")[0] for line in found.bad_rows] == ["eval.jsonl:20"]


def test_split_is_by_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 250} ?", "answer": str(i)} for i in range(500)]  # every prompt twice
    found = environment(write(tmp_path / "a.jsonl", *rows), split=Split(eval=0.2))
    train, held = found.tasks("train"), found.tasks("eval")
    assert len(train) + len(held) == 500 and 60 <= len(held) <= 140
    held_hashes = {content_hash(task) for task in held}
    assert not held_hashes & {content_hash(task) for task in train}
    backwards = environment(write(tmp_path / "b.jsonl", *rows[::-1]), split=Split(eval=0.2))
    assert {content_hash(task) for task in backwards.tasks("eval")} == held_hashes
    more = environment(write(tmp_path / "c.jsonl", *rows), split=Split(eval=0.4))
    assert {content_hash(task) for task in more.tasks("eval")} > held_hashes, "a larger share only adds"


def test_split_looks_at_the_media_themselves(tmp_path: Path) -> None:
    rows = []
    for i in range(40):
        png(tmp_path, f"{i}.png", grey=i % 20)
        rows.append({"prompt": "<image> ?", "images": [f"{i}.png"], "answer": str(i)})
    found = environment(write(tmp_path / "a.jsonl", *rows), split=Split(eval=0.3))
    sides = {str(task.answer): split for split in ("train", "eval") for task in found.tasks(split)}
    assert set(sides.values()) == {"train", "eval"}
    assert all(sides[str(i)] == sides[str(i + 20)] for i in range(20))


def test_no_eval(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD)
    with pytest.raises(ConfigError, match="nothing is held out for evaluation: set eval_data or split"):
        environment(path).tasks("eval")
    with pytest.raises(ValidationError, match="eval_data and split are both set"):
        environment(path, eval_data=path, split=Split(eval=0.5))
    with pytest.raises(DataError, match=r"data\.jsonl: no row for eval: 1 rows, 0 of them bad"):
        environment(path, split=Split(eval=1e-9)).tasks("eval")


def test_settings_are_read_from_json() -> None:
    config = SingleTurn.Config.model_validate_json('{"data": "a.jsonl", "split": {"eval": 0.2}}')
    assert config.data == Path("a.jsonl") and config.split == Split(eval=0.2)
