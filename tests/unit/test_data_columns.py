"""Which column is what: names, paths and texts with columns; choices, answers cut out, functions; what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax_core.config.validation import validate
from relax_core.errors import ConfigError, DataError
from relax_core.types import Image, Task, Video, system, user
from relax_envs.data.columns import Columns, read_columns, split_text
from relax_envs.data.rows import TaskMaker
from relax_envs.data.values import RowError
from relax_envs.single_turn import SingleTurn


def task(row: dict[str, Any], folder: Path = Path(), **columns: Any) -> Task:
    return TaskMaker(validate(Columns, columns), need_answer=False).task(row, folder, "1")


def reason(row: dict[str, Any], **columns: Any) -> str:
    with pytest.raises(RowError) as error:
        task(row, **columns)
    assert "\n" not in str(error.value)
    return str(error.value)


def opened(path: Path, **columns: Any) -> Any:
    config = validate(SingleTurn.Config, {"data": str(path), "columns": columns, "need_answer": False})
    return SingleTurn(config).tasks("train")


# --- finding values -----------------------------------------------------------------------------------------------


def test_columns_by_name() -> None:
    row = {"question": "2 + 2 ?", "solution": 4, "level": "easy"}
    assert task(row, prompt="question", answer="solution") == Task("1", (user("2 + 2 ?"),), 4, {"level": "easy"})


def test_paths_into_objects_and_lists() -> None:
    row = {"q": {"text": ["a ?", "b ?"]}, "reward_model": {"ground_truth": "4", "style": "rule"}}
    found = task(row, prompt="q.text.1", answer="reward_model.ground_truth")
    assert found == Task("1", (user("b ?"),), "4"), "a column that is used in part has its use"
    assert task(row, prompt="q.text.-2", answer="reward_model.other").answer is None
    assert task({"a.b": "dotted", "a": {"b": "nested"}}, prompt="a.b").messages == (user("dotted"),)
    assert task({"a.b": {"c": "x"}}, prompt="a.b.c").messages == (user("x"),)
    assert reason(row, prompt="q.text.7") == "no 'prompt': 'q.text.7' is not in this row, or empty"
    assert reason(row, prompt="q.text.last") == "'q.text' is a list; 'last' is no place in one"
    assert reason(row, prompt="q.text.0.x") == "'q.text.0' is text; there is no 'x' in it"


def test_texts_with_columns() -> None:
    row = {"q": "how many ?", "n": 3, "f": 4.0, "x": 0.5, "lines": ["a", 2], "empty": "", "none": None, "o": {"k": "v"}}
    text = "{q} {{{n}}} {f} {x}\n{lines}{empty} {o.k}"
    assert task(row, prompt=text).messages == (user("how many ? {3} 4 0.5\na\n2 v"),)
    assert reason(row, prompt="{none}") == "'prompt' needs 'none', which this row does not have"
    assert reason(row, prompt="{qq}") == "'prompt' needs 'qq', which this row does not have; did you mean 'q'?"
    assert reason(row, prompt="{o}") == (
        "'prompt': 'o' is an object; text, a number or a list of them can be put into a text"
    )
    assert task(row, prompt="q", answer="{n}/{f}").answer == "3/4"


@pytest.mark.parametrize("text", ["{", "}", "{a", "a}", "{}", "{{a}", "{a}}"])
def test_a_single_brace(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write '(\{\{|\}\})' for the character"):
        validate(Columns, {"prompt": text})


def test_split_text() -> None:
    pieces = [piece for piece in split_text("a{b}{{c}}") if piece[0]]
    assert pieces == [("a", False), ("b", True), ("{", False), ("c", False), ("}", False)]


def test_system_is_a_text() -> None:
    assert task({"q": "?"}, prompt="q", system="Be brief.").messages == (system("Be brief."), user("?"))
    found = task({"q": "?", "role": "pirate"}, prompt="q", system="You are a {role}. Say {{x}}.")
    assert found.messages == (system("You are a pirate. Say {x}."), user("?"))


def test_fields_take_columns_of_their_names_unless_others_name_them() -> None:
    row = {"prompt": "p", "messages": "m", "answer": "a", "id": "i", "image": "x", "other": 1}
    found = task(row, prompt="prompt", images="", id="")
    assert found == Task("1", (user("p"),), "a", {"messages": "m", "id": "i", "image": "x", "other": 1})
    found = task({"answer": "why", "reason": "because"}, prompt="answer", answer="reason")
    assert found == Task("1", (user("why"),), "because")
    assert task({"conversations": [{"from": "human", "value": "hi"}]}).messages == (user("hi"),)
    assert task({"prompt": "p", "answer": "a"}, answer="").answer is None


def test_media_from_columns(tmp_path: Path) -> None:
    for name in ("1.png", "2.png", "v7.mp4"):
        (tmp_path / name).write_bytes(b"x")
    one, two, clip = Image(tmp_path / "1.png"), Image(tmp_path / "2.png"), Video(tmp_path / "v7.mp4")
    row: dict[str, Any] = {
        "q": "<image><image>",
        "first": "1.png",
        "second": {"path": "2.png"},
        "third": None,
        "fourth": [],
    }
    assert task(row, tmp_path, prompt="q", images=["first", "third", "second", "fourth"]).messages == (user(one, two),)
    row = {"q": "<image><image>", "all": ["1.png"], "more": "2.png"}
    assert task(row, tmp_path, prompt="q", images=["all", "more"]).messages == (user(one, two),)
    row = {"q": "what ?", "id": 7, "p": {"image": "1.png"}}
    found = task(row, tmp_path, prompt="<video><image>{q}", videos="v{id}.mp4", images="p.image")
    assert found.messages == (user(clip, one, "what ?"),)


# --- choices and answers ------------------------------------------------------------------------------------------

CHOICES = {"q": "capital of Norway ?", "answer": 1, "a0": "Paris", "a1": "Oslo", "a2": 3}


@pytest.mark.parametrize("choices", [["a0", "a1", "a2"], "all"])
def test_choices(choices: Any) -> None:
    row = CHOICES if choices != "all" else {"q": CHOICES["q"], "answer": 1, "all": ["Paris", "Oslo", 3]}
    found = task(row, prompt="{q}\n{choices}", choices=choices)
    assert found.messages == (user("capital of Norway ?\nA. Paris\nB. Oslo\nC. 3"),)
    assert (found.answer, found.metadata) == ("B", {"choices": ["Paris", "Oslo", "3"]})


@pytest.mark.parametrize(
    ("answer", "expected"), [(0, "A"), (2.0, "C"), ("2", "2"), ("B", "B"), (True, True), (0.5, 0.5)]
)
def test_only_a_whole_number_becomes_a_letter(answer: Any, expected: Any) -> None:
    found = task({**CHOICES, "answer": answer}, prompt="q", choices=["a0", "a1", "a2"]).answer
    assert found == expected and type(found) is type(expected)


def test_rows_with_fewer_choices() -> None:
    row = {"q": "?", "answer": 1, "a0": "yes", "a1": "no", "a2": None}
    assert task(row, prompt="{choices}", choices=["a0", "a1", "a2"]).messages == (user("A. yes\nB. no"),)
    row = {"q": "?", "answer": 3, "all": None}
    assert task(row, prompt="q", choices="all") == Task("1", (user("?"),), 3), "a row without choices"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"all": ["a", "b"], "answer": 2}, "'answer' is 2, but the choices are counted from 0 to 1"),
        ({"all": ["a", "b"], "answer": -1}, "'answer' is -1, but the choices are counted from 0 to 1"),
        ({"all": ["a", None, "b"], "answer": 0}, "choice 2 is empty; text is allowed"),
        ({"all": [["a"]], "answer": 0}, "choice 1 is a list; text is allowed"),
        ({"all": {"A": "a"}, "answer": 0}, "'choices' is an object; a list of texts is allowed"),
        ({"all": ["a"] * 27, "answer": 0}, "27 choices; 26 are allowed"),
        ({"all": [], "answer": 0}, "'choices' is empty, and {choices} stands in a text"),
    ],
)
def test_choices_that_are_none(row: dict[str, Any], expected: str) -> None:
    assert reason(row, prompt="?{choices}", choices="all").startswith(expected)


@pytest.mark.parametrize(
    ("settings", "answer", "expected"),
    [
        ({"answer_after": "####"}, "48/2 = 24\n#### 72", "72"),
        ({"answer_after": "####"}, "#### 1\n#### 1,234 \n", "1,234"),
        ({"answer_pattern": "<answer>(.*?)</answer>"}, "<think>a</think>\n<answer> B </answer>", "B"),
        ({"answer_pattern": "<answer>(.*?)</answer>"}, "<answer>A</answer> no, <answer>x\ny</answer>", "x\ny"),
        ({"answer_pattern": r"Answer: (\w)"}, "Answer: C", "C"),
    ],
)
def test_an_answer_is_cut_out(settings: dict[str, Any], answer: str, expected: str) -> None:
    assert task({"q": "?", "solution": answer}, prompt="q", answer="solution", **settings).answer == expected


@pytest.mark.parametrize(
    ("settings", "answer", "expected"),
    [
        ({"answer_after": "####"}, "72", "'answer' has no '####'"),
        ({"answer_after": "####"}, "72 ####", "'answer' has nothing behind '####'"),
        ({"answer_after": "####"}, 72, "'answer' is a number; text with '####' is needed"),
        ({"answer_pattern": "<a>(.*)</a>"}, "72", "'answer' has no '<a>(.*)</a>'"),
    ],
)
def test_an_answer_that_cannot_be_cut_out(settings: dict[str, Any], answer: Any, expected: str) -> None:
    assert reason({"q": "?", "answer": answer}, prompt="q", **settings) == expected


def test_metadata_that_is_chosen() -> None:
    row = {"prompt": "?", "extra": {"index": 3, "split": "train"}, "source": "s", "deep": {"x": {"y": 2}}, "big": "..."}
    assert task(row, metadata="extra").metadata == {"index": 3, "split": "train"}
    assert task(row, metadata=["source", "extra", "deep.x.y", "gone"]).metadata == {
        "source": "s",
        "index": 3,
        "split": "train",
        "y": 2,
    }
    assert task(row, metadata="").metadata == {}
    assert reason({**row, "big": b"x"}, metadata="big") == "'metadata': 'big' is bytes; they cannot be metadata"
    assert "big" not in task({**row, "big": [{"x": b"x"}]}).metadata


# --- functions ----------------------------------------------------------------------------------------------------


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(
        "import numpy as np\n"
        "def turn(row):\n"
        "    if row['n'] < 0: raise KeyError('n\\nis negative')\n"
        "    if row['n'] > 9: return [row]\n"
        "    return {'prompt': f\"{row['n']} ?\", 'answer': np.int64(row['n']), 'more': np.arange(2), 'raw': b'x'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for call in ("my_rows:turn", f"{tmp_path}/my_rows.py:turn"):
            found = task({"n": 3}, function=call)
            assert found == Task("1", (user("3 ?"),), 3, {"more": [0, 1]}) and type(found.answer) is int
        assert reason({"n": -1}, function="my_rows:turn") == "function my_rows:turn: KeyError: 'n\\nis negative'"
        assert reason({"n": 10}, function="my_rows:turn").endswith("it gave a list; a row (a dict) is expected")
        path = tmp_path / "data.jsonl"
        path.write_text('{"n": 1, "uid": "x"}\n{"n": -1}\n')
        tasks = opened(path, function="my_rows:turn", id="uid")
        assert tasks[0].id == "x"
        with pytest.raises(DataError, match=r"data\.jsonl:2: function my_rows:turn: KeyError"):
            tasks[1]
        with pytest.raises(ConfigError, match=r"my_rows has no 'trun'; did you mean 'turn'\?"):
            opened(path, function="my_rows:trun")
    finally:
        sys.modules.pop("my_rows", None)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("nowhere_at_all:f", "columns.function: nowhere_at_all cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", "columns.function: no/such/file.py cannot be imported: FileNotFoundError"),
        ("json:__name__", "columns.function: 'json:__name__' is a str, which cannot be called"),
    ],
)
def test_a_function_that_is_none(call: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        task({}, function=call)
    assert str(error.value).startswith(expected)


# --- settings that cannot work ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"prompt": "a", "messages": "b"}, "prompt and messages are both set; keep one"),
        ({"answer_after": "#", "answer_pattern": "(a)"}, "answer_after and answer_pattern are both set; keep one"),
        ({"answer_after": ""}, "columns.answer_after: found ''; a mark such as '####' is needed"),
        ({"answer_pattern": "("}, "columns.answer_pattern: found '('; not a regular expression"),
        ({"answer_pattern": "a"}, "columns.answer_pattern: found 'a'; it has 0 groups; one is needed"),
        ({"metadata": ["{a}"]}, "columns.metadata: found a list of 1; '{a}' has columns in braces; name a column"),
        ({"function": "f"}, "columns.function: found 'f'; write package.module:name, or path/file.py:name"),
        ({"promt": "a"}, "columns.promt: unknown key; did you mean 'prompt'?"),
        ({"images": []}, "columns.images"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(Columns, settings, "columns")
    assert expected in str(error.value)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "?", "solution": "a"}\n{"question": "?", "extra": {"x": 1}}\n')
    with pytest.raises(DataError) as error:
        opened(path, prompt="queston")
    assert str(error.value) == (
        f"{path}: columns.prompt: no column 'queston'; did you mean 'question'?; there are question, solution, extra"
    )
    with pytest.raises(DataError, match=r"columns\.answer: no column 'b'"):
        opened(path, prompt="question", answer="a {b}")
    tasks = opened(path, prompt="question", answer="extra.x")
    assert [task.answer for task in tasks] == [None, 1], "one row has it"


def test_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"q": "?", "a": 1}\n')
    settings = tmp_path / "columns.yaml"
    settings.write_text("# what is what\nprompt: q\nanswer: a\n")
    assert read_columns(settings) == Columns(prompt="q", answer="a")
    config = validate(SingleTurn.Config, {"data": str(tmp_path / "data.jsonl"), "columns": str(settings)})
    assert SingleTurn(config).tasks("train")[0] == Task("1", (user("?"),), 1)
    assert list(SingleTurn.check(config, None)) == []  # type: ignore[arg-type]
    settings.write_text("promt: q\n")
    [problem] = SingleTurn.check(config, None)  # type: ignore[arg-type]
    assert problem == f"{settings}.promt: unknown key; did you mean 'prompt'?"
    for text, expected in (("- a\n", "not a mapping"), ("a: b: c", "columns.yaml: line 1"), ("", "not a mapping")):
        settings.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            read_columns(settings)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        read_columns(tmp_path / "nowhere.yaml")


def test_settings_are_strict() -> None:
    with pytest.raises(ValidationError):
        Columns.model_validate({"prompt": 3})
    assert json.loads(Columns(choices=("a", "b")).model_dump_json())["choices"] == ["a", "b"]
