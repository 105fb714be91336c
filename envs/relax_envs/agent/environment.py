"""What environments with an agent of its own share: a session for each play, and how the play ends."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from relax_core.interfaces import ComponentConfig, Environment
from relax_envs.agent.endpoint import Endpoint
from relax_envs.agent.errors import AgentSilent
from relax_envs.agent.requests import Rules

if TYPE_CHECKING:
    from relax_core.chat import Chat
    from relax_core.types import Task
    from relax_envs.agent.session import Session

_FAREWELL_S = 2.0
"""For an agent that was told that its play is over to end by itself."""


class AgentConfig(ComponentConfig):
    """Settings of every environment with an agent."""

    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names by which agents may ask for the policy; default: any name."""
    settings: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a request that sets temperature, top_p, seed, penalties ... to another value than the run's: an
    error, or the run's own value and a header that names the setting."""
    request_bytes: PositiveInt = 64 << 20
    """Of one request, at most; media are inside."""
    heartbeat: Annotated[float, Field(gt=0)] = 10.0
    """Seconds between comments in a stream whose reply is being sampled."""


class AgentEnvironment(Environment):
    """``run_agent`` plays: it, or what it starts, talks to ``session.base_url`` with the key ``session.key``."""

    Config = AgentConfig
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._endpoint = Endpoint(config.request_bytes, config.heartbeat)

    @abstractmethod
    async def run_agent(self, task: Task, session: Session) -> str | None:
        """Attempt the task. Return the final answer where the last reply is not it: rewards read that one then.

        What it raises is an error of the play. It runs in the event loop in which the policy is sampled, so nothing in
        it may block: a client that is not asynchronous belongs into a thread (``asyncio.to_thread``).
        """

    async def play(self, task: Task, chat: Chat) -> None:
        """Raises what ended the play: an error of the agent, or a limit of the play."""
        rules = Rules(chat.sampling, self.config.models, self.config.settings)
        session = await self._endpoint.open(chat, rules)
        agent = asyncio.create_task(self.run_agent(task, session))
        try:
            either: set[asyncio.Future[Any]] = {agent, session.over}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if session.over.done():
                await asyncio.wait({agent}, timeout=_FAREWELL_S)
        finally:
            agent.cancel()
            await self._endpoint.close_session(session)
            await asyncio.gather(agent, return_exceptions=True)
        if session.over.done():
            raise session.over.result()
        answer = agent.result()
        if not session.replies:
            raise AgentSilent("the agent asked the policy nothing: does it use OPENAI_BASE_URL and OPENAI_API_KEY?")
        if answer is not None:
            chat.answer = answer

    async def close(self) -> None:
        await self._endpoint.close()
