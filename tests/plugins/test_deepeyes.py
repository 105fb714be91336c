"""Reward, bonus and environment of relax-plugin-deepeyes, and the mapping of the published data set."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from relax_core.chat import Chat
from relax_core.config.resolve import resolve
from relax_core.config.validation import validate
from relax_core.config.yaml import read
from relax_core.hookspecs import GroupEvent
from relax_core.media import MediaStore
from relax_core.testing.reward_plays import group_of, played, rewarded
from relax_core.testing.runs import TEXT_RUN
from relax_core.types import (
    Decoded,
    Image,
    Message,
    Part,
    Stop,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
    message,
    system,
    user,
)
from relax_envs.tools import Tool, ToolError
from relax_modalities.image import Image as ImageModality
from relax_plugin_deepeyes.bonus import ToolBonus
from relax_plugin_deepeyes.environment import HINT, INSTRUCTIONS, DeepEyes, shown_in
from relax_plugin_deepeyes.reward import DeepEyesReward

PLUGIN = Path(__file__).resolve().parents[2] / "relax_plugins" / "relax-plugin-deepeyes"
CALL = '<tool_call>\n{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 8, 8]}}\n</tool_call>'
LOOKING = f"<think>too small</think>\n{CALL}"
PICTURE = Image(Decoded("image", np.zeros((8, 8, 3), np.uint8)))


def looked(*replies: str, shown: Part | None = PICTURE, answer: Any = "red", stop: Stop = Stop.EOS) -> Trajectory:
    """A play in which each reply but the last is followed by a tool's result."""
    play = played(*replies, answer=answer)
    result = ToolResult((shown if isinstance(shown, Image) else Text("no"),))
    play.turns = [
        Turn((message("tool", result),) if i else play.task.messages, turn.reply, stop, 1)
        for i, turn in enumerate(play.turns)
    ]
    return play


# --- reward -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("play", "found"),
    [
        (looked(LOOKING, "<think>red!</think><answer> Red </answer>"), (0.8, 0.2, 1.2)),
        (looked(LOOKING, LOOKING, "<think>a</think>\n<answer>red</answer><|im_end|>"), (0.8, 0.2, 1.2)),
        (looked(LOOKING, "<think>blue!</think><answer>blue</answer>"), (0.0, 0.2, 0.0)),
        (
            looked(LOOKING, "<think>x</think><answer>red</answer>", shown=None),
            (0.8, 0.2, 0.0),
        ),  # only an error came back
        (looked("<think>x</think><answer>red</answer>"), (0.8, 0.2, 0.0)),
        (looked(CALL, "<think>x</think><answer>red</answer>"), (0.8, 0.0, 1.2)),  # no thought before the call
        (looked(LOOKING + "\nso?", "<think>x</think><answer>red</answer>"), (0.8, 0.0, 1.2)),
        (looked(LOOKING, "<answer>red</answer>"), (0.8, 0.0, 1.2)),
        (looked("<think>x</think><answer>blue</answer><answer>red</answer>"), (0.8, 0.0, 0.0)),
        (looked("<think>x</think><answer>red</answer>", stop=Stop.LENGTH), (0.8, 0.0, 0.0)),
        (looked("red"), (0.0, 0.0, 0.0)),
        (looked("<think><answer>red</answer>"), (0.0, 0.0, 0.0)),  # thinking that never ended
        (looked(LOOKING, LOOKING), (0.0, 0.0, 0.0)),  # a limit came before the answer
        (looked("<think>x</think><answer>2</answer>", answer=[1, 2]), (0.8, 0.2, 0.0)),
    ],
)
def test_accuracy_form_and_a_bonus_for_tools_that_helped(play: Trajectory, found: tuple[float, ...]) -> None:
    assert rewarded(DeepEyesReward, play) == dict(zip(("accuracy", "format", "tool"), found, strict=True))


def test_weights_and_a_form_without_thoughts() -> None:
    play = looked(CALL, "<answer>red</answer>")
    settings = {"accuracy": 1.0, "format": 0.5, "tool": 0.0, "think": False}
    assert rewarded(DeepEyesReward, play, **settings) == {"accuracy": 1.0, "format": 0.5, "tool": 0.0}
    assert rewarded(DeepEyesReward, looked(LOOKING, "<answer>red</answer>"), **settings)["format"] == 0.0


