"""What tests of the endpoint share: plays whose agent is a function of the test, against an engine that it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai

from relax_core.chat import Chat, Seat
from relax_core.config.schema import PlayLimits
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing.dialogues import CHATML
from relax_core.testing.talking import Talker, sampled
from relax_core.types import Sampling, Task
from relax_envs.agent.environment import AgentConfig, AgentEnvironment
from relax_envs.agent.session import Session

TOOLS_FIRST = (
    "{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
    + "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    + "{%- for c in m.tool_calls or [] -%}{{ c.function | tojson }}{%- endfor -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": "é"}}\n</tool_call>'

Agent = Callable[[Session], Awaitable[str | None]]


class Here(AgentEnvironment):
    """The agent is a function of the test."""

    def __init__(self, agent: Agent, **settings: Any) -> None:
        super().__init__(AgentConfig(**settings))
        self.agent = agent

    def tasks(self, split: str) -> list[Task]:
        return []

    async def run_agent(self, task: Task, session: Session) -> str | None:
        return await self.agent(session)


class Table:
    """What plays share: an adapter, an engine, limits."""

    def __init__(self, folder: Path, say: Callable[[str], str | Awaitable[str]], template: str = CHATML) -> None:
        file = folder / "used.jinja"
        file.write_text(template)
        self.adapter = TextAdapter(TextConfig(path=folder, chat_template=file), MediaStore({}, 0))
        self.talker = Talker(self.adapter, say)
        self.limits = PlayLimits()

    def chat(self, task: str = "t", most: int = 64) -> Chat:
        return Chat(
            self.talker, self.adapter, Sampling(max_new_tokens=most), Seat(0, task, 0, 0, ()), None, self.limits
        )

    def play(self, agent: Agent, chat: Chat | None = None, **settings: Any) -> Chat:
        """Play once. Every reply must be trained once."""
        chat = chat or self.chat()
        environment = Here(agent, **settings)

        async def play() -> None:
            try:
                await environment.play(Task("t", ()), chat)
            finally:
                await environment.close()

        try:
            asyncio.run(asyncio.wait_for(play(), 150))
        finally:
            assert sampled(chat.samples) == self.talker.given()
        return chat


def client(session: Session, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, **settings)


def asks(*messages: Any, **settings: Any) -> dict[str, Any]:
    return {"model": "gpt-9", "messages": list(messages)} | settings


def says(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def ask(session: Session, *messages: Any, **settings: Any) -> Any:
    async with client(session) as c:
        found = await c.chat.completions.create(**asks(*messages, **settings))
        return found.choices[0].message if hasattr(found, "choices") else found


def counted(prompt: str) -> str:
    return f"hello {prompt.count('<|im_start|>')}"
