"""The environments and the reward of relax-plugin-deepeyes keep what every environment and reward promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from relax_core.config.validation import validate
from relax_core.testing import check_environment, check_reward
from relax_core.testing.reward_plays import played
from relax_plugin_deepeyes.environment import DeepEyes
from relax_plugin_deepeyes.reward import DeepEyesReward
from relax_plugin_deepeyes.toy import listen, watch, zoom
from relax_plugin_deepeyes.toy.base import LookToy

CALL = '<think>small</think><tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [%s]}}</tool_call>'
RIGHT = "<think>so</think><answer>red</answer>"


@pytest.mark.parametrize(("cls", "module"), [(zoom.Zoom, zoom), (listen.Listen, listen), (watch.Watch, watch)])
def test_the_toys_are_environments(cls: type[LookToy], module: Any) -> None:
    calls = [word for word in module.WORDS if word.startswith("<tool_call>")]
    answers = [word for word in module.WORDS if word.startswith("<answer>")]
    scripts = [[call, answers[0]] for call in calls] + [calls]
    check_environment(cls(cls.Config(size=12, eval_size=12)), scripts=scripts, tasks=2)


def test_deepeyes_is_an_environment(tmp_path: Path) -> None:
    for i in range(6):
        Image.new("RGB", (64, 48), (i, 0, 0)).save(tmp_path / f"{i}.png")
    for split, rows in (("train", range(4)), ("eval", range(4, 6))):
        lines = [{"prompt": f"<image>What colour is {i}?", "images": [f"{i}.png"], "answer": "red"} for i in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    paths = {"data": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "eval.jsonl")}
    scripts = [[CALL % "0, 0, 32, 32", RIGHT], [CALL % "90, 90, 99, 99", CALL % "1, 2, 3", RIGHT]]
    check_environment(DeepEyes(validate(DeepEyes.Config, paths)), scripts=scripts, tasks=2)


def test_deepeyes_is_a_reward() -> None:
    examples = [
        (played(RIGHT, answer="red"), {"accuracy": 0.8, "format": 0.2, "tool": 0.0}),
        (played("red", answer="red"), {"accuracy": 0.0, "format": 0.0, "tool": 0.0}),
        (played(CALL % "0, 0, 8, 8", RIGHT, answer=["blue", "RED"]), {"accuracy": 0.8, "format": 0.2, "tool": 0.0}),
    ]
    check_reward(DeepEyesReward(DeepEyesReward.Config()), examples)
