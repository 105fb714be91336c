"""docs/agents.md: its agents play, and its tables say what the code does."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.chat import Chat, Seat
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing.dialogues import CHATML, model_folder
from relax_core.testing.talking import Talker, sampled
from relax_core.types import Sampling, Task
from relax_envs.agent import requests
from relax_envs.agent.command import Agent

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
SCRIPT, ENVIRONMENT = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
TOOLS = "{%- if tools -%}{{ (tools | tojson) + '\n' }}{%- endif -%}" + CHATML.replace("m.content", "(m.content or '')")

pytestmark = pytest.mark.timeout(180)


def chat_of(folder: Path, say: Any) -> tuple[Chat, Talker]:
    file = folder / "used.jinja"
    file.write_text(TOOLS)
    adapter = TextAdapter(TextConfig(path=model_folder(folder), chat_template=file), MediaStore({}, 0))
    talker = Talker(adapter, say)
    return Chat(talker, adapter, Sampling(), Seat(0, "t", 0, 0, ())), talker


def play(environment: Any, task: Task, chat: Chat) -> None:
    async def main() -> None:
        try:
            await environment.play(task, chat)
        finally:
            await environment.close()

    asyncio.run(asyncio.wait_for(main(), 150))


def test_the_program_plays(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "3 + 4 = what", "answer": "7"}) + "\n")
    call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    chat, talker = chat_of(tmp_path, lambda prompt: "The answer is 7" if "tool\n7" in prompt else call)
    config = Agent.Config(data=tmp_path / "data.jsonl", command=(sys.executable, str(tmp_path / "agent.py")))
    environment = Agent(config)
    play(environment, environment.tasks("train")[0], chat)
    assert chat.answer == "The answer is 7" and chat.metrics == {"messages": 4.0}
    assert len(chat.samples) == 1 and sampled(chat.samples) == talker.given()


def test_the_environment_plays(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    exec(ENVIRONMENT, found)
    chat, talker = chat_of(tmp_path, lambda prompt: "sunny" if "again" in prompt else "hello")
    environment = found["Ask"](found["Ask"].Config())
    play(environment, environment.tasks("train")[2], chat)
    assert chat.answer == "sunny" and len(chat.turns) == 2 and sampled(chat.samples) == talker.given()


def test_every_field_of_a_request_is_named() -> None:
    table = PAGE[PAGE.index("## What the endpoint understands") : PAGE.index("| status |")]
    named = set(re.findall(r"`(\w+)`", table))
    assert named >= set(requests.Rules(Sampling()).neutral) | requests._READ | (requests._NO_MATTER - {"timeout"})
    assert {"n", "stop", "logprobs", "response_format"} <= named & set(requests._ONLY)


def test_the_example_program_plays(tmp_path: Path) -> None:
    agents = ROOT / "configs" / "agents"
    chat, talker = chat_of(tmp_path, lambda prompt: "hello")
    command = (sys.executable, "-S", str(agents / "ask.py"))
    environment = Agent(Agent.Config(data=agents / "words.jsonl", command=command))
    play(environment, environment.tasks("train")[0], chat)
    ((prompt, _),) = talker.given()
    assert chat.answer == "hello" and chat.metrics == {"prompt_tokens": float(len(prompt))}