@pytest.mark.parametrize("play", [played("x", answer=None), played("x", answer="x", failed=True)])
def test_it_abstains_where_there_is_nothing_to_compare(play: Trajectory) -> None:
    assert rewarded(DeepEyesReward, play) is None


def test_the_bonus_is_paid_where_another_reward_is_above_its_threshold() -> None:
    plays = [looked(LOOKING, "a"), looked(LOOKING, "a"), looked("a"), looked(LOOKING, "a", shown=None), looked(LOOKING)]
    for play, score in zip(plays, (0.9, 0.5, 0.9, 0.9, None), strict=True):
        play.rewards = {"judge": score}
    bonus: Any = ToolBonus(ToolBonus.Config(reward="judge", weight=2.0))
    found = bonus.shape_rewards(None, [1.0, 1.0, 1.0, 1.0, None], GroupEvent(group_of(plays)))
    assert found == [3.0, 1.0, 1.0, 1.0, None]


def test_the_bonus_names_a_reward_of_the_run() -> None:
    raw = {**TEXT_RUN, "plugins": ["deepeyes"], "callbacks": [{"id": "deepeyes-bonus", "reward": "exakt"}]}
    run, _ = resolve({**raw, "callbacks": [{"id": "deepeyes-bonus", "reward": "exact"}]})
    assert list(ToolBonus.check(ToolBonus.Config(reward="exact"), run)) == []
    [problem] = ToolBonus.check(ToolBonus.Config(reward="exakt"), run)
    assert problem == "reward: no reward of this run is called 'exakt'; did you mean 'exact'?"


# --- environment ------------------------------------------------------------------------------------------------------


def png(grey: int, width: int = 80, height: int = 60) -> bytes:
    content = io.BytesIO()
    Pillow.new("RGB", (width, height), (grey, 0, 0)).save(content, "PNG")
    return content.getvalue()


def environment(tmp_path: Path, **settings: Any) -> DeepEyes:
    (tmp_path / "7.png").write_bytes(png(7))
    row = {"prompt": "<image>What colour?", "images": ["7.png"], "answer": "red"}
    own = {"messages": [{"role": "system", "content": "Zoom."}, {"role": "user", "content": "What?"}], "answer": "red"}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (row, own))))
    return DeepEyes(validate(DeepEyes.Config, {"data": str(tmp_path / "rows.jsonl"), **settings}))


class Conversation:
    """What tools and environment ask of a chat: its history, and decoded media."""

    metrics: dict[str, float] = {}

    def __init__(self, *history: Message) -> None:
        self.history = list(history)
        self.media = MediaStore({"image": ImageModality(ImageModality.Config())}, 10**7)

    decoded = Chat.decoded

    @property
    def _adapter(self) -> Any:
        return self


def announced(env: DeepEyes, task: Task) -> tuple[Message, ...]:
    chat: Any = Conversation()
    return env.announced(task.messages, env.tools(task, chat))


def test_the_system_message_says_how_to_answer_and_declares_the_tools(tmp_path: Path) -> None:
    env = environment(tmp_path)
    first, own = env.tasks("train")
    said, asked = announced(env, first)
    assert asked is first.messages[0]
    text, *specs = said.parts
    assert text == Text(INSTRUCTIONS)
    assert [s.name for s in specs if isinstance(s, ToolSpec)] == ["image_zoom_in_tool", "image_rotate_tool"]
    assert announced(env, first)[0] is said, "members of a group get the very same message"
    assert announced(env, own)[0].parts[0] == Text("Zoom.")


def test_tools_instructions_and_hint_are_settings(tmp_path: Path) -> None:
    env = environment(tmp_path, tools=["video_zoom_in_tool"], instructions="Look!", hint="", announce="none")
    task = env.tasks("train")[0]
    assert announced(env, task) == (system("Look!"), *task.messages)
    chat: Any = Conversation()
    [tool] = env.tools(task, chat)
    assert tool.name == "video_zoom_in_tool" and getattr(tool, "hint") == ""  # noqa: B009


