"""Text that is too long for a conversation (a tool's output), cut to a number of characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Keep = Literal["head", "tail", "both"]


def cut(text: str, limit: int, keep: Keep = "head") -> str:
    """``text`` if it has at most ``limit`` characters, else so many of it, and a note of how many were left out.

    ``keep``: the beginning, the end, or half of the limit of each (one more of the beginning if it is odd). The note
    stands where text is missing and does not count; it is a line of its own where lines are cut off. Raises ValueError
    for a negative limit.
    """
    return cut_all([text], limit, keep)[0]


def cut_all(texts: Sequence[str], limit: int, keep: Keep = "head") -> list[str]:
    """Several texts cut as if they were one; the note is in the first of which something is missing."""
    if limit < 0:
        raise ValueError(f"cut: limit is {limit}; 0 or more is allowed")
    length = sum(map(len, texts))
    if length <= limit:
        return list(texts)
    head = {"head": limit, "tail": 0, "both": limit - limit // 2}[keep]
    note = f"[{length - limit:,} characters left out]"
    found, start = [], 0
    for text in texts:
        before = text[: max(0, head - start)]
        after = text[max(len(before), length - (limit - head) - start) :]
        missing = len(before) + len(after) < len(text)
        found.append("\n".join(piece for piece in (before, note * missing, after) if piece) if missing else text)
        note, start = note * (not missing), start + len(text)
    return found
