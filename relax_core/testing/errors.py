"""Asserting what an error says: one line, with the words that a user needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relax_core.errors import RelaxError


@contextmanager
def refused(*words: str, kind: type[RelaxError] = RelaxError) -> Iterator[None]:
    """The block must raise an error of ``kind`` whose one line holds all ``words``."""
    try:
        yield
    except kind as error:
        text = str(error)
        missing = [word for word in words if word not in text]
        assert not missing, f"{missing} not in: {text}"
        assert "\n" not in text, f"more than one line: {text}"
    else:
        raise AssertionError(f"nothing was refused; expected: {words}")
