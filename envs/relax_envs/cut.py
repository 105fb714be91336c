"""Text that is too long for a conversation (a tool's output), cut to a number of characters."""

from __future__ import annotations

from typing import Literal

Keep = Literal["head", "tail", "both"]


def cut(text: str, limit: int, keep: Keep = "head") -> str:
    """``text`` if it has at most ``limit`` characters, else so many of it, and a note of how many were left out.

    ``keep``: the beginning, the end, or half of the limit of each (one more of the beginning if it is odd). The note
    stands where text is missing and does not count; it is a line of its own where lines are cut off. Raises ValueError
    for a negative limit.
    """
    if limit < 0:
        raise ValueError(f"cut: limit is {limit}; 0 or more is allowed")
    if len(text) <= limit:
        return text
    head = {"head": limit, "tail": 0, "both": limit - limit // 2}[keep]
    note = f"[{len(text) - limit:,} characters left out]"
    before, after = text[:head], text[len(text) - (limit - head) :]
    return "\n".join(piece for piece in (before, note, after) if piece)
