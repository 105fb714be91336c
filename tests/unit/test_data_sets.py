"""The environment single_turn: sources with weights, what is held out, ids that are used twice, what is bad."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow
from pydantic import ValidationError

from relax_core.config.validation import validate
from relax_core.content_hash import content_hash
from relax_core.errors import ConfigError, DataError
from relax_core.tasks import Mixture, Ordered, Scanned, TaskStream
from relax_core.types import user
from relax_envs.data.environment import Split
from relax_envs.data.tasks import DataTasks, Source
from relax_envs.single_turn import SingleTurn

GOOD = {"prompt": "two + two ?", "answer": "four"}


def write(path: Path, *rows: Any) -> Path:
    """Rows as JSON, or as they are where they are text."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: Any, **settings: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **settings)
    return path


def environment(**settings: Any) -> SingleTurn:
    """As a run file makes it."""
    return SingleTurn(validate(SingleTurn.Config, json.loads(json.dumps(settings, default=str))))


def reason(tasks: Any, place: int) -> str:
    with pytest.raises(DataError) as error:
        tasks[place]
    assert "\n" not in str(error.value)
    return str(error.value)


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_are_read_from_json() -> None:
    config = SingleTurn.Config.model_validate_json('{"data": "a.jsonl", "split": {"eval": 0.2}}')
    assert config.data == Path("a.jsonl") and config.split == Split(eval=0.2)
    config = validate(SingleTurn.Config, {"data": [{"path": "a", "weight": 2, "urls": ["x.org"]}, "b"]})
    assert config.data == (Source(path=Path("a"), weight=2.0, urls=("x.org",)), Path("b"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data": "a", "eval_data": "b", "split": {"eval": 0.5}}, "eval_data and split are both set"),
        ({"data": {"path": "a", "weight": 0}}, "weight"),
        ({"data": {"path": "a", "hfsplit": "x"}}, "did you mean 'hf_split'?"),
        ({"data": []}, "data"),
        ({}, "data: is missing"),
        ({"data": "a", "columns": {"promt": "x"}}, "columns.promt: unknown key; did you mean 'prompt'?"),
        ({"data": {"path": "a", "columns": {"promt": "x"}}}, "data.columns.promt: unknown key; did you mean 'prompt'?"),
        ({"data": "a", "max_bad_fraction": 0.1}, "max_bad_fraction"),
    ],
)
def test_settings_that_cannot_work(settings: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(SingleTurn.Config, settings)
    assert expected in str(error.value)


def test_the_run_file_is_checked_without_data(tmp_path: Path) -> None:
    config = validate(SingleTurn.Config, {"data": [{"path": "a", "columns": str(tmp_path / "gone.yaml")}]})
    [problem] = SingleTurn.check(config, None)  # type: ignore[arg-type]
    assert "gone.yaml: no such file" in problem


def test_settings_load_without_pyarrow_and_numpy() -> None:
    code = (
        "import sys\n"
        "for name in ('numpy', 'pyarrow', 'httpx', 'PIL', 'torch'): sys.modules[name] = None\n"
        "from relax_envs.single_turn import SingleTurn\n"
        "SingleTurn.Config.model_json_schema()\n"
        "tasks = SingleTurn(SingleTurn.Config.model_validate_json(sys.argv[1])).tasks('train')\n"
        "print(tasks[0].answer)\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps({"data": str(write(Path(folder) / "a.jsonl", GOOD))})
        done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, timeout=60)
        assert done.stdout == "four\n", done.stderr
        table = json.dumps({"data": str(parquet(Path(folder) / "a.parquet", GOOD))})
        done = subprocess.run([sys.executable, "-c", code, table], capture_output=True, text=True, timeout=60)
        assert "DataError: Parquet and Arrow files need pyarrow: pip install 'relax-rl[data]'" in done.stderr


# --- sources ------------------------------------------------------------------------------------------------------


def test_several_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *[{**GOOD, "prompt": f"a{i}"} for i in range(3)])
    b = parquet(tmp_path / "b.parquet", *[{"question": f"b{i}", "solution": "x"} for i in range(9)])
    source = {"path": b, "weight": 3, "columns": {"prompt": "question", "answer": "solution"}}
    found = environment(data=[a, source])
    tasks = found.tasks("train")
    assert isinstance(tasks, Mixture) and list(tasks.parts) == [str(a), str(b)] and len(tasks) == 12
    assert [tasks[i].id for i in (0, 2, 3, 11)] == [f"{a}:1", f"{a}:3", f"{b}:1", f"{b}:9"]
    stream = TaskStream({"mine": (found, 1.0)}, seed=0)
    drawn = [stream.task(stream.candidate(*stream.place(i))).messages[0].text[0] for i in range(12)]
    assert drawn.count("a") == 3 and drawn.count("b") == 9
    assert drawn[:4].count("a") == 1, "every stretch has the mix"


def test_columns_of_the_environment_are_for_sources_without(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"q": "a ?", "answer": 1})
    b = write(tmp_path / "b.jsonl", {"p": "b ?", "answer": 1})
    found = environment(data=[a, {"path": b, "columns": {"prompt": "p"}}], eval_data=a, columns={"prompt": "q"})
    assert [task.messages[0].text for task in found.tasks("train")] == ["a ?", "b ?"]
    assert found.tasks("eval")[0].messages == (user("a ?"),)


