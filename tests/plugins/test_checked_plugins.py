"""The toys of our plugins pass the checks that outsiders' environments pass."""

from __future__ import annotations

import pytest

from relax_core.interfaces import Environment
from relax_core.plugins import activate
from relax_core.testing import check_environment

LOOKS = {
    "deepeyes-zoom": '{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 64, 64]}}',
    "deepeyes-listen": '{"name": "audio_zoom_in_tool", "arguments": {"span": [0, 0.5]}}',
    "deepeyes-watch": '{"name": "video_zoom_in_tool", "arguments": {"span": [0, 0.5]}}',
}
"""A call of each one's tool."""


@pytest.mark.parametrize("id", LOOKS)
def test_the_toys_of_deepeyes(id: str) -> None:
    stack = activate(["deepeyes"])
    environment: Environment = stack.load("environments", id)(stack.settings("environments", id, {}, id))
    call = f"<tool_call>{LOOKS[id]}</tool_call>"
    check_environment(environment, scripts=[[call, "red"], [call + call]], tasks=2, looked_at=20, seconds=60)
