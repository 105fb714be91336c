"""How the rows of a micro-batch lie in one forward: which tokens are computed, where, and which see each other.

Pure numpy. A row's *window* starts at its first sampled token and runs to its end; all before is its *prompt*. Only
what some sampled token depends on is computed: everything up to the token before the last sampled one.

- ``shared``: one flat sequence without padding: each unique prompt once, then the windows of its rows. Token-wise
  layers see exactly the tokens that count; attention alone needs rectangles (see attention.py).
- ``packed``: the same, but every row brings its own prompt.
- ``padded``: one row of the model's input for each row, right-padded: for models whose rows cannot lie in one sequence.

Legend: B rows, T window width, N computed tokens, M sampled tokens, P prompts, W prompt width, L lanes, S lane width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_core.errors import DataError
from relax_core.interfaces import Row, Segment
from relax_core.types import MediaRef

Kind = Literal["shared", "packed", "padded"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a layout needs to know of a row. ``start``: its first sampled token, ``last``: its last one."""

    ids: NDArray[np.int32]
    sampled: Ints
    """Where the sampled tokens are."""
    media: tuple[MediaRef, ...]
    positions: NDArray[np.int32] | None
    start: int
    last: int
    prompt: Hashable
    """Equal for rows with the same prompt."""

    @classmethod
    def of(cls, row: Row) -> Piece:
        """From a row's columns. Raises DataError for a row without sampled tokens, or without a prompt."""
        columns = row.columns
        sampled = np.flatnonzero(columns["mask"])
        if not len(sampled):
            raise DataError(f"row {row.id}: has no sampled token, so nothing of it can be computed; leave it out")
        if sampled[0] == 0:
            raise DataError(
                f"row {row.id}: its first token is a sampled one, and no prompt predicts it; leave the row out"
            )
        ids, media, positions = columns["tokens"], tuple(columns["media"]), columns.get("positions")
        start, last = int(sampled[0]), int(sampled[-1])
        places = None if positions is None else positions[:, :start].tobytes()
        prompt = (ids[:start].tobytes(), places, *((ref.key, ref.start) for ref in media if ref.start < start))
        return cls(ids, sampled, media, positions, start, last, prompt)


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a flat sequence attends. Its tokens are those of the prompts, one after the other, then those of the lanes.

    A prompt's tokens see what lies before them in it. A lane holds one or several windows; a token of it sees the whole
    prompt of its lane (``prompt_L``, -1: none) and what lies before it in its own window.
    """

    prompt_lengths_P: Ints
    lane_lengths_L: Ints
    prompt_L: Ints
    window_N: Ints
    """The row in whose window a token is; -1 in prompts."""
    place_N: Ints
    """Where a token stands in its row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What to run: rows of ``width`` tokens, and where the hidden state of each sampled token's predecessor is found.

    ``source_M`` indexes the hidden states, flattened; ``cell_M`` the window grid (B, T), flattened; ``target_M`` are
    token ids. ``lanes`` is None for ``padded``: there the model's own attention runs.
    """

    segments: tuple[Segment, ...]
    width: int
    source_M: Ints
    cell_M: Ints
    target_M: Ints
    grid: tuple[int, int]
    lanes: Lanes | None

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return len(self.segments) * self.width


_Part = tuple[Piece, int, int]
"""Tokens ``begin`` to ``end`` of a row."""


def lay_out(pieces: Sequence[Piece], kind: Kind) -> Layout:
    """The layout of a micro-batch. ``pieces`` must not be empty."""
    grid = (len(pieces), max(len(p.ids) - p.start for p in pieces))
    if kind == "padded":
        width = max(p.last for p in pieces)
        starts = [row * width for row in range(len(pieces))]
        segments = tuple(_segment([(p, 0, p.last)]) for p in pieces)
        return Layout(segments, width, *_predictions(pieces, starts, None, grid[1]), grid, None)
    if kind == "packed":
        return _flat(pieces, [-1] * len(pieces), [], grid)
    return _flat(pieces, *_unique(pieces), grid)


def cost(pieces: Sequence[Piece], kind: Kind) -> int:
    """The tokens that a micro-batch of these rows computes, padding included."""
    if kind == "padded":
        return len(pieces) * max((p.last for p in pieces), default=0)
    if kind == "packed":
        return sum(p.last for p in pieces)
    prompts = {p.prompt: p.start for p in pieces}
    return sum(prompts.values()) + sum(p.last - p.start for p in pieces)


def _unique(pieces: Sequence[Piece]) -> tuple[list[int], list[Piece]]:
    """Which prompt each row has, and of each prompt a row that begins with it."""
    number: dict[Hashable, int] = {}
    firsts: list[Piece] = []
    prompt_of = []
    for piece in pieces:
        if piece.prompt not in number:
            number[piece.prompt] = len(firsts)
            firsts.append(piece)
        prompt_of.append(number[piece.prompt])
    return prompt_of, firsts


def _flat(pieces: Sequence[Piece], prompt_of: Sequence[int], firsts: Sequence[Piece], grid: tuple[int, int]) -> Layout:
    """One sequence: ``firsts``' prompts, then windows lane by lane. ``prompt_of`` -1: the window is the row."""
    begins = [p.start if prompt >= 0 else 0 for p, prompt in zip(pieces, prompt_of, strict=True)]
    lengths = [p.last - begin for p, begin in zip(pieces, begins, strict=True)]
    lanes = _lanes(lengths, prompt_of)
    order = [row for rows in lanes for row in rows]
    parts: list[_Part] = [(p, 0, p.start) for p in firsts] + [(pieces[r], begins[r], pieces[r].last) for r in order]
    bounds = np.cumsum([0, *(end - begin for _, begin, end in parts)]).tolist()
    starts, prompt_ends = [0] * len(pieces), [bounds[prompt + 1] - 1 for prompt in prompt_of]
    for row, bound in zip(order, bounds[len(firsts) :], strict=False):
        starts[row] = bound - begins[row]
    window_N = np.repeat([-1] * len(firsts) + order, np.diff(bounds))
    return Layout(
        (_segment(parts),),
        bounds[-1],
        *_predictions(pieces, starts, prompt_ends if firsts else None, grid[1]),
        grid,
        Lanes(
            np.array([p.start for p in firsts], np.int64),
            np.array([sum(lengths[row] for row in rows) for rows in lanes], np.int64),
            np.array([prompt_of[rows[0]] for rows in lanes], np.int64),
            window_N,
            np.concatenate([np.arange(begin, end) for _, begin, end in parts]),
        ),
    )


