"""An environment with an agent keeps every promise of environments, whatever the policy says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import httpx
import pytest

from relax_core.testing.environment_checks import check_environment
from relax_core.types import Task, user
from relax_envs.agent.environment import AgentConfig, AgentEnvironment
from relax_envs.agent.session import Session

pytestmark = pytest.mark.timeout(180)


class TwoTurns(AgentEnvironment):
    """Asks, and asks again with what was said."""

    Config = AgentConfig

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        return [Task(f"{split}-{word}", (user(f"{split} {word}"),), answer=word) for word in ("cat", "dog")]

    async def run_agent(self, task: Task, session: Session) -> str | None:
        messages: list[Any] = [{"role": "user", "content": task.messages[0].text}]
        headers = {"Authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(headers=headers, verify=False, timeout=60) as client:
            for _ in range(2):
                body = {"model": "policy", "messages": messages}
                found = await client.post(f"{session.base_url}/chat/completions", json=body)
                found.raise_for_status()
                messages += [found.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        return str(messages[-2]["content"])


def test_an_agent_is_an_environment_like_any_other() -> None:
    check_environment(TwoTurns(AgentConfig()), tasks=1, seconds=60)
