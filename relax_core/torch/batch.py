"""Rows as the tensors that a loss sees: each row's window, left-aligned.

Legend: B rows, T window width, M sampled tokens, K numbers of a token's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relax_core.errors import DataError
from relax_core.interfaces import Batch, Row
from relax_core.torch.layout import Piece

_OWN = frozenset({"tokens", "mask", "logprobs", "old_logprobs", "advantages"})
"""Per-token columns that have a field of their own in a batch."""
_INPUTS = frozenset({"positions"})
"""What the model reads: never a column of a loss, whatever its shape."""


def make_batch(step: int, rows: Sequence[Row], pieces: Sequence[Piece], device: torch.device) -> Batch:
    """The batch of a micro-batch's rows.

    Raises DataError, naming row and column, when only some of them have a column, or have it with another length than
    one number for each token, or one line for each sampled token.
    """
    width = max(len(piece.ids) - piece.start for piece in pieces)

    def window(name: str, dtype: type[np.generic] = np.float32) -> torch.Tensor:
        grid_BT = np.zeros((len(rows), width), dtype)
        for i, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            values = _per_token(row, name)[piece.start :]
            grid_BT[i, : len(values)] = values
        return torch.from_numpy(grid_BT).to(device)

    def wide(name: str) -> torch.Tensor:
        lines_of = wide_column(rows, name)
        grid_BTK = np.zeros((len(rows), width, lines_of[0].shape[1]), lines_of[0].dtype)
        for i, (values_MK, piece) in enumerate(zip(lines_of, pieces, strict=True)):
            grid_BTK[i, piece.sampled - piece.start] = values_MK
        return torch.from_numpy(grid_BTK).to(device)

    def numbers(name: str) -> torch.Tensor:
        return torch.tensor([float(row.columns[name]) for row in rows], dtype=torch.float32, device=device)

    has_old = any(row.columns.get("old_logprobs") is not None for row in rows)
    narrow_names, wide_names = _others(rows)
    return Batch(
        step=step,
        tokens_BT=window("tokens", np.int64),
        mask_BT=window("mask", np.bool_),
        logprobs_BT=window("logprobs"),
        old_logprobs_BT=window("old_logprobs") if has_old else None,
        advantages_BT=window("advantages"),
        weight_B=numbers("weight"),
        units_B=numbers("units"),
        sequence_B=torch.tensor(numbered([row.trajectory for row in rows]), device=device),
        columns={name: window(name) for name in narrow_names} | {name: wide(name) for name in wide_names},
    )


def numbered(names: Sequence[str]) -> list[int]:
    """Each name's number, counted from 0 in the order in which they first come."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


# --- columns with a number for each token -----------------------------------------------------------------------------


def on_row(window_T: NDArray[np.float32], piece: Piece) -> NDArray[np.float32]:
    """Values of a row's window as a column of the row: float32, as long as its tokens."""
    column = np.zeros(len(piece.ids), np.float32)
    column[piece.start :] = window_T[: len(piece.ids) - piece.start]
    return column


def _present(row: Row, name: str) -> NDArray[Any]:
    values: NDArray[Any] | None = row.columns.get(name)
    if values is None:
        raise DataError(f"row {row.id}: lacks the column {name!r}, which other rows of its step have")
    return values


def _per_token(row: Row, name: str) -> NDArray[Any]:
    values, tokens = _present(row, name), len(row.columns["tokens"])
    if values.shape != (tokens,):
        raise DataError(
            f"row {row.id}: its column {name!r} has shape {values.shape}; allowed is ({tokens},), one number for each "
            "token of the row, prompt included"
        )
    return values


# --- columns with a line of numbers for each sampled token ------------------------------------------------------------


def wide_column(rows: Sequence[Row], name: str) -> list[NDArray[Any]]:
    """Of each row (sampled, K): float32, or int64 where the first row's are integers.

    Raises DataError, naming the row, where it is missing, not of that shape, or where K differs from the first row's.
    """
    first = _present(rows[0], name)
    dtype = np.float32 if first.dtype.kind == "f" else np.int64
    found = []
    for row in rows:
        values, sampled = _present(row, name), int(np.count_nonzero(row.columns["mask"]))
        if values.ndim != 2 or len(values) != sampled:
            raise DataError(
                f"row {row.id}: its column {name!r} has shape {values.shape}; allowed is ({sampled}, K), one line for "
                "each sampled token"
            )
        if values.shape[1] != first.shape[1]:
            raise DataError(
                f"row {row.id}: its column {name!r} has {values.shape[1]} numbers for a token, row {rows[0].id} has "
                f"{first.shape[1]}; rows of a step need equally many"
            )
        found.append(values.astype(dtype, copy=False))
    return found


def line_count(row: Row, name: str) -> int:
    """The K of a row's column (sampled, K)."""
    return int(_present(row, name).shape[1])


def lines(values_MK: NDArray[Any], pieces: Sequence[Piece]) -> list[NDArray[Any]]:
    """The lines of all sampled tokens as one array (sampled, K) for each row."""
    return [part.copy() for part in np.split(values_MK, np.cumsum([len(piece.sampled) for piece in pieces])[:-1])]


def _others(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The names of all further columns: those with a float for each token, and those with a line for a sampled one.

    By kind and dimensions: a stage's column of a wrong length is found when it is read, instead of left out here.
    """
    narrow, wide = set(), set()
    for row in rows:
        for name, value in row.columns.items():
            if name in _OWN | _INPUTS or not isinstance(value, np.ndarray):
                continue
            if value.ndim == 1 and value.dtype.kind == "f":
                narrow.add(name)
            elif value.ndim == 2 and value.dtype.kind in "fiu":
                wide.add(name)
    return sorted(narrow), sorted(wide)
