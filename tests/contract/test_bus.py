"""The in-memory bus keeps the contract of every bus."""

from __future__ import annotations

import pytest

from relax_core.bus import Bus
from relax_core.testing.bus_contract import CHECKS, Check, Kit, run_check, stress


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run_check(check, Kit(Bus))


@pytest.mark.parametrize("seed", range(12))
def test_every_group_contributes_once_under_stress(seed: int) -> None:
    run_check(stress(seed), Kit(Bus))
