"""The toys of our plugins pass the checks that outsiders' environments pass."""

from __future__ import annotations

import pytest

from relax_core.interfaces import Environment
from relax_core.plugins import activate
from relax_core.testing import check_environment

LOOKS = {
    "deepeyes-zoom": '{"name": "zoom", "arguments": {"bbox_2d": [0, 0, 64, 64]}}',
    "deepeyes-listen": '{"name": "listen", "arguments": {"start": 0, "end": 1}}',
    "deepeyes-watch": '{"name": "watch", "arguments": {"start": 0, "end": 1}}',
}
"""A call of each one's tool, right or wrong."""


@pytest.mark.parametrize("id", LOOKS)
def test_the_toys_of_deepeyes(id: str) -> None:
    stack = activate(["deepeyes"])
    environment: Environment = stack.load("environments", id)(stack.settings("environments", id, {}, id))
    call = f"<tool_call>{LOOKS[id]}</tool_call>"
    check_environment(environment, scripts=[[call, "red"], [call + call]], tasks=2, looked_at=20, seconds=60)
