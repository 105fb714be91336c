"""From several judgements to one score: votes put together, and strengths from comparisons. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

Aggregate = Literal["mean", "median", "majority"]
Pair = tuple[int, int]
"""Places of two plays, the lower one first."""


def together(votes: Sequence[float | None], how: Aggregate, min_read: float) -> float | None:
    """One value of votes, of which None could not be read; None where less than the share ``min_read`` could.

    ``majority`` is the most frequent value, or the mean of those that are equally frequent.
    """
    read = sorted(vote for vote in votes if vote is not None)
    if not read or len(read) < min_read * len(votes):
        return None
    if how == "mean":
        return math.fsum(read) / len(read)
    if how == "median":
        return float(statistics.median(read))
    counts = Counter(read)
    most = max(counts.values())
    frequent = [vote for vote, count in counts.items() if count == most]
    return math.fsum(frequent) / len(frequent)


def pairs(n: int, opponents: int | None) -> Iterator[Pair]:
    """Which of n plays are compared: each with all others, or with so many at least that follow it in a circle."""
    if n < 2:
        return
    reach = n // 2 if opponents is None else min(math.ceil(opponents / 2), n // 2)
    yield from sorted({(min(i, j), max(i, j)) for i in range(n) for j in ((i + d) % n for d in range(1, reach + 1))})


def scores(
    n: int, won: Mapping[Pair, float | None], how: Literal["win_rate", "bradley_terry"], min_read: float
) -> list[float | None]:
    """Of each of n plays, from what the first of each two won over the second: between 0 and 1, None unread.

    A play of which less than the share ``min_read`` of its comparisons could be read has none.
    """
    read = {pair: share for pair, share in won.items() if share is not None}
    asked, known = Counter(i for pair in won for i in pair), Counter(i for pair in read for i in pair)
    found = win_rates(n, read) if how == "win_rate" else bradley_terry(n, read)
    return [found[i] if known[i] and known[i] >= min_read * asked[i] else None for i in range(n)]


def win_rates(n: int, won: Mapping[Pair, float]) -> list[float]:
    """The mean that each play won over those that it was compared with; 0.5 for one that was with none."""
    shares: list[list[float]] = [[] for _ in range(n)]
    for (i, j), share in won.items():
        shares[i].append(share)
        shares[j].append(1 - share)
    return [math.fsum(mine) / len(mine) if mine else 0.5 for mine in shares]


def bradley_terry(n: int, won: Mapping[Pair, float], rounds: int = 200) -> list[float]:
    """The chance of each play to win against a play of strength 1, by the model of Bradley and Terry (1952): i beats j
    with p_i / (p_i + p_j).

    Strengths by the MM algorithm (Hunter 2004, doi:10.1214/aos/1079120141), each with one more comparison, a tie with a
    play of strength 1, so that who always wins has a finite one.
    """
    wins = [0.5] * n
    for (i, j), share in won.items():
        wins[i] += share
        wins[j] += 1 - share
    against: list[list[int]] = [[] for _ in range(n)]
    for i, j in won:
        against[i].append(j)
        against[j].append(i)
    p = [1.0] * n
    for _ in range(rounds):
        p = [wins[i] / (1 / (p[i] + 1) + math.fsum(1 / (p[i] + p[j]) for j in against[i])) for i in range(n)]
    return [strength / (strength + 1) for strength in p]
