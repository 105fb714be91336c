"""Layouts: which tokens are computed, where, and what each of them sees."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.errors import DataError
from relax_core.testing.training import row
from relax_core.torch.attention import DeviceLanes
from relax_core.torch.layout import Kind, Layout, Piece, cost, lay_out
from relax_core.types import MediaRef


def pieces(*rows: tuple[list[int], list[int]], **columns: Any) -> list[Piece]:
    """From (prompt, reply) pairs."""
    return [Piece.of(row(f"g/{i}", p, r, **columns)) for i, (p, r) in enumerate(rows)]


def test_a_piece_spans_the_first_to_the_last_sampled_token() -> None:
    piece = Piece.of(row("g/0", [5, 6], [7, 8, 9, 10, 11], mask=[0, 1, 0, 1, 0]))
    assert (piece.start, piece.last) == (3, 5)


def test_a_row_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(DataError, match="row g/0: its first token is a sampled one"):
        Piece.of(row("g/0", [], [7, 8]))
    with pytest.raises(DataError, match="row g/1: has no sampled token"):
        Piece.of(row("g/1", [5], [7, 8], mask=[0, 0]))


def test_shared_computes_a_prompt_once_and_never_the_last_sampled_token() -> None:
    layout = lay_out(pieces(([5, 6, 7], [8, 9, 1]), ([5, 6, 7], [9, 1]), ([6, 7], [8, 1])), "shared")
    (segment,) = layout.segments
    assert list(segment.ids) == [5, 6, 7, 6, 7, 8, 9, 9, 8]
    assert segment.positions is not None
    assert segment.positions[0].tolist() == [0, 1, 2, 0, 1, 3, 4, 3, 2]
    assert layout.tokens == layout.width == 9
    # The first token of each reply is predicted by the last one of its prompt.
    assert layout.source_M.tolist() == [2, 5, 6, 2, 7, 4, 8]
    assert layout.target_M.tolist() == [8, 9, 1, 9, 1, 8, 1]
    assert layout.grid == (3, 3)
    assert layout.cell_M.tolist() == [0, 1, 2, 3, 4, 6, 7]


def test_packed_repeats_prompts_and_padded_pads() -> None:
    two = pieces(([5, 6, 7], [8, 9, 1]), ([5, 6, 7], [9, 1]))
    packed = lay_out(two, "packed")
    assert list(packed.segments[0].ids) == [5, 6, 7, 8, 9, 5, 6, 7, 9]
    assert packed.source_M.tolist() == [2, 3, 4, 7, 8]
    padded = lay_out(two, "padded")
    assert [list(s.ids) for s in padded.segments] == [[5, 6, 7, 8, 9], [5, 6, 7, 9]]
    assert padded.tokens == 10
    assert padded.source_M.tolist() == [2, 3, 4, 7, 8]
    assert padded.lanes is None


@pytest.mark.parametrize("kind", ["shared", "packed", "padded"])
def test_cost_is_what_a_layout_computes(kind: Kind) -> None:
    rows = pieces(([5, 6, 7], [8, 9, 1]), ([5, 6, 7], [9]), ([6, 7], [8, 1]), ([5, 6, 7], [9, 9, 9, 9, 1]))
    assert cost(rows, kind) == lay_out(rows, kind).tokens
    assert cost([], kind) == 0


def test_short_windows_of_a_prompt_share_a_lane() -> None:
    lengths = [9, 2, 3, 4, 5, 1]  # sampled tokens; one less is computed of each
    rows = pieces(*(([5, 6], [7] * n) for n in lengths), *(([6, 5], [7] * n) for n in (3, 3)))
    lanes = lay_out(rows, "shared").lanes
    assert lanes is not None
    # 8 | 4 + 3 + 1 | 2 of the first prompt (the row with one sampled token needs none), 2 + 2 of the second.
    assert lanes.lane_lengths_L.tolist() == [8, 8, 2, 4]
    assert lanes.prompt_L.tolist() == [0, 0, 0, 1]
    assert lanes.prompt_lengths_P.tolist() == [2, 2]


def test_heavy_tailed_lengths_cost_in_proportion() -> None:
    lengths = [64, 5, 9, 4, 12, 7, 30, 4]
    rows = pieces(*(([5] * 16, [7] * n) for n in lengths))
    layout = lay_out(rows, "shared")
    assert layout.tokens == 16 + sum(lengths) - len(lengths)
    assert layout.lanes is not None
    rectangle = len(layout.lanes.lane_lengths_L) * layout.lanes.lane_lengths_L.max()
    assert rectangle < 2 * sum(lengths)  # one lane a row would be 8 x 63


@pytest.mark.parametrize("kind", ["shared", "packed"])
def test_a_token_sees_its_own_row_up_to_itself_and_nothing_else(kind: Kind) -> None:
    generator = np.random.default_rng(0)
    prompts = [[5, 6, 7], [6, 7], [8] * 6]
    rows = pieces(*((prompts[i % 3], [9] * int(generator.integers(1, 8))) for i in range(11)))
    layout = lay_out(rows, kind)
    seen = visible(layout)
    (segment,) = layout.segments
    assert segment.positions is not None
    place_N = segment.positions[0]
    for token in range(layout.width):
        mine = sorted(place_N[other] for other in np.flatnonzero(seen[token]))
        assert mine == list(range(place_N[token] + 1))  # each earlier place of one row exactly once
    for piece, source in zip(rows, sources_of_first(layout, rows), strict=True):
        assert [segment.ids[int(i)] for i in np.flatnonzero(seen[source])] == piece.ids[: piece.start].tolist()


def test_media_of_a_shared_prompt_comes_once_and_of_windows_each() -> None:
    image, crop = MediaRef("image", "a", 1, 2), MediaRef("image", "b", 6, 1)
    first = row("g/0", [5, 3, 3], [7, 8, 4, 3, 4, 9, 1], mask=[1, 1, 0, 0, 0, 1, 1], media=[image, crop])
    second = row("g/1", [5, 3, 3], [9, 1], media=[image])
    other = row("g/2", [5, 3, 3], [9, 1], media=[MediaRef("image", "c", 1, 2)])
    (segment,) = lay_out([Piece.of(r) for r in (first, second, other)], "shared").segments
    assert [(ref.key, ref.start) for ref in segment.media] == [("a", 1), ("c", 4), ("b", 9)]
    assert [segment.ids[ref.start] for ref in segment.media] == [3, 3, 3]


def test_given_positions_are_kept_and_tell_prompts_apart() -> None:
    near, far = (np.arange(s, s + 15, dtype=np.int32).reshape(3, 5) for s in (0, 100))
    rows = [row("g/0", [5, 6], [7, 8, 1], positions=near), row("g/1", [5, 6], [7, 8, 1], positions=far)]
    layout = lay_out([Piece.of(r) for r in rows], "shared")
    (segment,) = layout.segments
    assert segment.positions is not None
    assert layout.width == 8
    expected = np.concatenate([near[:, :2], far[:, :2], near[:, 2:4], far[:, 2:4]], 1)
    assert np.array_equal(segment.positions, expected)


def visible(layout: Layout) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(N, N): which tokens each token of a flat sequence sees, read from the masks that attention uses."""
    assert layout.lanes is not None
    device = DeviceLanes(layout.lanes, torch.device("cpu"))
    _, mask = device.masks(None, torch.float32)
    seen = np.zeros((layout.width, layout.width), bool)
    prompt_tokens = _rows(layout.lanes.prompt_lengths_P, 0)
    for tokens in prompt_tokens:
        seen[np.ix_(tokens, tokens)] = np.tril(np.ones((len(tokens), len(tokens)), bool))
    first = int(layout.lanes.prompt_lengths_P.sum())
    for lane, own in enumerate(_rows(layout.lanes.lane_lengths_L, first)):
        allowed = (mask[lane, 0] == 0).numpy()
        width = allowed.shape[1] - allowed.shape[0]
        seen[np.ix_(own, own)] = allowed[: len(own), width : width + len(own)]
        if width:
            prompt = prompt_tokens[layout.lanes.prompt_L[lane]]
            seen[np.ix_(own, prompt)] = allowed[: len(own), : len(prompt)]
            assert not allowed[: len(own), len(prompt) : width].any()
        assert not allowed[: len(own), width + len(own) :].any()
    return seen


def _rows(lengths: np.ndarray[Any, np.dtype[np.int64]], first: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    bounds = [first, *(first + np.cumsum(lengths)).tolist()]
    return [np.arange(a, b) for a, b in pairwise(bounds)]


def sources_of_first(layout: Layout, rows: list[Piece]) -> list[int]:
    """Where the predecessor of each row's first sampled token lies."""
    return [int(layout.source_M[layout.cell_M == i * layout.grid[1]][0]) for i in range(len(rows))]
