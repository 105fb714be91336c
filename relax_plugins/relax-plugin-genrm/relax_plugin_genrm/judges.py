"""Who judges: an engine of the run, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from relax_core.asking import Answer, Asker, Question
from relax_core.engine_role import EngineRole, serving
from relax_core.keys import stream
from relax_core.run import build_modalities
from relax_core.types import Stop
from relax_envs.rewards.http import JsonServer
from relax_envs.rewards.loops import PerLoop
from relax_plugin_genrm.openai import Encoder, answer_of

if TYPE_CHECKING:
    from relax_core.setup import RewardSetup
    from relax_plugin_genrm.config import GenRMConfig


class Judge(ABC):
    """Answers questions. ``tokens``: its control tokens, which no text that it is shown may hold."""

    tokens: Collection[str] = ()

    @abstractmethod
    async def ask(self, questions: Sequence[Question]) -> list[Answer | BaseException]:
        """The answers in order, an error in place of each that there is none of."""

    async def version(self) -> int | None:
        """Of its weights, if they change."""
        return None

    async def close(self) -> None:
        """Give back what it holds."""


class EngineJudge(Judge):
    """An engine; ``own`` ones are stopped in the end, and of the others the weights change."""

    def __init__(self, config: GenRMConfig, asker: Asker, own: bool) -> None:
        from relax_core.models.template import special_tokens

        self.config, self.asker, self.own = config, asker, own
        tokenizer: Any = getattr(asker.adapter, "tokenizer", None)
        self.tokens = frozenset(special_tokens(tokenizer).values()) if tokenizer is not None else ()

    @classmethod
    async def begin(cls, config: GenRMConfig, setup: RewardSetup) -> EngineJudge:
        if config.placement == "shared":
            assert setup.policy is not None
            return cls(config, setup.policy, own=False)
        from relax_core.config.schema import ComponentSection

        assert config.model is not None
        engine = config.engine or ComponentSection(id="torch")
        role = EngineRole(config.model, engine, f"{setup.where}.", f"reward-{setup.label}")
        return cls(config, await serving(role, setup.run, apart=setup.apart, note=setup.note), own=True)

    async def ask(self, questions: Sequence[Question]) -> list[Answer | BaseException]:
        return await self.asker.ask(questions, at_once=self.config.concurrency, deadline=self.config.deadline)

    async def version(self) -> int | None:
        return None if self.own else await self.asker.version()

    async def close(self) -> None:
        if self.own:
            await self.asker.engine.stop()


class ServerJudge(Judge):
    """A server at a URL; each question has a seed of its own, for servers that know seeds."""

    def __init__(self, config: GenRMConfig) -> None:
        assert config.server is not None
        self.config, self.model, self.seed = config, config.server.model, 0
        base = config.server.url.rstrip("/").removesuffix("/chat/completions")
        self.url = f"{base}/chat/completions"
        self.server = JsonServer(config.server, config.concurrency, "reward genrm: server", self.url)
        self.encoder = Encoder(config.frames)
        self._places = PerLoop(lambda: asyncio.Semaphore(config.concurrency))

    def begin(self, setup: RewardSetup) -> None:
        """Know the run's seed, and how its media are written."""
        self.seed = setup.run.config.seed
        self.encoder.modalities = {
            str(k): m for k, m in build_modalities(setup.run.stack, setup.run.config.modalities).items()
        }

    async def ask(self, questions: Sequence[Question]) -> list[Answer | BaseException]:
        return await asyncio.gather(*map(self._ask, questions), return_exceptions=True)

    async def _ask(self, question: Question) -> Answer:
        async with self._places.get(), asyncio.timeout(self.config.deadline):
            body = await asyncio.to_thread(self._body, question)
            text, ended = answer_of(await self.server.post(body), self.url)
        return Answer(text, Stop.EOS if ended else Stop.LENGTH)

    def _body(self, question: Question) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": self.encoder.messages(question.messages),
            "temperature": question.sampling.temperature,
            "max_tokens": question.sampling.max_new_tokens,
            "seed": stream(self.seed, "reward", question.key, question.draw) % 2**31,
        }

    async def close(self) -> None:
        await self.server.close()