def test_tools_look_at_the_original_files_and_at_what_was_shown_since(tmp_path: Path) -> None:
    env = environment(tmp_path, boxes={"unit": "thousandths", "least_side": 8})
    task = env.tasks("train")[0]
    chat: Any = Conversation(*task.messages)
    zoom, rotate = env.tools(task, chat)
    shown, hint = call(zoom, bbox_2d=[0, 0, 500, 1000])
    assert shown.source.data.shape == (60, 40, 3) and (shown.source.data[..., 0] == 7).all() and hint == HINT
    chat.history.append(message("tool", ToolResult((shown,))))
    again, _ = call(rotate, angle=90, image=1)
    assert again.source.data.shape == (40, 60, 3)
    with pytest.raises(ToolError, match="There is no image 2: there are 2 so far, counted from 0"):
        call(zoom, bbox_2d=[0, 0, 1, 1], image=2)
    ask: Any = shown_in(chat)
    with pytest.raises(ToolError, match="There is no audio 0: there are 0 so far"):
        asyncio.run(ask("audio", 0))


def call(tool: Tool, **arguments: Any) -> Any:
    return asyncio.run(tool(arguments))


# --- the published data set -------------------------------------------------------------------------------------------

ROW = {
    "data_source": "vstar",
    "prompt": [
        {"content": "You are a helpful assistant.\n\n# Tools\n...", "role": "system"},
        {"content": "<image>\nIs the kite red?\nThink first, ...", "role": "user"},
    ],
    "images": [{"bytes": png(200), "path": None}],
    "ability": "vl_chart",
    "env_name": "visual_toolbox_v2",
    "reward_model": {"ground_truth": "Yes, it is red.", "style": "model"},
    "extra_info": {"answer": "Yes, it is red.", "index": "3", "question": "Is the kite red?", "split": "train"},
}


def test_the_published_rows_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW] * 2), tmp_path / "rows.parquet")
    settings = {"data": str(tmp_path / "rows.parquet"), "columns": str(PLUGIN / "columns.yaml"), "announce": "none"}
    env = DeepEyes(validate(DeepEyes.Config, settings))
    task = env.tasks("train")[0]
    assert [m.role for m in task.messages] == ["system", "user"] and len(task.messages[1].media()) == 1
    assert announced(env, task) == task.messages, "the rows say all of it themselves"
    assert task.messages[1].text == "\nIs the kite red?\nThink first, ..."
    assert task.answer == "Yes, it is red."
    assert task.metadata == {"data_source": "vstar", "ability": "vl_chart", "env_name": "visual_toolbox_v2"}


def test_the_question_alone_can_be_taken(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    columns = {**read(PLUGIN / "columns.yaml"), "prompt": "<image>{extra_info.question}"}
    del columns["messages"]
    env = DeepEyes(validate(DeepEyes.Config, {"data": str(tmp_path / "rows.parquet"), "columns": columns}))
    assert env.tasks("train")[0].messages == (user(*env.tasks("train")[0].messages[0].media(), "Is the kite red?"),)


def test_the_run_file_of_the_published_data_fits() -> None:
    raw = read(PLUGIN / "deepeyes.yaml")
    raw["model"] = {"id": "qwen3-omni", "tiny": {"words": ["?"]}}
    config, stack = resolve(raw)
    settings = stack.config("environments", config.environments[0], "environments.0")
    assert isinstance(settings, DeepEyes.Config) and settings.boxes.unit == "thousandths"
    assert (PLUGIN.parents[1] / "relax_plugins/relax-plugin-deepeyes/columns.yaml").samefile(PLUGIN / "columns.yaml")


def test_calls_in_replies_are_those_of_the_parser() -> None:
    """The form that the reward asks for is one whose calls are run."""
    from relax_core.models.tool_calls import HermesParser

    assert HermesParser().parse(LOOKING) == [ToolCall("image_zoom_in_tool", {"bbox_2d": [0, 0, 8, 8]})]
