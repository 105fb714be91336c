"""The cycle collector works between steps, and afterwards as before."""

from __future__ import annotations

import gc
import weakref

import pytest

from relax_core.collector import Collector


class Knot:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


def test_cycles_go_at_the_next_step_and_not_before() -> None:
    with Collector() as collector:
        assert not gc.isenabled()
        gone = weakref.ref(Knot())
        assert gone() is not None
        collector.step(1)
        assert gone() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_an_error_leaves_it_as_it_was() -> None:
    with pytest.raises(ValueError, match="down"), Collector():
        raise ValueError("down")
    assert gc.isenabled() and gc.get_freeze_count() == 0
