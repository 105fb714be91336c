"""Pytest fixtures for authors of plugins. A test module (or the conftest.py at the root) asks for them::

    pytest_plugins = ["relax_core.testing.fixtures"]

They are no entry point of pytest: nobody's tests import anything of Relax that they did not ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from relax_core.testing.runs import FinishedRun


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., FinishedRun]:
    """``tiny_run(plugins=["mine"], rewards=[{"id": "mine-near"}])`` trains a run of some seconds in this process.

    It is ``relax_core.testing.runs.TEXT_RUN`` with these top-level fields in place of its own; two steps and no
    evaluation, unless they say otherwise. Each call has a folder of its own.
    """
    from relax_core.testing import runs

    count = itertools.count()

    def train(**settings: Any) -> FinishedRun:
        folder = tmp_path / f"tiny-run-{next(count)}"
        return runs.FinishedRun(runs.train(runs.run_file(folder, **{"steps": 2, "evaluation": []} | settings)))

    return train
