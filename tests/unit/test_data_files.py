"""Which files a path means: files, patterns, folders, hub folders, and what ``datasets`` saved to disk."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from relax_core.errors import DataError
from relax_core.types import Audio, Image, user
from relax_envs.data.columns import Columns
from relax_envs.data.files import find
from relax_envs.data.tasks import DataTasks, Source
from relax_envs.single_turn import SingleTurn

datasets.disable_progress_bars()


def lines(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def table(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": list(prompts)}), path)
    return path


def tasks_of(path: Path, columns: Columns | None = None, hf_split: str | None = None) -> DataTasks:
    source = Source(path=path, hf_split=hf_split, columns=columns)
    found = SingleTurn(SingleTurn.Config(data=source, need_answer=False)).tasks("train")
    assert isinstance(found, DataTasks)
    return found


def prompts(path: Path, hf_split: str | None = None) -> list[str]:
    return [task.messages[0].text for task in tasks_of(path, hf_split=hf_split)]


def refused(path: Path, hf_split: str | None = None) -> str:
    with pytest.raises(DataError) as error:
        tasks_of(path, hf_split=hf_split)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


# --- files and patterns -------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", "a")
    said = refused(tmp_path / "trian.jsonl")
    assert said == (
        f"no such file or folder (looked in {Path.cwd()}); did you mean '{tmp_path / 'train.jsonl'}'?: check the path"
    )
    assert refused(tmp_path / "deep" / "x.jsonl").startswith("no such file or folder")
    assert refused(tmp_path / "*.parquet") == f"no file matches (looked in {Path.cwd()}): check the pattern"
    (tmp_path / "folder").mkdir()
    assert refused(tmp_path / "folder").startswith("no data file in this folder: .jsonl, .json, .parquet and .arrow")


@pytest.mark.parametrize("name", ["data.jsonl", "data.ndjson", "data.data", "data", "[data].jsonl", "data.JSONL"])
def test_a_file_of_lines_by_any_name(name: str, tmp_path: Path) -> None:
    assert prompts(lines(tmp_path / name, "a", "b")) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [("a.csv", "write it as .jsonl or .parquet"), ("a.jsonl.gz", "unpack it"), ("a.tar", "unpack it")],
)
def test_files_that_are_not_read(name: str, advice: str, tmp_path: Path) -> None:
    assert refused(lines(tmp_path / name, "a")) == f"{Path(name).suffix} files are not read: {advice}"


@pytest.mark.parametrize(
    ("head", "advice"),
    [
        (b"PAR1", "a Parquet file: name it .parquet"),
        (b"ARROW1", "an Arrow file: name it .arrow"),
        (b"\xff\xff\xff\xff", "an Arrow file: name it .arrow"),
        (b"\x1f\x8b\x08", "compressed: unpack it"),
    ],
)
def test_files_of_another_format_than_their_name_says(head: bytes, advice: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(head + b"\0" * 20)
    assert refused(tmp_path / "data.jsonl") == f"not lines of JSON, but {advice}"


def test_a_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"):
        lines(tmp_path / name, name, "x")
    (tmp_path / "folder.jsonl").mkdir()
    assert prompts(tmp_path / "*.jsonl") == ["a.jsonl", "x", "b.jsonl", "x"]
    assert prompts(tmp_path / "**" / "*.jsonl")[::2] == ["a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl"]
    assert prompts(tmp_path / "[ab].jsonl")[::2] == ["a.jsonl", "b.jsonl"]
    tasks = tasks_of(tmp_path / "**" / "*.jsonl")
    assert [task.id for task in tasks] == [
        f"{name}:{i}" for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl", "deep/er/d.jsonl") for i in (1, 2)
    ]
    assert tasks.where(5) == f"{tmp_path}/deep/c.jsonl:2"


def test_media_lie_beside_the_file_that_names_them(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(b"x")
        (tmp_path / folder / "data.jsonl").write_text('{"prompt": "<image>", "images": ["a.png"]}')
    found = tasks_of(tmp_path / "*" / "data.jsonl")
    assert [task.messages[0] for task in found] == [user(Image(tmp_path / f / "a.png")) for f in ("x", "y")]


def test_files_of_several_formats(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "a")
    table(tmp_path / "b.parquet", "b")
    said = "files of several formats (a.jsonl, b.parquet): choose by a pattern such as '*.jsonl'"
    assert refused(tmp_path / "*") == refused(tmp_path) == said
    assert prompts(tmp_path / "*.jsonl") == ["a"]


def test_one_file_has_no_split(tmp_path: Path) -> None:
    said = "hf_split 'train' chooses from a folder, and this is one file: leave it out"
    assert refused(lines(tmp_path / "a.jsonl", "a"), "train") == said


def test_parquet_files_behind_each_other(tmp_path: Path) -> None:
    for i in range(3):
        table(tmp_path / f"train-0000{i}-of-00003.parquet", f"{i}a", f"{i}b")
    tasks = tasks_of(tmp_path)
    assert [task.messages[0].text for task in tasks] == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert tasks[3].id == "train-00001-of-00003.parquet:2"
    assert tasks.where(3) == f"{tmp_path}/train-00001-of-00003.parquet:2"
    assert sorted(tasks.order(np.random.default_rng(0))) == list(range(6))


def test_a_file_without_a_column_is_named(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", "a")
    pq.write_table(pa.table({"question": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"/b\.parquet: columns\.prompt: no column 'prompt'"):
        tasks_of(tmp_path, Columns(prompt="prompt"))


# --- folders of a hub ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        {"train": "data/train-00000-of-00001.parquet", "test": "data/test-00000-of-00001.parquet"},
        {"train": "train.parquet", "test": "test.parquet"},
        {"train": "train/0000.parquet", "test": "test/0000.parquet"},
        {"train": "default/train/0000.parquet", "test": "default/test/0000.parquet"},
        {"train": "my_train_set.parquet", "test": "my-test-set.parquet"},
        {"train": "data/x.train.parquet", "test": "data/x.eval.parquet"},
    ],
)
def test_splits(names: dict[str, str], tmp_path: Path) -> None:
    for split, name in names.items():
        table(tmp_path / name, split)
    (tmp_path / "README.md").write_text("# about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    table(tmp_path / ".cache" / "train.parquet", "hidden")
    assert prompts(tmp_path, "train") == ["train"] and prompts(tmp_path, "test") == ["test"]
    assert sorted(prompts(tmp_path, "all")) == ["test", "train"]
    assert refused(tmp_path) == "several splits: choose one by hf_split: " + ", ".join(
        dict.fromkeys(sorted(names, key=lambda split: names[split]))
    )
    assert refused(tmp_path, "trian").startswith("no split 'trian'; did you mean 'train'?: choose one by hf_split")


def test_other_words_for_splits(tmp_path: Path) -> None:
    table(tmp_path / "training.parquet", "t")
    table(tmp_path / "dev.parquet", "v")
    for split, expected in (("train", "t"), ("training", "t"), ("validation", "v"), ("val", "v"), ("dev", "v")):
        assert prompts(tmp_path, split) == [expected]


def test_splits_of_ones_own(tmp_path: Path) -> None:
    for split in ("train_sft", "train_gen", "hard"):
        table(tmp_path / "data" / f"{split}-00000-of-00001.parquet", split)
        assert prompts(tmp_path, split) == [split]
    assert refused(tmp_path, "train").startswith("no split 'train'; did you mean 'train_")


def test_no_split_is_needed_where_there_is_one(tmp_path: Path) -> None:
    table(tmp_path / "data" / "train-00000-of-00001.parquet", "a")
    assert prompts(tmp_path) == ["a"]
    table(tmp_path / "other" / "more.parquet", "b")
    assert prompts(tmp_path) == ["a", "b"], "files that speak of no split go along"
    assert prompts(tmp_path, "train") == ["a"]


def test_a_split_of_a_pattern(tmp_path: Path) -> None:
    for name in ("train-a", "train-b", "test-a"):
        table(tmp_path / f"{name}.parquet", name)
    assert prompts(tmp_path / "*.parquet", "train") == ["train-a", "train-b"]
    assert refused(tmp_path / "*.parquet") == "several splits: choose one by hf_split: test, train"
    assert prompts(tmp_path / "train-*.parquet") == ["train-a", "train-b"]


def test_subsets(tmp_path: Path) -> None:
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            table(tmp_path / subset / f"{split}-00000-of-00001.parquet", f"{subset} {split}")
    said = refused(tmp_path, "train")
    assert said == f"several subsets of a data set: name the folder of one: {tmp_path}/main, {tmp_path}/socratic"
    assert prompts(tmp_path / "main", "train") == ["main train"]


def test_json_beside_lines_describes_them(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", "a")
    (tmp_path / "config.json").write_text("{}")
    assert prompts(tmp_path) == ["a"]


def test_links_are_followed(tmp_path: Path) -> None:
    table(tmp_path / "blobs" / "abc", "a")
    (tmp_path / "snapshot" / "data").mkdir(parents=True)
    os.symlink(tmp_path / "blobs" / "abc", tmp_path / "snapshot" / "data" / "train-00000-of-00001.parquet")
    assert prompts(tmp_path / "snapshot") == ["a"]


# --- saved by ``datasets`` ----------------------------------------------------------------------------------------


def jpeg(grey: int) -> bytes:
    content = io.BytesIO()
    Pillow.new("L", (8, 8), grey).save(content, "JPEG")
    return content.getvalue()


def saved(decode: bool = True) -> Any:
    images = [{"bytes": jpeg(i), "path": None} for i in (10, 20)] + [None, {"bytes": jpeg(30), "path": "x.jpg"}]
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "image": datasets.Image(decode=decode),
            "audios": datasets.List(datasets.Audio(decode=decode)),
            "n": datasets.Value("int64"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "answer": datasets.Value("large_string"),
        }
    )
    columns = {
        "prompt": ["<image> 0", "<image> 1", "2", "<image><audio> 3"],
        "image": images,
        "audios": [[], None, [], [{"bytes": b"RIFF", "path": None}]],
        "n": [0, None, 2, 3],
        "label": [0, 1, 0, None],
        "answer": ["a", "b", "c", "d"],
    }
    return datasets.Dataset(pa.Table.from_pydict(columns, schema=features.arrow_schema))  # nothing is encoded anew


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_data_set(decode: bool, shards: int, tmp_path: Path) -> None:
    saved(decode).save_to_disk(tmp_path / "set", num_shards=shards)
    tasks = tasks_of(tmp_path / "set")
    assert [task.messages for task in tasks] == [
        (user(Image(jpeg(10)), " 0"),),
        (user(Image(jpeg(20)), " 1"),),
        (user("2"),),
        (user(Image(jpeg(30)), Audio(b"RIFF"), " 3"),),
    ]
    assert [task.metadata for task in tasks] == [
        {"n": 0, "label": 0},
        {"label": 1},
        {"n": 2, "label": 0},
        {"n": 3},
    ]
    assert [task.answer for task in tasks] == ["a", "b", "c", "d"]
    assert tasks.where(3).endswith("data-00000-of-00001.arrow:4" if shards == 1 else "data-00002-of-00003.arrow:1")
    assert sorted(tasks.order(np.random.default_rng(0))) == [0, 1, 2, 3]


def test_a_saved_selection(tmp_path: Path) -> None:
    saved().select([3, 1]).save_to_disk(tmp_path / "set")
    assert [task.answer for task in tasks_of(tmp_path / "set")] == ["d", "b"]


@pytest.mark.parametrize("picked", [[2, 0, 3], [9]])
def test_a_selection_that_is_kept_as_indices(picked: list[int], tmp_path: Path) -> None:
    """As older versions saved it."""
    folder = tmp_path / "set"
    saved().save_to_disk(folder)
    indices = pa.table({"indices": pa.array(picked, pa.uint64())})
    with pa.OSFile(str(folder / "indices.arrow"), "wb") as file, pa.ipc.new_stream(file, indices.schema) as writer:
        writer.write_table(indices)
    state = json.loads((folder / "state.json").read_text()) | {"_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    if picked == [9]:
        assert refused(folder).endswith("its indices point beyond its 4 rows: save it again")
        return
    tasks = tasks_of(folder)
    assert [task.answer for task in tasks] == ["c", "a", "d"] and tasks.where(0).endswith(".arrow:3")


def test_a_saved_dict(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": saved(), "hard": saved().select([1])})
    both.save_to_disk(tmp_path / "set")
    assert len(tasks_of(tmp_path / "set", hf_split="train")) == 4
    assert [task.answer for task in tasks_of(tmp_path / "set", hf_split="hard")] == ["b"]
    assert refused(tmp_path / "set") == "several splits: choose one by hf_split: train, hard"
    assert refused(tmp_path / "set", "test") == "no split 'test': choose one by hf_split: train, hard"
    assert refused(tmp_path / "set" / "train", "train").startswith("holds one saved data set without splits")
    datasets.DatasetDict({"only": saved()}).save_to_disk(tmp_path / "one")
    assert len(tasks_of(tmp_path / "one")) == 4


def test_saved_files_by_themselves(tmp_path: Path) -> None:
    saved().save_to_disk(tmp_path / "set")
    assert len(tasks_of(tmp_path / "set" / "data-00000-of-00001.arrow")) == 4
    content = pa.table({"prompt": ["a", "b"]})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=1)
    assert prompts(tmp_path / "file.arrow") == ["a", "b"]


def test_a_saved_data_set_that_is_broken(tmp_path: Path) -> None:
    saved().save_to_disk(tmp_path / "set")
    file = tmp_path / "set" / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    for broken in (b"", b"nonsense", content[:100]):
        file.write_bytes(broken)
        with pytest.raises(
            DataError, match=r"\.arrow: (not a readable Arrow file|the data set is empty)|set: the data"
        ):
            tasks_of(tmp_path / "set")
    file.unlink()
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: not a readable Arrow file"):
        tasks_of(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("{")
    assert "state.json: cannot be read" in refused(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("{}")
    assert "state.json: names no data file" in refused(tmp_path / "set")


def test_a_column_that_a_saved_data_set_lacks(tmp_path: Path) -> None:
    saved().save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=r"columns\.images: column 'image' has no 'byte'; did you mean 'bytes'\?"):
        tasks_of(tmp_path / "set", Columns(images="image.byte"))


def test_files_are_found_in_order(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        lines(tmp_path / f"{name}.jsonl", name)
    assert [path.name for path in find(tmp_path).paths] == ["a.jsonl", "b.jsonl", "c.jsonl"]
