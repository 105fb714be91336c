"""JSON lines and JSON arrays as data sets: which lines are rows, where each stands, and why one is none."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.errors import DataError
from relax_core.types import Task, user
from relax_envs.data.json_lines import JsonArray, JsonLines
from relax_envs.data.tasks import DataTasks
from relax_envs.single_turn import SingleTurn

GOOD = {"prompt": "two + two ?", "answer": "four"}


def write(path: Path, *rows: Any) -> Path:
    """Rows as JSON, or as they are where they are text or bytes."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return path


def tasks_of(path: Path, **settings: Any) -> DataTasks:
    found = SingleTurn(SingleTurn.Config(data=path, **settings)).tasks("train")
    assert isinstance(found, DataTasks)
    return found


def reason(tasks: DataTasks, place: int) -> str:
    """Why a row cannot be used, without its file."""
    with pytest.raises(DataError) as error:
        tasks[place]
    assert "\n" not in str(error.value)
    where = f"{tasks.where(place)}: "
    assert str(error.value).startswith(where)
    return str(error.value).removeprefix(where)


# --- lines --------------------------------------------------------------------------------------------------------


def test_a_row_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD, {"id": "b", "prompt": "Hi", "answer": 3}, GOOD)
    tasks = tasks_of(path)
    assert list(tasks) == [
        Task("1", (user("two + two ?"),), "four"),
        Task("b", (user("Hi"),), 3),
        Task("3", (user("two + two ?"),), "four"),
    ]
    assert tasks[-1] == tasks[2] and tasks[1:] == [tasks[1], tasks[2]]
    assert tasks.where(1) == f"{path}:2"
    with pytest.raises(IndexError):
        tasks[3]


def test_bom_windows_line_ends_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n   \r\n" + row + b"\r\n\r\n" + row)
    tasks = tasks_of(path)
    assert [task.id for task in tasks] == ["1", "4", "6"]
    assert {task.messages for task in tasks} == {(user("two + two ?"),)}
    assert tasks.bad_places == []


@pytest.mark.parametrize("escaped", [True, False])
def test_letters_of_every_script(escaped: bool, tmp_path: Path) -> None:
    text = "数字 رقم 🦉 \u2028 \x85"
    path = write(tmp_path / "data.jsonl", json.dumps({"prompt": text, "answer": text}, ensure_ascii=escaped))
    assert list(tasks_of(path)) == [Task("1", (user(text),), text)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "?", "answer": "a",}', "not JSON: "),
        ('{"prompt": "?", "answer": "a"},', "not JSON: Extra data at column 31: leave out the comma behind the object"),
        ("{'prompt': 1}", "not JSON: "),
        ('{"prompt": "?", "answer": "a"', "not JSON: "),
        ('{"prompt": "?", "answer": "a\x00"}', "not JSON: Invalid control character"),
        ('{"prompt": "a", "prompt": "b", "answer": "a"}', "not JSON: the key 'prompt' is there twice"),
        ('{"prompt": "?", "answer": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, "not JSON: "),
        ('{"a": ' * 100_000, "not JSON: "),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8 (byte 13 of the line)"),
        ("[", "not JSON: Expecting value at column 2: a JSON array? name the file .json"),
        ("{", "not JSON: Expecting property name enclosed in double quotes at column 2: an object over several lines?"),
        ([GOOD], "a JSON list, not an object: a JSON array in one line? write one object a line"),
        ("3", "a JSON int, not an object"),
        ("null", "a JSON NoneType, not an object"),
    ],
)
def test_a_line_that_is_no_row(line: Any, expected: str, tmp_path: Path) -> None:
    tasks = tasks_of(write(tmp_path / "data.jsonl", GOOD, line, GOOD))
    assert len(tasks) == 3 and [tasks[0].answer, tasks[2].answer] == ["four", "four"]
    assert tasks.bad_places in ([1], []), "a key twice is seen only by who looks closely"
    assert reason(tasks, 1).startswith(expected)


def test_numbers_that_only_python_writes(tmp_path: Path) -> None:
    row = '{"prompt": "?", "answer": "a", "metadata": NaN, "images": NaN, "id": NaN, "x": NaN, "y": Infinity}'
    [task] = tasks_of(write(tmp_path / "data.jsonl", row))
    assert task == Task("1", (user("?"),), "a", {"y": float("inf")})


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"empty\.jsonl: the data set is empty: write one JSON object a line$"):
        tasks_of(tmp_path / "empty.jsonl")


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *[{"prompt": f"{i} ?", "answer": str(i)} for i in range(200)])
    tasks = tasks_of(path)
    assert [tasks[i].answer for i in (199, 0, 57)] == ["199", "0", "57"]
    path.write_bytes(path.read_bytes()[1:])
    assert reason(tasks, 57) == "the file has changed since it was opened: start again"