def _lanes(lengths: Sequence[int], prompt_of: Sequence[int]) -> list[list[int]]:
    """Rows by lane: windows of one prompt share lanes as wide as the longest window, first fit, longest first.

    Windows without tokens (one sampled token, predicted by the prompt) need no lane.
    """
    width = max(lengths)
    by_prompt: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_of):
        if lengths[row]:
            by_prompt.setdefault(prompt, []).append(row)
    lanes: list[list[int]] = []
    for rows in by_prompt.values():
        open_lanes: list[list[int]] = []
        room: list[int] = []
        for row in sorted(rows, key=lambda r: (-lengths[r], r)):
            for i, free in enumerate(room):
                if free >= lengths[row]:
                    open_lanes[i].append(row)
                    room[i] -= lengths[row]
                    break
            else:
                open_lanes.append([row])
                room.append(width - lengths[row])
        lanes += open_lanes
    return lanes


def _predictions(
    pieces: Sequence[Piece], starts: Sequence[int], prompt_ends: Sequence[int] | None, width: int
) -> tuple[Ints, Ints, Ints]:
    """``source_M``, ``cell_M``, ``target_M``.

    ``starts``: where each row's token 0 is, or would be, among the hidden states. With shared prompts a window's first
    token is predicted by its prompt's last, at ``prompt_ends``.
    """
    sources, cells, targets = [], [], []
    for row, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
        sampled = piece.sampled
        source = start + sampled - 1
        if prompt_ends is not None:
            source[0] = prompt_ends[row]
        sources.append(source)
        cells.append(row * width + sampled - piece.start)
        targets.append(piece.ids[sampled].astype(np.int64))
    return np.concatenate(sources), np.concatenate(cells), np.concatenate(targets)


def _segment(parts: Sequence[_Part]) -> Segment:
    """Parts of rows one after the other, with explicit positions: packing concatenates, it never recomputes."""
    axes = any(piece.positions is not None for piece, _, _ in parts)
    ids, media, positions = [], [], []
    offset = 0
    for piece, begin, end in parts:
        ids.append(piece.ids[begin:end])
        media += [
            replace(ref, start=ref.start - begin + offset)
            for ref in piece.media
            if begin <= ref.start and ref.start + ref.length <= end
        ]
        if piece.positions is not None:
            positions.append(piece.positions[:, begin:end])
        else:
            positions.append(np.broadcast_to(np.arange(begin, end, dtype=np.int32), (3, end - begin)))
        offset += end - begin
    alone = len(parts) == 1 and parts[0][1] == 0 and not axes  # positions 0, 1, 2, ... need not be said
    return Segment(np.concatenate(ids).tolist(), tuple(media), None if alone else np.concatenate(positions, 1))
