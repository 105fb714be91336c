"""The metrics log: plain JSON numbers, one bad value spoils no other, whole lines whatever kills the writer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.errors import CheckpointError
from relax_core.metrics import MetricsLog, comparable
from relax_core.tensorboard import EventFiles
from relax_core.testing.kills import killed_after, killed_at_each_operation


def read_back(tmp_path: Path, values: dict[str, Any]) -> dict[str, Any]:
    MetricsLog(tmp_path).write(1, values)
    [line] = MetricsLog(tmp_path).read()
    return comparable(line)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (1, 1),
        (0.1, 0.1),
        (True, True),
        (None, None),
        ("text", "text"),
        (np.float32(0.1), 0.10000000149011612),
        (np.float64(0.1), 0.1),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(2.5, np.float32), 2.5),
        (np.array([[1, 2]], np.int8), [[1, 2]]),
        (np.array([1.0, np.nan]), [1.0, None]),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
        (float("nan"), None),
        (float("-inf"), None),
        (np.float32("inf"), None),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        ({"b": np.float32(1), "a": (1, float("nan"))}, {"a": [1, None], "b": 1.0}),
        (object(), None),
        (10**400, 10**400),
    ],
)
def test_values_become_plain_json(tmp_path: Path, value: Any, plain: Any) -> None:
    found = read_back(tmp_path, {"x": value})["x"]
    assert found == plain and type(found) is type(plain)


def test_a_nan_spoils_no_other_metric(tmp_path: Path) -> None:
    found = read_back(tmp_path, {"loss": float("nan"), "reward": 0.5, "many": np.array([np.inf, 1.0])})
    assert found == {"step": 1, "kind": "train", "loss": None, "many": [None, 1.0], "reward": 0.5}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_order_of_keys_does_not_depend_on_the_writer(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"b": 1, "a": 2, "step": 99, "kind": "odd"})
    log.write(2, {"a": 2, "b": 1}, kind="eval")
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert list(first) == list(second) == ["step", "kind", "a", "b", "time/at"]
    assert (first["step"], first["kind"]) == (1, "train")
    assert (second["step"], second["kind"]) == (2, "eval")


def test_equal_runs_compare_equal_aside_from_times(tmp_path: Path) -> None:
    a = MetricsLog(tmp_path / "a").write(1, {"loss": 0.5, "time/step": 1.0})
    b = MetricsLog(tmp_path / "b").write(1, {"loss": 0.5, "time/step": 2.0})
    assert a != b
    assert comparable(a) == comparable(b) == {"step": 1, "kind": "train", "loss": 0.5}


def test_a_line_is_there_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        line = log.write(step, {"x": step})
        assert MetricsLog(tmp_path).read()[-1] == line


def test_text_of_every_script(tmp_path: Path) -> None:
    found = read_back(tmp_path, {"奖励": "مرحبا\u2028🎉\n", "half": "\ud83d"})
    assert found["奖励"] == "مرحبا\u2028🎉\n" and found["half"] == "\ud83d"


# --- resume -----------------------------------------------------------------------------------------------------------


def test_cut_back_keeps_what_the_checkpoint_knew(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 2, 3):
        log.write(step, {"x": step})
    with open(log.path, "ab") as file:
        file.write(b'{"step": 1, "torn')
    log.cut_back(2)
    assert [line["step"] for line in log.read()] == [1, 2, 2]
    log.write(3, {"x": 3})
    assert [line["step"] for line in log.read()] == [1, 2, 2, 3]


def test_without_a_checkpoint_nothing_is_kept(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.cut_back(0)
    assert not log.path.exists()
    log.write(0, {"accuracy": 0.1}, kind="eval")
    log.write(1, {"x": 1})
    log.cut_back(0)
    assert log.read() == []


def test_every_torn_end_is_dropped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"x": 1})
    log.write(2, {"x": "ü"})
    log.close()
    whole = log.path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        log.path.write_bytes(whole[:end])
        assert [line["step"] for line in MetricsLog(tmp_path).read()] == [1]
        writer = MetricsLog(tmp_path)
        writer.write(2, {"x": "again"})
        writer.close()
        assert [line["x"] for line in MetricsLog(tmp_path).read()] == [1, "again"]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"x": 1}', '{"step": "one"}', "\x00\x00"])
def test_damage_elsewhere_is_an_error(tmp_path: Path, bad: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(CheckpointError, match="line 2") as error:
        MetricsLog(tmp_path).read()
    assert "\n" not in str(error.value)


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_a_random_moment_loses_no_line_that_was_written(tmp_path: Path, seed: int) -> None:
    script = """
import itertools
from relax_core.metrics import MetricsLog
log = MetricsLog(folder / "run")
for step in itertools.count(1):
    log.write(step, {"text": "x" * (step * 37 % 20_000), "last": step})
    done(step)
"""
    last = int(killed_after(script, tmp_path / "c", random.Random(seed).uniform(0, 0.1))[-1])
    found = MetricsLog(tmp_path / "c" / "run").read()
    assert [line["last"] for line in found] == list(range(1, len(found) + 1))
    assert len(found) in (last, last + 1)


def test_a_kill_while_cutting_back_keeps_the_lines(tmp_path: Path) -> None:
    setup = "from relax_core.metrics import MetricsLog"
    script = """
log = MetricsLog(folder)
for step in range(1, 4):
    log.write(step, {})
log.cut_back(2)
done("cut")
log.write(3, {})
"""
    folders = killed_at_each_operation(setup, script, tmp_path)
    assert len(folders) > 4
    found = [[line["step"] for line in MetricsLog(folder).read()] for folder in folders]
    assert found[-1] == [1, 2, 3]
    assert all(steps in ([], [1, 2, 3], [1, 2]) for steps in found)
    assert [1, 2] in found


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_curves_are_those_of_the_metrics(tmp_path: Path) -> None:
    log, curves = MetricsLog(tmp_path), EventFiles(tmp_path / "tensorboard")
    for step in (1, 2):
        curves.write(log.write(step, {"loss": step / 2, "none": float("nan"), "list": [1.0], "time/step": 0.25}))
    curves.close()
    assert scalars(tmp_path / "tensorboard") == {
        "loss": [(1, 0.5), (2, 1.0)],
        "time/step": [(1, 0.25), (2, 0.25)],
    }


def test_curves_are_made_anew_on_resume(tmp_path: Path) -> None:
    log, curves = MetricsLog(tmp_path), EventFiles(tmp_path / "tensorboard")
    for step in (1, 2, 3):
        curves.write(log.write(step, {"loss": step}))
    curves.flush()
    log.cut_back(2)
    again = EventFiles(tmp_path / "tensorboard")  # the first was killed
    again.rebuild(log.read())
    again.write(log.write(3, {"loss": 30}))
    again.close()
    assert scalars(tmp_path / "tensorboard") == {"loss": [(1, 1.0), (2, 2.0), (3, 30.0)]}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_neither_torch_nor_tensorflow_is_needed(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from relax_core.metrics import MetricsLog
from relax_core.tensorboard import EventFiles
assert not {"numpy", "tensorboard"} & set(sys.modules)
log, curves = MetricsLog(Path(sys.argv[1])), EventFiles(Path(sys.argv[1]))
curves.write(log.write(1, {"loss": 0.5}))
curves.close()
assert not {"torch", "tensorflow"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