def test_threads_read_side_by_side_and_leave_no_file_open(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *[{"prompt": f"{i} ?", "answer": i} for i in range(2000)])
    tasks = tasks_of(path)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    wrong: list[int] = []

    def read(start: int) -> None:
        wrong.extend(i for i in range(start, 2000, 4) if tasks[i].answer != i)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert not before or len(os.listdir("/proc/self/fd")) == before


# --- arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("head", ["", "\ufeff", "\n\n  "])
def test_an_array(indent: int | None, head: str, tmp_path: Path) -> None:
    rows: list[Any] = [
        GOOD,
        {"prompt": 'a "quoted\\" [text], {with} braces\\', "answer": {"x": [1, [2, 3]], "y": "],["}},
        GOOD,
    ]
    (tmp_path / "data.json").write_text(head + json.dumps(rows, indent=indent), encoding="utf-8")
    tasks = tasks_of(tmp_path / "data.json")
    assert [task.answer for task in tasks] == ["four", rows[1]["answer"], "four"]
    assert tasks[1].messages == (user(rows[1]["prompt"]),)


def test_rows_of_an_array_are_named_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('[\n{"prompt": "a", "answer": 1},\n\n{"prompt": 3},{"x":\n1}, 7,\n oops\n]')
    tasks = tasks_of(tmp_path / "data.json")
    assert [tasks.where(i).rpartition(":")[2] for i in range(5)] == ["2", "4", "4", "5", "6"]
    assert tasks[0].id == "1" and tasks.bad_places == [3, 4]  # two share a line: ids are the numbers of elements
    assert reason(tasks, 1) == "'prompt' is a number; a list of messages is allowed"
    assert reason(tasks, 3) == "a JSON int, not an object"
    assert reason(tasks, 4).startswith("not JSON: ")


def test_a_trailing_comma_in_an_array_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(f"[{json.dumps(GOOD)},\n]")
    tasks = tasks_of(tmp_path / "data.json")
    assert len(tasks) == 2 and tasks[0].answer == "four" and tasks.bad_places == [1]
    assert reason(tasks, 1) == "not JSON: there is nothing between two commas, or behind the last one"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", "the data set is empty"),
        (" [\n]\n", "the data set is empty"),
        ('[{"prompt": "a"}', "its array does not end: is the file cut off?"),
        ('[{"prompt": "a', "its array does not end: is the file cut off?"),
        ('[{"prompt": "a"}]\n[]', "more follows behind its array"),
    ],
)
def test_an_array_that_cannot_be_read(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(DataError, match=r"data\.json: ") as error:
        tasks_of(tmp_path / "data.json")
    assert expected in str(error.value)


KEYS = st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=5), st.sampled_from([None, 0, 3]))
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_lines_and_arrays_give_the_rows_that_were_written(rows: list[dict[str, Any]], indent: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines, array = write(Path(folder) / "a.jsonl", *rows), Path(folder) / "a.json"
        array.write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8")
        for found in (JsonLines(lines), JsonArray(array)):
            assert [found.row(i) for i in range(len(found))] == list(found.scan([])) == rows


def test_lines_in_a_json_file(tmp_path: Path) -> None:
    assert len(tasks_of(write(tmp_path / "data.json", GOOD, GOOD))) == 2


def test_elements_of_an_array_in_one_line_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c", "answer": 3}]')
    tasks = SingleTurn(SingleTurn.Config.model_validate_json(json.dumps({"data": str(path)}))).tasks("train")
    assert [tasks[0].id, tasks[2].id] == ["1", "3"]
    with pytest.raises(DataError, match=r"rows\.json:2: no 'answer'"):
        tasks[1]


def test_elements_that_share_lines_have_ids_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2},\n {"prompt": "c", "answer": 3}]')
    tasks = SingleTurn(SingleTurn.Config.model_validate_json(json.dumps({"data": str(path)}))).tasks("train")
    assert [task.id for task in tasks] == ["1", "2", "3"]
