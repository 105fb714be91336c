"""Splitting by content: a task is held out or not by what it says, so equal tasks never stand on both sides."""

from __future__ import annotations


def held_out(content_hash: str, fraction: float) -> bool:
    """Whether a task with this hash (hexadecimal) belongs to the held-out ``fraction``; independent of any order."""
    return int(content_hash[:13], 16) < fraction * 16**13