def test_one_path_twice(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "1", "other": "2", "answer": "x", "id": "same"})
    found = environment(data=[a, {"path": a, "columns": {"prompt": "other"}}])
    assert [task.id for task in found.tasks("train")] == [f"{a}:same", f"{a} 2:same"]


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(DataError, match=r"b\.jsonl: no such file or folder"):
        environment(data=[a, tmp_path / "b.jsonl"]).tasks("train")


def test_tasks_are_opened_once(tmp_path: Path) -> None:
    found = environment(data=write(tmp_path / "a.jsonl", GOOD), split={"eval": 0.999999})
    opened: list[Any] = []
    threads = [threading.Thread(target=lambda: opened.append(found.tasks("eval"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(opened) == 8 and all(tasks is opened[0] for tasks in opened)


# --- ids ----------------------------------------------------------------------------------------------------------


def test_an_id_that_was_used_before(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": id} for id in ("x", "y", "x", "2", None, "x")]
    path = write(tmp_path / "data.jsonl", *rows[:4], GOOD, rows[5], {**GOOD, "id": 5})
    tasks = environment(data=path).tasks("train")
    assert isinstance(tasks, Scanned) and list(tasks.bad_places) == [2, 5, 6]
    assert [tasks[i].id for i in (0, 1, 3, 4)] == ["x", "y", "2", "5"]
    for place in (2, 5):
        assert reason(tasks, place) == f"{path}:{place + 1}: id 'x' was already used at {path}:1: make it unique"
    assert reason(tasks, 6) == f"{path}:7: id '5' was already used at {path}:5: make it unique", "by its line"


def test_ids_in_several_files_of_a_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", {**GOOD, "id": "x"}, GOOD)
    tasks = environment(data=tmp_path).tasks("train")
    assert [tasks[i].id for i in (0, 1, 3)] == ["x", "a.jsonl:2", "b.jsonl:2"]
    assert reason(tasks, 2) == (
        f"{tmp_path}/b.jsonl:1: id 'x' was already used at {tmp_path}/a.jsonl:1: make it unique"
    )


def test_ids_of_training_and_evaluation_never_meet(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {**GOOD, "id": "eval-1"}, {**GOOD, "id": "x"})
    b = write(tmp_path / "b.jsonl", GOOD, {**GOOD, "id": "x"})
    found = environment(data=a, eval_data=b)
    assert [task.id for task in found.tasks("train")] == ["eval-1", "x"]
    held = found.tasks("eval")
    assert held[1].id == "eval-x"
    assert reason(held, 0) == f"{b}:1: id 'eval-1' was already used at {a}:1: make it unique"
    both = environment(data=[a, b], eval_data=[a, b])
    ids = [task.id for side in ("train", "eval") for task in both.tasks(side)]
    assert len(set(ids)) == len(ids) == 8


def test_many_duplicates(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *[{**GOOD, "id": i % 7} for i in range(3000)])
    tasks = environment(data=path).tasks("train")
    assert isinstance(tasks, DataTasks) and len(tasks.bad_places) == 2993 and tasks.bad_places[0] == 7
    assert reason(tasks, 2999).endswith(f"id '{2999 % 7}' was already used at {path}:{2999 % 7 + 1}: make it unique")


def test_a_wrong_id_is_a_bad_row(tmp_path: Path) -> None:
    tasks = environment(data=write(tmp_path / "data.jsonl", {**GOOD, "id": 1.5}, GOOD)).tasks("train")
    assert isinstance(tasks, Scanned) and list(tasks.bad_places) == [0]
    assert reason(tasks, 0).endswith("data.jsonl:1: 'id' is 1.5; text or a whole number is allowed")


# --- holding out --------------------------------------------------------------------------------------------------


def test_eval_data(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", GOOD, GOOD)
    held = write(tmp_path / "eval.jsonl", {**GOOD, "prompt": "other ?"}, GOOD, "oops")
    found = environment(data=train, eval_data=held)
    assert [task.id for task in found.tasks("train")] == ["1", "2"]
    tasks = found.tasks("eval")
    assert [tasks[i].id for i in (0, 1)] == ["eval-1", "eval-2"] and tasks[0].messages == (user("other ?"),)
    assert isinstance(tasks, Scanned) and list(tasks.bad_places) == [2]
    assert reason(tasks, 2).startswith(f"{held}:3: not JSON")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_split_is_by_content(form: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 250} ?", "answer": str(i)} for i in range(500)]  # every prompt twice
    make: Any = write if form == "jsonl" else parquet
    found = environment(data=make(tmp_path / f"a.{form}", *rows), split={"eval": 0.2})
    train, held = found.tasks("train"), found.tasks("eval")
    assert len(train) + len(held) == 500 and 60 <= len(held) <= 140
    held_hashes = {content_hash(task) for task in held}
    assert not held_hashes & {content_hash(task) for task in train}
    assert {task.id for task in train} | {task.id for task in held} == {str(i) for i in range(1, 501)}
    backwards = environment(data=make(tmp_path / f"b.{form}", *rows[::-1]), split={"eval": 0.2})
    assert {content_hash(task) for task in backwards.tasks("eval")} == held_hashes
    more = environment(data=make(tmp_path / f"c.{form}", *rows), split={"eval": 0.4})
    assert {content_hash(task) for task in more.tasks("eval")} > held_hashes, "a larger share only adds"


def test_split_of_several_sources(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", *[{**GOOD, "prompt": f"{n}{i}"} for i in range(100)]) for n in "ab"]
    found = environment(data=[{"path": path, "weight": 1 + i} for i, path in enumerate(paths)], split={"eval": 0.3})
    train, held = found.tasks("train"), found.tasks("eval")
    assert isinstance(train, Mixture) and isinstance(held, Mixture) and len(train) + len(held) == 200
    assert [weight for _, weight in train.parts.values()] == [1.0, 2.0]
    assert all(len(part) for part, _ in held.parts.values())


def test_split_looks_at_the_media_themselves(tmp_path: Path) -> None:
    rows = []
    for i in range(40):
        Pillow.new("L", (4, 4), i % 20).save(tmp_path / f"{i}.png")
        rows.append({"prompt": "<image> ?", "images": [f"{i}.png"], "answer": str(i)})
    found = environment(data=write(tmp_path / "a.jsonl", *rows), split={"eval": 0.3})
    sides = {str(task.answer): split for split in ("train", "eval") for task in found.tasks(split)}
    assert set(sides.values()) == {"train", "eval"}
    assert all(sides[str(i)] == sides[str(i + 20)] for i in range(20))


def test_bad_rows_stay_in_training(tmp_path: Path) -> None:
    rows: list[Any] = [{**GOOD, "prompt": str(i)} for i in range(100)]
    rows[3], rows[50], rows[99] = "oops", {"prompt": "no answer"}, {**GOOD, "prompt": "<image>"}
    path = write(tmp_path / "a.jsonl", *rows)
    found = environment(data=path, split={"eval": 0.5})
    train, held = found.tasks("train"), found.tasks("eval")
    assert isinstance(train, DataTasks) and isinstance(held, DataTasks)
    assert [train.where(place) for place in train.bad_places] == [f"{path}:{n}" for n in (4, 51, 100)]
    assert held.bad_places == [] and len(list(held)) == len(held)
    for place in train.bad_places:
        assert reason(train, place).startswith(train.where(place))


def test_no_eval(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD)
    with pytest.raises(ConfigError, match=r"data\.jsonl: nothing is held out for evaluation: set eval_data or split"):
        environment(data=path).tasks("eval")
    with pytest.raises(DataError, match=r"data\.jsonl: no row for eval: all 1 are for train: change split"):
        environment(data=path, split={"eval": 1e-9}).tasks("eval")
    with pytest.raises(DataError, match=r"data\.jsonl: no row for train: all 1 are for eval: change split"):
        environment(data=path, split={"eval": 0.999999999}).tasks("train")
    with pytest.raises(ValidationError, match="eval_data and split are both set"):
        SingleTurn.Config(data=path, eval_data=path, split=Split(eval=0.5))


# --- bad rows and order -------------------------------------------------------------------------------------------


def test_rows_without_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"prompt": "?"}, GOOD)
    tasks = environment(data=path).tasks("train")
    assert reason(tasks, 0) == f"{path}:1: no 'answer' (need_answer: false allows it)"
    assert environment(data=path, need_answer=False).tasks("train")[0].answer is None


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_order_of_a_part_is_a_permutation_of_it(form: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} " + "x" * 500, "answer": "a"} for i in range(400)]
    make: Any = write if form == "jsonl" else parquet
    settings = {} if form == "jsonl" else {"row_group_size": 20}
    path = make(tmp_path / f"a.{form}", *rows, **settings)
    found = environment(data={"path": path, "cache_bytes": 50_000}, split={"eval": 0.3})
    for side in ("train", "eval"):
        tasks = found.tasks(side)
        assert isinstance(tasks, Ordered)
        order = tasks.order(np.random.default_rng(0))
        assert sorted(order) == list(range(len(tasks)))
        assert (order == tasks.order(np.random.default_rng(0))).all()
        assert {tasks[int(i)].messages[0].text.split()[0] for i in order} == {
            t.messages[0].text.split()[0] for t in tasks
        }


def test_a_stream_of_tasks_over_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", *[{"prompt": f"{i} ?", "answer": i} for i in range(50)], row_group_size=5)
    stream = TaskStream({"mine": (environment(data=path), 1.0)}, seed=3)
    ids = [stream.task(stream.candidate(*stream.place(i))).id for i in range(100)]
    assert len(set(ids)) == 100 and sorted(ids[:50]) == sorted(f"mine/{i}#0" for i in range(1, 51))
    again = TaskStream({"mine": (environment(data=path), 1.0)}, seed=3)
    assert [again.task(again.candidate(*again.place(i))).id for i in (99, 3, 50)] == [ids[99], ids[3], ids[50]]
