"""What the reward ``genrm`` reads in judgements, and how it puts votes and comparisons together."""

from __future__ import annotations

import pytest

from relax_core.types import Stop
from relax_plugin_genrm.cache import Cache, Key
from relax_plugin_genrm.reading import Reading, read_score, read_verdict
from relax_plugin_genrm.votes import bradley_terry, pairs, scores, together, win_rates


def scored(text: str, stop: Stop = Stop.EOS, scale: tuple[float, float] = (0, 10)) -> float | str | None:
    """The value that is read, or the reason why there is none."""
    reading = read_score(text, stop, *scale)
    assert (reading.value is None) == (reading.reason is not None)
    return reading.reason or reading.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 7", 0.7),
        ("score = 7.", 0.7),
        ("Good work.\n**Score: 7/10**", 0.7),
        ("**Score:** 7", 0.7),
        ("Score:\n7", 0.7),
        ("Overall score: 7.5\n", 0.75),
        ("<score>7</score>", 0.7),
        ("<Score> 7 / 10 </Score> that is it", 0.7),
        ('{"why": "fine", "score": 7}', 0.7),
        ('```json\n{"score": "7", "why": "x"}\n```', 0.7),
        (r"So \boxed{7}", 0.7),
        ("7", 0.7),
        ("7/10", 0.7),
        (" 10.\n", 1.0),
        ("0", 0.0),
        ("Score: 3 at first sight.\nScore: 3\nBut it improves.\nScore: 8", 0.8),
        ("<think>Score: 2, or 9?</think>Score: 7", 0.7),
        ("Score: NUMBER\nScore: 7", 0.7),
        ("Score: <score>7</score>", 0.7),
        ("Score: 7\n<score>7</score>", 0.7),
    ],
)
def test_scores(text: str, value: float) -> None:
    assert scored(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unreadable"),
        ("seven", "unreadable"),
        ("I would give it 7 points.", "unreadable"),
        ("Score: 7 or 8", "unreadable"),
        ("Score: 7-8", "unreadable"),
        ("Score: seven", "unreadable"),
        ("Score: 7\nScore: maybe more", "unreadable"),
        ("Score: 70%", "unreadable"),
        ("<score>7", "unreadable"),
        ("<think>Score: 7", "unreadable"),
        ("<think>Score: 7</think>", "unreadable"),
        (r"\boxed{good}", "unreadable"),
        ('{"score": null}', "unreadable"),
        ("Score: 11", "out_of_range"),
        ("Score: -1", "out_of_range"),
        ("11", "out_of_range"),
        ("Score: 7/100", "out_of_range"),
        ("Score: 4\nScore: 11", "out_of_range"),
        ("Score: 7\n<score>3</score>", "contradictory"),
        ("Score: 3, Score: 7", "contradictory"),
        (r"Score: 7 \boxed{3}", "contradictory"),
    ],
)
def test_what_is_no_score(text: str, reason: str) -> None:
    assert scored(text) == reason


def test_a_judge_that_was_cut_says_nothing() -> None:
    assert scored("Score: 7", Stop.LENGTH) == "cut" and scored("Score: 7", Stop.TOKENS) == "cut"


def test_a_scale_of_another_kind() -> None:
    assert scored("Score: 3", scale=(1, 5)) == 0.5 and scored("Score: -0.5", scale=(-1, 1)) == 0.25
    assert scored("Score: 0", scale=(1, 5)) == "out_of_range" and scored("Score: 3/10", scale=(1, 5)) == "out_of_range"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Verdict: A", 1.0),
        ("**Verdict: B**", 0.0),
        ("verdict: tie.", 0.5),
        ("Verdict: Reply A", 1.0),
        ("A is bad, so [[B]]", 0.0),
        ("<verdict>A</verdict>", 1.0),
        ('{"verdict": "tie"}', 0.5),
        ("A", 1.0),
        ("Verdict: A\nNo:\nVerdict: B", 0.0),
        ("Verdict: C", "unreadable"),
        ("A is better", "unreadable"),
        ("Verdict: A or B", "unreadable"),
        ("Verdict: A\n[[B]]", "contradictory"),
        ("Verdict: A, Verdict: B", "contradictory"),
        ("", "unreadable"),
    ],
)
def test_verdicts(text: str, value: float | str) -> None:
    reading = read_verdict(text, Stop.EOS)
    assert (reading.reason or reading.value) == value


# --- votes ------------------------------------------------------------------------------------------------------------


def test_votes() -> None:
    votes = [0.2, None, 0.4, 0.9, 0.9]
    assert together(votes, "mean", 0.5) == pytest.approx(0.6)
    assert together(votes, "median", 0.5) == pytest.approx(0.65)
    assert together(votes, "majority", 0.5) == 0.9
    assert together([0.2, 0.4], "majority", 0.5) == pytest.approx(0.3)  # equally frequent


def test_too_few_votes_abstain() -> None:
    assert together([0.5, None], "mean", 0.5) == 0.5
    assert together([0.5, None, None], "mean", 0.5) is None
    assert together([None], "mean", 0.01) is None and together([], "mean", 0.5) is None


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_who_is_compared() -> None:
    assert list(pairs(4, None)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert list(pairs(1, None)) == [] and list(pairs(2, 1)) == [(0, 1)]
    for n in range(2, 9):
        for opponents in range(1, n):
            found = list(pairs(n, opponents))
            assert len(set(found)) == len(found)
            assert all(sum(i in pair for pair in found) >= opponents for i in range(n))


def test_win_rates() -> None:
    assert win_rates(3, {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.0}) == [0.75, 0.0, 0.75]


def test_bradley_terry_by_hand() -> None:
    """Two plays, the first wins: p = 1.5 / (1/(p+1) + 1/(p+q)), q = 1 / p by symmetry."""
    high, low = bradley_terry(2, {(0, 1): 1.0})
    assert high + low == pytest.approx(1.0)
    p = high / (1 - high)
    assert p == pytest.approx(1.5 / (1 / (p + 1) + 1 / (p + 1 / p)), abs=1e-6)
    assert bradley_terry(3, {(0, 1): 0.5, (1, 2): 0.5}) == pytest.approx([0.5, 0.5, 0.5])


def test_strengths_follow_whom_one_beat() -> None:
    """Both won once and lost once, but 1 lost to the strongest and beat a play that won elsewhere."""
    won = {(0, 1): 1.0, (0, 2): 1.0, (0, 3): 1.0, (1, 2): 1.0, (2, 3): 1.0}
    found = bradley_terry(4, won)
    assert found == sorted(found, reverse=True) and all(0 < value < 1 for value in found)


def test_unread_comparisons_abstain() -> None:
    won = {(0, 1): 1.0, (0, 2): None, (1, 2): None}
    assert scores(3, won, "win_rate", 0.5) == [1.0, 0.0, None]
    assert scores(3, won, "win_rate", 0.6) == [None, None, None]
    assert scores(1, {}, "win_rate", 0.5) == [None]


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_cache_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    cache, reading = Cache(2), Reading(1.0, None, "")
    cache.put(Key("a", 0), reading)
    cache.put(Key("b", 0), reading)
    assert cache.get(Key("a", 0)) is reading and cache.get(Key("a", 0, 3)) is None
    cache.put(Key("c", 0), reading)
    assert cache.get(Key("b", 0)) is None and cache.get(Key("a", 0)) is reading and len(cache) == 2
