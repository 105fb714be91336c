from __future__ import annotations

from relax_core.testing import check_engine

from relax_plugin_template.engine import PlainEngine
from relax_plugin_template.engine_config import PlainConfig


def test_it_keeps_the_promises_of_an_engine() -> None:
    """Log-probs, bans, versions, weights, cancelling, sleep and restarts, against the same model in memory."""
    check_engine(lambda setup: PlainEngine(PlainConfig(), setup), long=40, limit_s=300)
