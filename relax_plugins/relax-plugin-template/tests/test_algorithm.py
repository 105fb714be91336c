from __future__ import annotations

from relax_core.testing import check_algorithm

from relax_plugin_template.algorithm import Reinforce


def test_it_keeps_the_promises_of_an_algorithm() -> None:
    """Padding, cuts and masked tokens change nothing; on policy the gradient is that of -A log pi."""
    check_algorithm(Reinforce(Reinforce.Config(scale=0.5)))
