"""The journal: exact to the bit, checked when read, cut back on resume, whole whatever kills the writer."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core import serial
from relax_core.errors import CheckpointError, DataError
from relax_core.interfaces import Row
from relax_core.journal import Journal, JournalEntry
from relax_core.testing.kills import killed_at_each_operation, said
from relax_core.testing.plays import journal_entry, picture, played_group, rows_of_groups
from relax_core.types import (
    Decoded,
    Group,
    Image,
    MediaKind,
    MediaPart,
    PlayError,
    Sample,
    Stop,
    Task,
    Text,
    ToolCall,
    ToolResult,
    Turn,
    message,
)


def undecodable(part: MediaPart) -> Decoded:
    raise DataError("nothing to decode here")


def there_and_back(tmp_path: Path, entry: JournalEntry) -> JournalEntry:
    journal = Journal(tmp_path, keep_steps=10)
    written = journal.write(entry)
    found = Journal(tmp_path, keep_steps=10).read(entry.step, lambda kind, hash: picture(7))
    assert found.checksum == written.checksum and len(found.checksum) == 64
    return found


def as_json(group: Group) -> Any:
    """A group but for its samples, in a form that compares."""
    return [
        group.id,
        group.serial,
        group.attempt,
        serial.task_to_json(group.task, undecodable),
        [serial.trajectory_to_json(t, undecodable) for t in group.trajectories],
    ]


def assert_same_columns(ours: Row, theirs: Row) -> None:
    assert (ours.id, ours.group) == (theirs.id, theirs.group)
    assert ours.columns.keys() == theirs.columns.keys()
    for name, value in ours.columns.items():
        other = theirs.columns[name]
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape) == (other.dtype, other.shape), name
            assert value.tobytes() == other.tobytes(), name
        elif name == "trajectory":
            assert serial.trajectory_to_json(value, undecodable) == serial.trajectory_to_json(other, undecodable)
        elif name == "group":
            assert value.id == other.id
        else:
            assert value == other, name


def assert_same_samples(ours: Sample, theirs: Sample) -> None:
    assert dataclasses.replace(ours, positions=None) == dataclasses.replace(theirs, positions=None)
    if ours.positions is None or theirs.positions is None:
        assert ours.positions is theirs.positions
    else:
        assert np.array_equal(ours.positions, theirs.positions)


# --- round trip -------------------------------------------------------------------------------------------------------


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    groups = [played_group(0), played_group(1, tokens=7, picture_of=7), played_group(2, members=1)]
    entry = journal_entry(12, groups)
    found = there_and_back(tmp_path, entry)
    for ours, theirs in zip(entry.rows, found.rows, strict=True):
        assert_same_columns(ours, theirs)
    assert [as_json(g) for g in entry.groups] == [as_json(g) for g in found.groups]
    for played, restored in zip(entry.trajectories(), found.trajectories(), strict=True):
        for mine, other in zip(played.samples, restored.samples, strict=True):
            assert_same_samples(mine, other)
    assert (found.step, found.cuts, found.updates, found.skipped) == (12, entry.cuts, 1, 0)
    assert found.metrics == entry.metrics


def test_rows_point_to_the_trajectories_of_the_groups(tmp_path: Path) -> None:
    found = there_and_back(tmp_path, journal_entry(0, [played_group(0), played_group(1)]))
    assert {id(row.columns["trajectory"]) for row in found.rows} == {id(t) for t in found.trajectories()}
    assert all(row.columns["group"] in found.groups for row in found.rows)


def test_odd_floats_keep_their_bits(tmp_path: Path) -> None:
    entry = journal_entry(0, [played_group(0, members=2, tokens=6)])
    odd = np.array([np.nan, np.inf, -0.0, 1e-45, np.float32(0.1), -np.inf], np.float32)
    odd.view(np.uint32)[0] |= 0x1234  # a NaN with a payload
    entry.rows[0].columns["advantages"][:] = odd
    metrics = {"loss": float("nan"), "grad_norm": float("inf"), "tiny": 5e-324, "tenth": 0.1 + 0.2, "none": -0.0}
    found = there_and_back(tmp_path, dataclasses.replace(entry, metrics=metrics))
    assert found.rows[0].columns["advantages"].tobytes() == odd.tobytes()
    assert [repr(v) for v in found.metrics.values()] == [repr(v) for v in metrics.values()]


def test_columns_of_any_kind(tmp_path: Path) -> None:
    extras: list[dict[str, Any]] = [
        {"routed": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "name": "a", "odd": (1, None)},
        {"routed": np.zeros((0, 3, 4), np.uint8), "name": "ü", "odd": np.float32(0.1)},
        {"routed": np.ones((2, 2), np.float64)},  # another type and shape than the others
        {"name": None, "odd": np.bool_(True)},
    ]
    plain = rows_of_groups([played_group(0)])
    rows = [dataclasses.replace(r, columns={**r.columns, **e}) for r, e in zip(plain, extras, strict=True)]
    entry = dataclasses.replace(journal_entry(0, [played_group(0)]), rows=rows)
    for ours, theirs in zip(rows, there_and_back(tmp_path, entry).rows, strict=True):
        assert_same_columns(ours, theirs)


def test_messages_of_every_kind_and_script(tmp_path: Path) -> None:
    group = played_group(0, members=1)
    trajectory = group.trajectories[0]
    call = ToolCall("查询", {"城市": "Zürich", "n": 3, "nested": [None, {"a": 1.5}]}, "call-1")
    result = ToolResult((Text("مرحبا 🎉"), Image(picture(7))), "call-1")
    odd = message("assistant", "line\u2028separator\n\x00, half a pair \ud83d", call)
    trajectory.turns += [Turn((message("tool", result),), odd, Stop.LENGTH, 3, 0)]
    found = there_and_back(tmp_path, journal_entry(0, [group])).trajectories()[0]
    assert found.turns[1].reply == odd
    restored = found.turns[1].prompt[0].parts[0]
    assert isinstance(restored, ToolResult)
    assert restored.parts[0] == result.parts[0]
    image = restored.parts[1]
    assert isinstance(image, Image) and isinstance(image.source, Decoded)
    assert np.array_equal(image.source.data, picture(7).data)


def test_a_group_with_failed_and_many_sampled_trajectories(tmp_path: Path) -> None:
    group = played_group(0, members=3)
    failed, several, abstained = group.trajectories
    failed.error = PlayError("environments.toy", "ValueError", "no such tool")
    failed.stop, failed.rewards, failed.reward, failed.raw_reward = Stop.ERROR, {}, None, None
    several.samples.append(played_group(5, members=1).trajectories[0].samples[0])
    abstained.reward = None
    rows = [row for row in rows_of_groups([group]) if row.columns["trajectory"] is not failed]
    entry = dataclasses.replace(journal_entry(0, [group]), rows=rows, cuts=())
    found = there_and_back(tmp_path, entry)
    assert as_json(found.groups[0]) == as_json(group)
    for ours, theirs in zip(group.trajectories, found.trajectories(), strict=True):
        assert ours.error == theirs.error
        for mine, other in zip(ours.samples, theirs.samples, strict=True):
            assert_same_samples(mine, other)


def test_answers_and_metadata_of_any_kind(tmp_path: Path) -> None:
    metadata = {
        "tuple": (1, "a"),
        "set": {3, 1},
        "bytes": b"\x00\xff",
        "path": Path("a/b"),
        "nan": float("inf"),
        "array": np.arange(3, dtype=np.int16),
        "$tag": {"$set": [1]},
        "keys": {1: "one", None: 2},
    }
    task = Task("t", (message("user", "?"),), answer=(1, 2), metadata=metadata)
    found = serial.task_from_json(serial.task_to_json(task, undecodable), lambda kind, hash: picture(0))
    assert found.answer == (1, 2)
    assert found.metadata.keys() == metadata.keys()
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(found.metadata[key], value) and found.metadata[key].dtype == value.dtype
        else:
            assert (found.metadata[key] == value and type(found.metadata[key]) is type(value)) or key == "set"


def test_an_object_that_json_cannot_hold_does_not_end_the_run(tmp_path: Path) -> None:
    group = played_group(0, members=1)
    task = dataclasses.replace(group.task, metadata={"board": object()})
    group.task = group.trajectories[0].task = task
    found = there_and_back(tmp_path, journal_entry(0, [group])).groups[0].task.metadata["board"]
    assert isinstance(found, serial.Opaque) and found.type == "builtins.object"


# --- media ------------------------------------------------------------------------------------------------------------


def test_media_are_loaded_when_looked_at(tmp_path: Path) -> None:
    loaded: list[tuple[MediaKind, str]] = []

    def load(kind: MediaKind, hash: str) -> Decoded:
        loaded.append((kind, hash))
        return picture(7)

    Journal(tmp_path, 10).write(journal_entry(0, [played_group(0, picture_of=7)]))
    task = Journal(tmp_path, 10).read(0, load).groups[0].task
    [part] = task.messages[0].media()
    assert isinstance(part.source, Decoded)
    assert (part.source.kind, part.source.hash) == ("image", picture(7).hash)
    assert not loaded
    assert part.source.data.shape == (4, 4, 3) and part.source.rate is None
    assert loaded == [("image", picture(7).hash)]  # once


def test_media_that_are_files_are_named_by_their_content(tmp_path: Path) -> None:
    group = played_group(0, members=1)
    path = tmp_path / "picture.png"
    missing = tmp_path / "missing.png"
    messages = (message("user", Image(path), Image(missing)),)
    group.task = group.trajectories[0].task = dataclasses.replace(group.task, messages=messages)

    def decode(part: MediaPart) -> Decoded:
        if part.source == missing:
            raise DataError(f"{missing}: no such file")
        return picture(7)

    Journal(tmp_path / "j", 10, decode).write(journal_entry(0, [group]))
    entry = Journal(tmp_path / "j", 10).read(0, lambda kind, hash: picture(7))
    readable, unreadable = entry.groups[0].task.messages[0].media()
    assert isinstance(readable.source, Decoded) and readable.source.hash == picture(7).hash
    assert unreadable.source == missing


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "flipped"])
def test_a_damaged_entry_is_an_error_in_one_line(tmp_path: Path, damage: str) -> None:
    journal = Journal(tmp_path, 10)
    journal.write(journal_entry(3, [played_group(0)]))
    path = journal.path(3)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(whole[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    for bit in range(0, len(whole) * 8, 997) if damage == "flipped" else [0]:
        if damage == "flipped":
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
        with pytest.raises(CheckpointError) as error:
            journal.read(3)
        assert "step-00000003.npz" in str(error.value) and "\n" not in str(error.value)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_old_entries_are_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, keep_steps=3)
    for step in range(5):
        journal.write(journal_entry(step, []))
    assert journal.steps() == [2, 3, 4]
    later = Journal(tmp_path, keep_steps=2)
    later.write(journal_entry(5, []))
    assert later.steps() == [4, 5]


def test_cut_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 10)
    for step in range(5):
        journal.write(journal_entry(step, []))
    journal.sync()
    journal.cut_back(3)
    assert journal.steps() == [0, 1, 2]
    journal.write(journal_entry(3, []))
    journal.write(journal_entry(3, []))  # again: replaced
    journal.sync()
    assert journal.steps() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="the journal holds steps 0 to 3"):
        journal.read(4)


SETUP = """
import numpy, relax_core.journal_codec
from relax_core.journal import Journal
from relax_core.testing.plays import journal_entry, played_group
"""
WRITER = """
journal = Journal(folder / "j", keep_steps=2)
for step in range(4):
    journal.write(journal_entry(step, [played_group(step)]))
    done(step)
journal.sync()
journal.cut_back(3)
"""


def test_a_kill_at_any_file_operation_leaves_whole_entries(tmp_path: Path) -> None:
    folders = killed_at_each_operation(SETUP, WRITER, tmp_path)
    assert len(folders) > 10
    for folder in folders:
        steps = Journal(folder / "j", 10).steps()
        written = [int(step) for step in said(folder)]
        assert set(written[-2:]) - {3} <= set(steps), folder
        for step in steps:
            assert Journal(folder / "j", 10).read(step).step == step
        journal = Journal(folder / "j", 2)
        journal.cut_back(1)
        journal.write(journal_entry(1, []))
        assert journal.read(1).rows == []
    assert said(folders[-1]) == ["0", "1", "2", "3"]


def test_an_entry_of_256_rows_is_written_in_milliseconds(tmp_path: Path) -> None:
    entry = journal_entry(0, [played_group(i, members=8, tokens=64, picture_of=i % 3) for i in range(32)])
    journal = Journal(tmp_path, 10)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        journal.write(entry)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05  # 8 ms where it was written; machines under load are slower
