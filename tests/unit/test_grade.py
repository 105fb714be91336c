"""``relax grade``: rewards tried on recorded replies."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from relax_core import grade, grade_report
from relax_core.config import yaml
from relax_core.errors import ConfigError, DataError, PluginError
from relax_core.grade import BAD_ROWS, DISAGREE, Graded, Graders
from relax_core.plugins import activate
from relax_core.testing.plugins import write_plugin

CASES = Path(__file__).resolve().parents[1] / "cases" / "graders.jsonl"
ALL = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
LIGHT = [case for case in ALL if case["grader"] in ("choice", "gsm8k", "format")]


def write(path: Path, *rows: Any) -> Path:
    """A file of rows; text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    return path


def row(**fields: Any) -> dict[str, Any]:
    return {"grader": "exact", "gold": "4", "response": "4", **fields}


def document(path: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document."""
    code = grade.main(path, as_json=True, **settings)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


# --- the cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: f"{case['grader']}: {case['response'][:30]!r}")
def test_a_case_of_another_framework(case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(write(tmp_path / "a.jsonl", case), capsys)
    assert code == 0 and found["rows"][0]["reward"] == found["rows"][0]["expected"] == case["reward"]


def test_the_cases_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(write(tmp_path / "a.jsonl", *LIGHT), capsys)
    assert code == 0 and [r["agrees"] for r in found["rows"]] == [True] * 15
    assert {name: s["rows"] for name, s in found["graders"].items()} == {"gsm8k": 10, "choice": 3, "format": 2}
    assert found["confusion"]["gsm8k"]["1"] == {"0": 0, "1": 9, "other": 0, "abstain": 0}
    assert found["confusion"]["gsm8k"]["0"] == {"0": 1, "1": 0, "other": 0, "abstain": 0}


# --- results ----------------------------------------------------------------------------------------------------------


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "a.jsonl",
        row(reward=1),
        row(response="5", reward=1),
        row(response="5"),
        row(gold=None, reward=None),
        row(grader="number", gold="four", reward=None),
        row(grader="f1", gold="a b c", response="b d", reward=0.5),
        row(grader="f1", gold="a b c", response="b c d", reward=0.75),
    )
    code, found = document(path, capsys)
    assert code == DISAGREE == 3
    kept = [{k: v for k, v in r.items() if k != "seconds"} for r in found["rows"]]
    failed = (
        "DataError: task 'a.jsonl:5': the answer 'four' cannot be read; "
        "allowed: a number, such as 42, 0.5 or 1,000: fix the row"
    )
    assert kept == [
        {"line": 1, "grader": "exact", "reward": 1.0, "expected": 1.0, "agrees": True, "error": None},
        {"line": 2, "grader": "exact", "reward": 0.0, "expected": 1.0, "agrees": False, "error": None},
        {"line": 3, "grader": "exact", "reward": 0.0, "error": None},
        {"line": 4, "grader": "exact", "reward": None, "expected": None, "agrees": True, "error": None},
        {"line": 5, "grader": "number", "reward": None, "expected": None, "agrees": True, "error": failed},
        {"line": 6, "grader": "f1", "reward": 0.5, "expected": 0.5, "agrees": True, "error": None},
        {"line": 7, "grader": "f1", "reward": 0.8, "expected": 0.75, "agrees": False, "error": None},
    ]
    assert all(0 <= r["seconds"] < 10 for r in found["rows"])
    exact = found["graders"]["exact"]
    assert {k: v for k, v in exact.items() if not k.startswith("seconds")} == {
        "rows": 4, "mean": 1 / 3, "abstained": 1, "failed": 0, "agree": 2, "disagree": 1
    }  # fmt: skip
    assert exact["seconds_p50"] <= exact["seconds_p99"]
    assert found["graders"]["number"]["failed"] == 1 and found["graders"]["number"]["abstained"] == 0
    assert found["confusion"]["exact"] == {
        "0": {"0": 0, "1": 0, "other": 0, "abstain": 0},
        "1": {"0": 1, "1": 1, "other": 0, "abstain": 0},
        "other": {"0": 0, "1": 0, "other": 0, "abstain": 0},
        "abstain": {"0": 0, "1": 0, "other": 0, "abstain": 1},
    }
    assert found["confusion"]["f1"]["other"]["other"] == 2
    assert (found["disagreements"], found["bad_rows"], found["file"]) == (2, 0, str(path))


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "a.jsonl",
        row(reward=1),
        row(response="[bold]5[/]\n\x1b[31m" + "x" * 200, reward=1),
        row(grader="number", gold="four", reward=1),
        row(grader="numbr"),
    )
    assert grade.main(path) == BAD_ROWS == 2
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].split() == [
        "grader",
        "rows",
        "mean",
        "abstained",
        "failed",
        "agree",
        "disagree",
        "p50",
        "ms",
        "p99",
        "ms",
    ]
    assert lines[1].split()[:7] == ["exact", "2", "0.5", "0", "0", "1", "1"]
    assert lines[2].split()[:7] == ["number", "1", "-", "0", "1", "0", "1"]
    assert any(line.split() == ["1", "1", "1", ".", "."] for line in lines)  # exact: expected 1
    disagree = next(line for line in lines if line.startswith("2 "))
    assert disagree.split()[:4] == ["2", "exact", "1", "0"] and "[bold]5[/]\\n" in disagree and 'xxx"' in text
    assert "\x1b" not in text and len(disagree) <= 160
    assert next(line for line in lines if line.startswith("3 ")).split()[:4] == ["3", "number", "1", "abstain"]
    assert f"{path}:4: grader: no reward has the id 'numbr'; did you mean 'number'?" in lines
    assert lines[-1] == f"{path}: 3 rows graded, 1 agree with their reward, 2 do not, 1 cannot be used"


def test_without_expected_rewards_nothing_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", row(), row(response="5"))
    assert grade.main(path) == 0
    text = capsys.readouterr().out
    assert "got 0" not in text and text.rstrip().endswith(f"{path}: 2 rows graded")
    assert document(path, capsys)[1]["confusion"] == {}


def test_rows_without_a_gold_suit_graders_that_need_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"grader": "format", "response": "a b", "options": {"words": 2}, "reward": 1},
        {"grader": "format", "gold": None, "response": "a b", "options": {"words": 3}, "reward": 0},
        {"grader": "exact", "response": "a", "reward": None},
        {"grader": "length", "response": "a b", "tokens": 12, "options": {"max": 10, "buffer": 4}, "reward": -0.5},
        {"grader": "format", "response": "a", "stop": "length", "options": {"ended": True}, "reward": 0},
        {"grader": "choice", "gold": "Rome", "response": "B", "metadata": {"choices": ["Paris", "Rome"]}, "reward": 1},
    ]
    assert document(write(tmp_path / "a.jsonl", *rows), capsys)[0] == 0


def test_graders_are_built_once_for_the_same_options(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", row(), row(options={}), row(options={"strip": False}), row(options={"strip": True})
    )
    graders = Graders(activate(()))
    rewards = [graders.of(r)[1] for r in grade.read(path) if isinstance(r, grade.GradeRow)]
    assert rewards[0] is rewards[1] and len({id(reward) for reward in rewards}) == 3


# --- bad rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("nonsense", "not JSON: Expecting value"),
        ('{"grader": "exact", "response": "4",}', "not JSON: "),
        ('{"grader": "exact", "response": "4", "reward": NaN}', "not JSON: NaN is no JSON value"),
        ("[" * 100_000, "not JSON"),
        ('["exact"]', "a JSON list, not an object"),
        ('"exact"', "a JSON str, not an object"),
        ({"gold": "4", "response": "4"}, "has no 'grader'"),
        ({"grader": "exact", "gold": "4"}, "has no 'response'"),
        ({"grader": "exact", "gold": "4", "respones": "4"}, "unknown key 'respones'; did you mean 'response'?"),
        (row(option={"strip": True}), "unknown key 'option'; did you mean 'options'?"),
        (row(response=4), "'response' is a JSON a whole number; it must be a text"),
        (row(response=None), "'response' is a JSON null; it must be a text"),
        (row(grader=4), "'grader' is a JSON a whole number"),
        (row(reward="1"), "'reward' is a JSON a text; it must be a whole number or a number or null"),
        (row(reward=True), "'reward' is a JSON true or false"),
        (row(reward=10**400), "'reward' is too large"),
        (row(options=[]), "'options' is a JSON a list; it must be an object"),
        (row(metadata="x"), "'metadata' is a JSON a text; it must be an object"),
        (row(tokens=1.5), "'tokens' is a JSON a number"),
        (row(stop="never"), "'stop' is 'never'; allowed are eos, length"),
        (row(grader="exactt"), "grader: no reward has the id 'exactt'; did you mean 'exact'?"),
        (row(grader="zzz"), "grader: no reward has the id 'zzz'; known are exact"),
        (row(options={"strp": True}), "options.strp: unknown key; did you mean 'strip'?"),
        (row(options={"strip": "yes"}), "options.strip: found 'yes'; must be a valid boolean; write true"),
        (row(grader="format", options={"pattern": "("}), "options.pattern: found '('; '(' is no regular expression"),
        (row(options={"weight": 2}), "options: 'weight' means nothing here"),
        (row(options={"when": {}}), "options: 'when' means nothing here"),
        (row(options={"timeout": 0}), "options.timeout: found 0; must be greater than 0"),
        (row(grader="function", options={"call": "nowhere:f"}), "nowhere cannot be imported"),
    ],
)
def test_a_bad_row_is_named_and_the_others_go_on(
    bad: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", row(reward=1), "", bad, row(response="5", reward=0))
    assert grade.main(path) == BAD_ROWS
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{path}:3: ") and said in line for line in lines)
    code, found = document(path, capsys)
    assert code == BAD_ROWS and [r["line"] for r in found["rows"]] == [1, 3, 4]
    assert [r["reward"] for r in found["rows"]] == [1.0, None, 0.0] and found["bad_rows"] == 1
    assert found["rows"][1]["bad"] is True and said in found["rows"][1]["error"]


def test_keys_that_it_does_not_know_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", row(kind="x", source="y", note=1, question="?", options=None, metadata=None))
    assert grade.main(path) == 0


def test_line_ends_a_byte_order_mark_and_blank_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps(row(reward=1)).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n   \r\n" + line + b"\r\n\xff\r\n" + line)
    code, found = document(path, capsys)
    assert code == BAD_ROWS and [r["line"] for r in found["rows"]] == [1, 4, 5, 6]
    assert [r["reward"] for r in found["rows"]] == [1.0, 1.0, None, 1.0]
    assert "not UTF-8 (byte 1 of the line)" in found["rows"][2]["error"]


@pytest.mark.parametrize(("content", "said"), [(b"", "there is nothing in it"), (b"\n \n", "there is nothing in it")])
def test_an_empty_file_is_an_error(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=said):
        grade.main(tmp_path / "a.jsonl")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file or directory"):
        grade.main(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        grade.main(tmp_path)


# --- graders that are late, other plugins, run files ------------------------------------------------------------------


def test_a_late_grader_abstains_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\ndef f(response):\n    time.sleep(float(response))\n    return 1.0\n"
    )
    options = {"call": f"{tmp_path / 'mine.py'}:f", "timeout": 0.3}
    rows = [
        row(grader="function", response=r, options=options, reward=e) for r, e in (("20", None), ("0", 1), ("0", 1))
    ]
    code, found = document(write(tmp_path / "a.jsonl", *rows), capsys)
    assert code == 0 and [r["reward"] for r in found["rows"]] == [None, 1.0, 1.0]
    assert found["rows"][0]["error"] == "TimeoutError: no answer within 0.3 s"
    assert 0.3 <= found["rows"][0]["seconds"] < 5


def test_a_grader_may_give_components(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def f(response):\n    return {'right': 1.0, 'short': -0.25}\n")
    case = row(grader="function", options={"call": f"{tmp_path / 'mine.py'}:f"}, reward=0.75)
    assert document(write(tmp_path / "a.jsonl", case), capsys)[0] == 0


def test_plugins_may_bring_graders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plugin(tmp_path / "site", "graders", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path / "site")
    from relax_core.plugins import installed_plugins

    installed_plugins.cache_clear()
    try:
        path = write(tmp_path / "a.jsonl", row(grader="half", reward=0.5))
        assert document(path, capsys)[0] == BAD_ROWS
        assert document(path, capsys, plugins=["graders"])[0] == 0
        with pytest.raises(PluginError, match="'gradrs' is not installed; did you mean 'graders'"):
            grade.main(path, plugins=["gradrs"])
    finally:
        installed_plugins.cache_clear()


PLUGIN = """
from relax_core.interfaces import Component, Reward


class Half(Reward):
    async def __call__(self, trajectory):
        return 0.5


def relax_rewards():
    return {"half": Component("graders_plugin:Half")}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    data: dict[str, Any] = {
        "name": "test",
        "steps": 10,
        "groups_per_step": 4,
        "model": {"id": "text", "tiny": {"words": ["cat", "dog"]}},
        "environments": [{"id": "last-word"}],
        "rewards": [{"id": "exact", "name": "loose", "ignore_case": True}, {"id": "format", "words": 2}],
        "algorithm": {"id": "grpo"},
    }
    file.write_text(yaml.dump(data))
    return file


def test_rewards_of_a_run_file(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(grader="loose", gold="Red", response="RED", reward=1),
        row(grader="format", response="one two", reward=1),
        row(grader="exact"),
        row(grader="loose", options={"strip": True}),
    ]
    code, found = document(write(tmp_path / "a.jsonl", *rows), capsys, run=run_file)
    assert code == BAD_ROWS and [r.get("agrees") for r in found["rows"]] == [True, True, None, None]
    assert found["rows"][2]["error"] == "grader: the run file has no reward 'exact'; it has loose, format"
    assert found["rows"][3]["error"].startswith("options: the run file gives the reward its settings")
    with pytest.raises(ConfigError, match="give --run or --plugin"):
        grade.main(tmp_path / "a.jsonl", run=run_file, plugins=["omni"])


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_two_hundred_rows_keep_their_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(row(gold=str(i), response=str(i - i % 2)) for i in range(200)))
    found = asyncio.run(grade.grade(list(grade.read(path)), Graders(activate(()))))
    rewards = [one.reward for one in found if isinstance(one, Graded)]
    assert rewards == [float(i % 2 == 0) for i in range(200)] and [one.line for one in grade.read(path)] == [
        *range(1, 201)
    ]


@pytest.mark.parametrize(
    ("times", "p50", "p99"),
    [([], None, None), ([1.0], 1.0, 1.0), ([1.0, 2.0], 1.0, 2.0), ([float(i) for i in range(1, 101)], 50.0, 99.0)],
)
def test_quantiles(times: list[float], p50: float | None, p99: float | None) -> None:
    assert grade_report._quantile(times, 0.5) == p50 and grade_report._quantile(times, 0.99) == p99


def test_nothing_is_left_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef f(response):\n    return os.getpid()\n")
    case = row(grader="function", options={"call": f"{tmp_path / 'mine.py'}:f", "process": True, "workers": 1})
    _, found = document(write(tmp_path / "a.jsonl", case), capsys)
    with pytest.raises(ProcessLookupError):
        os.kill(int(found["rows"][0]["reward"]), 0)
