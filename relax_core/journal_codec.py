"""A journal entry as the bytes of one NumPy archive and back, exact to the bit and a few milliseconds for 256 rows.

Columns of equal type are concatenated over the rows, with one table of shapes each; everything else is one JSON text
in the same archive. Shape legend: R rows of a piece, D dimensions of its arrays.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relax_core import serial
from relax_core.errors import DataError
from relax_core.interfaces import Row
from relax_core.journal import JournalEntry, RecordedCut
from relax_core.types import Group, MediaRef, Sample, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from relax_core.serial import Decode, Load

FORMAT = 1
HEAD = "entry.json"
SAMPLE_FIELDS = ("ids", "mask", "logprobs", "versions", "media", "positions")


# --- writing ----------------------------------------------------------------------------------------------------------


def encode(entry: JournalEntry, decode: Decode) -> bytes:
    """The archive of an entry. ``decode`` gives the hash of media that are not decoded yet."""
    import numpy as np

    arrays, pieces = _split(entry.rows, _places(entry.groups))
    group_index = {group.id: i for i, group in enumerate(entry.groups)}
    row_index = {row.id: i for i, row in enumerate(entry.rows)}
    samples = _sample_rows(entry.rows)
    head = {
        "format": FORMAT,
        "step": entry.step,
        "groups": [_group_to_json(group, samples, decode) for group in entry.groups],
        "rows": [row.id for row in entry.rows],
        "row_groups": [group_index[row.group] for row in entry.rows],
        "columns": pieces,
        "cuts": [[[row_index[id] for id in cut.rows], cut.last] for cut in entry.cuts],
        "updates": entry.updates,
        "skipped": entry.skipped,
        "metrics": serial.pack(entry.metrics),
    }
    arrays[HEAD] = np.frombuffer(serial.dumps(head), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # its keyword allow_pickle is no array
    return buffer.getvalue()


def _places(groups: Sequence[Group]) -> dict[Any, list[int]]:
    """Where groups and trajectories are: group id -> [g], (group id, member) -> [g, t]."""
    found: dict[Any, list[int]] = {}
    for g, group in enumerate(groups):
        found[group.id] = [g]
        for t, trajectory in enumerate(group.trajectories):
            found[group.id, trajectory.member] = [g, t]
    return found


def _sample_rows(rows: Sequence[Row]) -> dict[tuple[str, int, int], int]:
    """(group id, member, number of the sample) -> its row. A row id ends in the number of its sample."""
    found: dict[tuple[str, int, int], int] = {}
    for i, row in enumerate(rows):
        number = row.id.rpartition("/")[2]
        if "trajectory" in row.columns and number.isdigit():
            found[row.group, row.columns["trajectory"].member, int(number)] = i
    return found


def _split(rows: Sequence[Row], places: Mapping[Any, list[int]]) -> tuple[dict[str, NDArray[Any]], list[Any]]:
    """All cells by column and type: [column, kind, row numbers or null for all, values]; arrays go into the archive."""
    import numpy as np

    arrays: dict[str, NDArray[Any]] = {}
    pieces: list[Any] = []
    for name in dict.fromkeys(name for row in rows for name in row.columns):
        cells: dict[Any, tuple[list[int], list[Any]]] = {}
        numbers = [i for i, row in enumerate(rows) if name in row.columns]
        values = [rows[i].columns[name] for i in numbers]
        kinds = list(map(_kind, values))
        if len(set(kinds)) == 1:
            cells[kinds[0]] = numbers, values
        else:
            for kind, i, value in zip(kinds, numbers, values, strict=True):
                found = cells.setdefault(kind, ([], []))
                found[0].append(i)
                found[1].append(value)
        for kind, (numbers, values) in cells.items():
            where = None if len(numbers) == len(rows) else numbers
            if isinstance(kind, str):
                owners = [rows[i].group for i in numbers]
                cells_json = [_cell_to_json(kind, v, owner, places) for v, owner in zip(values, owners, strict=True)]
                pieces.append([name, kind, where, cells_json])
                continue
            stem = f"{len(pieces)}.{name}"
            arrays[f"{stem}.data"] = np.concatenate([v.reshape(-1) for v in values])
            arrays[f"{stem}.shapes"] = np.array([v.shape for v in values], np.int64).reshape(len(values), -1)
            pieces.append([name, "array", where, stem])
    return arrays, pieces


def _kind(value: Any) -> str | tuple[Any, int]:
    """How a cell is stored: the name of a kind, or (dtype, dimensions) of an array."""
    kind = type(value)
    if kind is float:
        return "value"
    if kind.__module__ == "numpy" and value.ndim and value.dtype.kind in "biufc":
        return value.dtype, value.ndim
    if isinstance(value, Trajectory):
        return "trajectory"
    if isinstance(value, Group):
        return "group"
    if isinstance(value, tuple) and all(isinstance(v, MediaRef) for v in value):
        return "media"
    return "value"


def _cell_to_json(kind: str, value: Any, owner: str, places: Mapping[Any, list[int]]) -> Any:
    if kind == "value":
        return serial.pack(value)
    if kind == "media":
        return serial.refs_to_json(value)
    key = value.id if kind == "group" else (owner, value.member)
    if key not in places:
        raise DataError(f"journal: {kind} {key!r} of a row is not among the entry's groups")
    return places[key]


def _group_to_json(group: Group, rows: Mapping[tuple[str, int, int], int], decode: Decode) -> dict[str, Any]:
    return {
        "id": group.id,
        "serial": group.serial,
        "attempt": group.attempt,
        "task": serial.task_to_json(group.task, decode),
        "trajectories": [
            [
                serial.trajectory_to_json(t, decode),
                [
                    _sample_to_json(sample) if (row := rows.get((group.id, t.member, i))) is None else row
                    for i, sample in enumerate(t.samples)
                ],
            ]
            for t in group.trajectories
        ],
    }


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    """A sample that is no row: its trajectory failed, or nothing of it was sampled."""
    values = (serial.pack(list(getattr(sample, name))) for name in SAMPLE_FIELDS[:4])
    return dict(
        zip(SAMPLE_FIELDS, (*values, serial.refs_to_json(sample.media), serial.pack(sample.positions)), strict=True)
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def decode(content: bytes, load: Load) -> JournalEntry:
    """The entry of an archive. Raises DataError for another format or fields that do not fit."""
    import numpy as np

    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = dict(archive)
    head = json.loads(arrays.pop(HEAD).tobytes())
    if head.get("format") != FORMAT:
        raise DataError(f"it has format {head.get('format')}; this version of Relax reads format {FORMAT}")
    cells: list[dict[str, Any]] = [{} for _ in head["rows"]]
    pointers = _join(cells, head["columns"], arrays)
    groups = [_group_from_json(g, cells, load) for g in head["groups"]]
    for name, i, place in pointers:
        group = groups[place[0]]
        cells[i][name] = group.trajectories[place[1]] if len(place) > 1 else group
    rows = [
        Row(id, groups[g].id, columns) for id, g, columns in zip(head["rows"], head["row_groups"], cells, strict=True)
    ]
    return JournalEntry(
        step=head["step"],
        groups=groups,
        rows=rows,
        cuts=tuple(RecordedCut(tuple(rows[i].id for i in numbers), last) for numbers, last in head["cuts"]),
        updates=head["updates"],
        skipped=head["skipped"],
        metrics=serial.unpack(head["metrics"]),
    )


def _join(cells: list[dict[str, Any]], pieces: list[Any], arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Put every cell back into its row; what points to groups and trajectories is returned: (column, row, place)."""
    import numpy as np

    pointers: list[Any] = []
    for name, kind, where, values in pieces:
        numbers = range(len(cells)) if where is None else where
        if kind == "array":
            shapes = arrays[f"{values}.shapes"]
            ends = np.cumsum(shapes.prod(axis=1))
            parts = np.split(arrays[f"{values}.data"], ends[:-1])
            values = [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
        elif kind == "media":
            values = [serial.refs_from_json(v) for v in values]
        elif kind == "value":
            values = [serial.unpack(v) for v in values]
        else:
            pointers += [(name, i, place) for i, place in zip(numbers, values, strict=True)]
            continue
        for i, value in zip(numbers, values, strict=True):
            cells[i][name] = value
    return pointers


def _group_from_json(data: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], load: Load) -> Group:
    names = ("id", "serial", "attempt", "task", "trajectories")
    id, number, attempt, task_data, played = serial.fields(data, "group", names)
    task = serial.task_from_json(task_data, load)
    trajectories = []
    for trajectory, samples in played:
        restored = [_sample_of_row(cells[s]) if isinstance(s, int) else _sample_from_json(s) for s in samples]
        trajectories.append(serial.trajectory_from_json(trajectory, task, restored, load))
    return Group(id, number, task, attempt, trajectories)


def _sample_of_row(columns: Mapping[str, Any]) -> Sample:
    ids, mask, logprobs, versions = (columns[name].tolist() for name in ("tokens", "mask", "logprobs", "versions"))
    return Sample(ids, mask, logprobs, versions, columns.get("media", ()), columns.get("positions"))


def _sample_from_json(data: Mapping[str, Any]) -> Sample:
    ids, mask, logprobs, versions, media, positions = serial.fields(data, "sample", SAMPLE_FIELDS)
    return Sample(ids, mask, serial.unpack(logprobs), versions, serial.refs_from_json(media), serial.unpack(positions))
