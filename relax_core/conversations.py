"""The conversations of a play, which may branch, put together from its turns."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.types import Message, Turn


def said(turns: Sequence[Turn], last: int) -> list[Message]:
    """The conversation that ends with the reply of turn ``last``."""
    found: list[Message] = []
    while last >= 0:
        found[:0] = [*turns[last].prompt, turns[last].reply]
        last = turns[last].after
    return found


def ends(turns: Sequence[Turn]) -> list[int]:
    """The turns that none follows: the last of each conversation of a play."""
    followed = {turn.after for turn in turns}
    return [i for i in range(len(turns)) if i not in followed]
