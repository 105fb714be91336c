"""Rows as the tensors that a loss sees: each row's window, left-aligned.

Legend: B rows, T window width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from relax_core.errors import DataError
from relax_core.interfaces import Batch, Row
from relax_core.torch.layout import Piece

_OWN = frozenset({"tokens", "mask", "logprobs", "old_logprobs", "advantages"})
"""Per-token columns that have a field of their own in a batch."""


def make_batch(step: int, rows: Sequence[Row], pieces: Sequence[Piece], device: torch.device) -> Batch:
    """The batch of a micro-batch's rows. Raises DataError when only some of them have a column."""
    starts = [piece.start for piece in pieces]
    width = max(len(piece.ids) - piece.start for piece in pieces)

    def window(name: str, dtype: type[np.generic] = np.float32) -> torch.Tensor:
        grid_BT = np.zeros((len(rows), width), dtype)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if row.columns.get(name) is None:
                raise DataError(f"row {row.id}: lacks the column {name!r}, which other rows of its step have")
            values = row.columns[name][start:]
            grid_BT[i, : len(values)] = values
        return torch.from_numpy(grid_BT).to(device)

    def numbers(name: str) -> torch.Tensor:
        return torch.tensor([float(row.columns[name]) for row in rows], dtype=torch.float32, device=device)

    has_old = any(row.columns.get("old_logprobs") is not None for row in rows)
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
        columns={name: window(name) for name in _others(rows)},
    )


def numbered(names: Sequence[str]) -> list[int]:
    """Each name's number, counted from 0 in the order in which they first come."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _others(rows: Sequence[Row]) -> list[str]:
    """The names of all further columns with a float for each token."""
    found: dict[str, None] = {}
    for row in rows:
        for name, value in row.columns.items():
            if name not in _OWN and _is_per_token(value, len(row.columns["tokens"])):
                found[name] = None
    return sorted(found)


def _is_per_token(value: object, length: int) -> bool:
    return isinstance(value, np.ndarray) and value.shape == (length,) and value.dtype.kind == "f"


def on_row(window_T: NDArray[np.float32], piece: Piece) -> NDArray[np.float32]:
    """Values of a row's window as a column of the row: float32, as long as its tokens."""
    column = np.zeros(len(piece.ids), np.float32)
    column[piece.start :] = window_T[: len(piece.ids) - piece.start]
    return column
