"""Tool output cut to a limit: which side stays, and what is said about the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_envs.cut import Keep, cut

HUNDRED = "".join(f"{i:02d}" for i in range(50))


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("head", HUNDRED[:32] + "\n[68 characters left out]"),
        ("tail", "[68 characters left out]\n" + HUNDRED[-32:]),
        ("both", HUNDRED[:16] + "\n[68 characters left out]\n" + HUNDRED[-16:]),
    ],
)
def test_a_hundred_characters_cut_to_32(keep: Keep, expected: str) -> None:
    assert cut(HUNDRED, 32, keep) == expected


@pytest.mark.parametrize("keep", ["head", "tail", "both"])
def test_text_within_the_limit_is_left_alone(keep: Keep) -> None:
    assert cut(HUNDRED, 100, keep) == HUNDRED
    assert cut("", 0, keep) == ""


def test_an_odd_limit_gives_the_beginning_one_more() -> None:
    assert cut(HUNDRED, 5, "both") == "000\n[95 characters left out]\n49"
    assert cut(HUNDRED, 1, "both") == "0\n[99 characters left out]"


@pytest.mark.parametrize("keep", ["head", "tail", "both"])
def test_a_limit_of_nothing_leaves_the_note(keep: Keep) -> None:
    assert cut("x" * 12_345, 0, keep) == "[12,345 characters left out]"


def test_characters_count_and_not_bytes() -> None:
    assert cut("北京مرحبا👍", 8, "tail") == "北京مرحبا👍"
    assert cut("北京مرحبا👍", 3, "tail") == "[5 characters left out]\nبا👍"


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit is -1"):
        cut("a", -1)


LETTERS = st.text(alphabet="aé世👍 ", max_size=40)


@given(text=LETTERS, limit=st.integers(0, 40), keep=st.sampled_from(["head", "tail", "both"]))
def test_what_is_kept_and_what_is_left_out_add_up(text: str, limit: int, keep: Keep) -> None:
    found = cut(text, limit, keep)
    if len(text) <= limit:
        assert found == text
        return
    before, _, after = found.partition(f"[{len(text) - limit} characters left out]")
    before, after = before.removesuffix("\n"), after.removeprefix("\n")
    assert len(before) + len(after) == limit
    assert text.startswith(before) and text.endswith(after)
