"""Prompts judged as often as there are votes: what is known is not asked again, what is asked is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_core.asking import Answer, Question
from relax_core.content_hash import content_hash
from relax_core.types import Message, Sampling, Stop, Task
from relax_plugin_genrm.cache import Cache, Key
from relax_plugin_genrm.config import GenRMConfig
from relax_plugin_genrm.judges import Judge
from relax_plugin_genrm.reading import Reading


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the judge is shown, and a hash of that and of everything else that decides what it says."""

    messages: tuple[Message, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Judged:
    """One judgement. ``asked``: whether the judge was asked for it, and not before or for somebody else."""

    reading: Reading
    asked: bool


class Prompts:
    """Makes prompts of messages, with the hash of a judge's settings in theirs."""

    def __init__(self, config: GenRMConfig) -> None:
        decides = {"placement", "model", "engine", "temperature", "max_new_tokens", "frames"}
        settings = config.model_dump(mode="json", include=decides)
        server = config.server
        settings["server"] = server and [server.url, server.model]
        self._settings = json.dumps(settings, sort_keys=True)

    def __call__(self, messages: tuple[Message, ...]) -> Prompt:
        """Reads the media's files to hash them, so it may block."""
        content = content_hash(Task("", messages))
        return Prompt(messages, hashlib.sha256(f"{self._settings}\0{content}".encode()).hexdigest()[:32])


class Votes:
    """Asks a judge for ``votes`` judgements of each prompt. ``read``: what an answer's text says."""

    def __init__(self, judge: Judge, config: GenRMConfig, cache: Cache, read: Callable[[str, Stop], Reading]) -> None:
        self.judge, self.config, self.cache, self.read = judge, config, cache, read
        self.sampling = Sampling(config.temperature, config.max_new_tokens)

    async def of(self, prompts: Sequence[Prompt]) -> list[list[Judged]]:
        """The judgements of each prompt. Equal prompts are judged once, under keys made of what they are, so that
        neither the cache nor who asks first changes what is said."""
        version = await self.judge.version() if self.cache.size else None
        wanted = {p.digest: p for p in prompts}
        keys = [Key(digest, draw, version) for digest in wanted for draw in range(self.config.votes)]
        found = {key: reading for key in keys if (reading := self.cache.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        fresh = set(missing)
        questions = [Question(wanted[k.prompt].messages, self.sampling, f"judge {k.prompt}", k.draw) for k in missing]
        answers = await self.judge.ask(questions) if questions else []
        for key, answer in zip(missing, answers, strict=True):
            found[key] = self._reading(answer)
            settled = version is None or (isinstance(answer, Answer) and answer.version == version)
            if self.cache.size and isinstance(answer, Answer) and settled:
                self.cache.put(key, found[key])
        judged = []
        for prompt in prompts:
            mine = [Key(prompt.digest, draw, version) for draw in range(self.config.votes)]
            judged.append([Judged(found[key], key in fresh) for key in mine])
            fresh -= set(mine)
        return judged

    def _reading(self, answer: Answer | BaseException) -> Reading:
        if isinstance(answer, TimeoutError):
            return Reading(None, "late", f"no answer within {self.config.deadline:g} s")
        if isinstance(answer, BaseException):
            return Reading(None, "failed", f"{type(answer).__name__}: {answer}")
        return self.read(answer.text, answer.stop)
