"""How rows travel between the bus and its clients: as columns of plain lists, which pickle much faster than objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from relax_plugin_ray.boxes import Box
from relax_plugin_ray.references import Cell


class Column(NamedTuple):
    """The values of one column. ``plain``: those that are no cells, None if all are; ``boxes`` is empty if none is.

    ``boxes`` number the boxes of the table, -1: not a cell.
    """

    plain: list[Any] | None
    boxes: list[int]
    indices: list[int]
    nbytes: list[int]


class Block(NamedTuple):
    """Rows with the same columns. ``places``: among all rows of the table; None: these are all, in order."""

    places: list[int] | None
    ids: list[str]
    groups: list[str]
    names: tuple[str, ...]
    columns: list[Column]


class Table(NamedTuple):
    boxes: list[Box]
    blocks: list[Block]


RawRow = tuple[str, str, dict[str, Any]]
"""A row's id, its group, and what ``Packed`` takes."""


def to_table(rows: Sequence[RawRow]) -> Table:
    boxes: dict[int, int] = {}
    kept: list[Box] = []
    places: dict[tuple[str, ...], list[int]] = {}
    for i, (_, _, raw) in enumerate(rows):
        places.setdefault(tuple(raw), []).append(i)
    blocks = []
    for names, found in places.items():
        some = rows if len(places) == 1 else [rows[i] for i in found]
        columns = [_column([raw[name] for _, _, raw in some], boxes, kept) for name in names]
        ids, groups = [row[0] for row in some], [row[1] for row in some]
        blocks.append(Block(None if len(places) == 1 else found, ids, groups, names, columns))
    return Table(kept, blocks)


def _column(values: list[Any], boxes: dict[int, int], kept: list[Box]) -> Column:
    plain: list[Any] = []
    numbers, indices, nbytes = [], [], []
    for value in values:
        if type(value) is Cell:
            box = value.box
            number = boxes.get(id(box))
            if number is None:
                number = boxes[id(box)] = len(kept)
                kept.append(box)
            numbers.append(number)
            indices.append(value.index)
            nbytes.append(value.nbytes)
        else:
            plain.append(value)
            numbers.append(-1)
    if len(plain) == len(values):
        return Column(plain, [], [], [])
    return Column(plain or None, numbers, indices, nbytes)


def _values(column: Column, boxes: list[Box]) -> Iterable[Any]:
    plain, numbers, indices, nbytes = column
    if not numbers:
        return plain or []
    if plain is None:
        return [Cell(boxes[n], i, size) for n, i, size in zip(numbers, indices, nbytes, strict=True)]
    rest, cells = iter(plain), iter(zip(indices, nbytes, strict=True))
    return [next(rest) if n < 0 else Cell(boxes[n], *next(cells)) for n in numbers]


def from_table(table: Table) -> list[RawRow]:
    result: list[Any] = []
    for places, ids, groups, names, columns in table.blocks:
        values = [_values(column, table.boxes) for column in columns]
        raws = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] if names else [{} for _ in ids]
        rows = list(zip(ids, groups, raws, strict=True))
        if places is None:
            return rows
        result += zip(places, rows, strict=True)
    return [row for _, row in sorted(result, key=lambda pair: pair[0])]
