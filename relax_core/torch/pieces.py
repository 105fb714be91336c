"""Rows as pieces of layouts, found once, and what a micro-batch of them costs: all that the plan's packer asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from relax_core.interfaces import Row
from relax_core.plan import pack
from relax_core.torch.layout import Kind, Piece, cost


class Pieces:
    """A ``Planner`` for layouts of one kind, which remembers the pieces of rows until ``clear``."""

    def __init__(self, kind: Kind, budget: int) -> None:
        self.kind: Kind = kind
        self.budget = budget
        """Tokens of a micro-batch, at most, as ``cost`` counts them."""
        self._found: dict[str, Piece | None] = {}

    def cost(self, rows: Sequence[Row]) -> int:
        """Tokens that a micro-batch of these rows computes, padding included."""
        return cost(self.of(rows)[1], self.kind)

    def of(self, rows: Sequence[Row]) -> tuple[list[Row], list[Piece]]:
        """The rows with sampled tokens, and their pieces."""
        found = [(row, piece) for row in rows if (piece := self._piece(row))]
        return [row for row, _ in found], [piece for _, piece in found]

    def micro_batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[Row], list[Piece]]]:
        """Rows, those of a group in a line, cut as the plan of a step with one update cuts them."""
        groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
        for part in pack(groups, self):
            sampled, pieces = self.of(part)
            if pieces:
                yield sampled, pieces

    def clear(self) -> None:
        """Forget all rows."""
        self._found.clear()

    def _piece(self, row: Row) -> Piece | None:
        if row.id not in self._found:
            self._found[row.id] = Piece.of(row) if row.columns["mask"].any() else None
        return self._found[row.id]
