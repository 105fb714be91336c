"""The contract of the data bus as checks that any bus runs: the one in memory, and one behind an actor.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_bus(check):
        run_check(check, Kit(MyBus))

    @pytest.mark.parametrize("seed", range(10))
    def test_my_bus_under_stress(seed):
        run_check(stress(seed), Kit(MyBus))

A bus behind an actor gives the same methods; those that are no coroutines may block.
"""

from relax_core.testing import bus_checks_claims, bus_checks_room
from relax_core.testing.bus_kit import Check, Kit, run_check
from relax_core.testing.bus_stress import stress

__all__ = ["CHECKS", "Check", "Kit", "run_check", "stress"]

CHECKS: tuple[Check, ...] = (*bus_checks_claims.CHECKS, *bus_checks_room.CHECKS)
