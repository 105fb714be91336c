"""Settings of the reward ``genrm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from relax_core.config.schema import ComponentSection
from relax_core.interfaces import ComponentConfig
from relax_envs.rewards.http import Positive, ServerConfig

NEEDED = {"shared": (), "own": ("model",), "external": ("server",)}
ALLOWED = {"shared": (), "own": ("model", "engine"), "external": ("server",)}


class JudgeServer(ServerConfig):
    """A server that speaks OpenAI's protocol."""

    url: str
    """Its base URL, such as ``http://127.0.0.1:8000/v1``; asked is ``/chat/completions`` below it."""
    model: str
    """The judge's name there."""


class GenRMConfig(ComponentConfig):
    placement: Literal["shared", "own", "external"]
    """Who judges. ``shared``: the run's own engine, with the policy's newest weights. ``own``: an engine of its own
    with the frozen weights of ``model``. ``external``: a ``server``."""
    model: ComponentSection | None = None
    """Of placement ``own``: a section like the run file's ``model``."""
    engine: ComponentSection | None = None
    """Of placement ``own``: a section like the run file's ``engine``; default: ``{id: torch}``."""
    server: JudgeServer | None = None
    """Of placement ``external``: where the judge is, and how long it is waited for."""
    mode: Literal["rubric", "pairwise"] = "rubric"
    """``rubric``: each play by itself gets a score on a scale. ``pairwise``: the plays of a group are compared two by
    two, each two in both orders."""
    template: Path | None = None
    """A text file with named places that replaces the built-in template of the ``mode``."""
    criteria: tuple[str, ...] = ("It does what was asked, completely and correctly.",)
    """What a good reply is; one line each, in the template's place ``criteria``."""
    scale: tuple[float, float] = (0, 10)
    """The worst and the best score of a rubric. The reward is 0 at the one and 1 at the other."""
    reference: bool = True
    """Whether the judge sees the task's answer, where it has one."""
    show: Literal["last", "conversation"] = "last"
    """What is judged: the last reply, or everything that was said after the task, tools' results included."""
    reasoning: bool = False
    """Whether the judge sees what the policy thought, up to ``</think>``."""
    media: bool = True
    """Whether the judge gets images, sounds and videos; else only a note of where they were."""
    frames: PositiveInt = 8
    """Pictures that a server gets of a video that has no file, such as one that a tool made."""
    votes: PositiveInt = 1
    """Judgements of each play, or of each two plays in each order."""
    aggregate: Literal["mean", "median", "majority"] = "mean"
    """How the scores of several votes become one; ``majority``: the most frequent, the mean of several such."""
    min_read: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the judgements that must be readable; with less the play abstains."""
    scores: Literal["win_rate", "bradley_terry"] = "win_rate"
    """How comparisons become a score: the share that a play wins, or its chance to win by strengths that explain all
    of them best."""
    opponents: PositiveInt | None = None
    """How many others of the group each play is compared with, at least; default: all."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Of the judge's sampling; 0 is greedy, and then there is one vote."""
    max_new_tokens: PositiveInt = 512
    """Of a judgement; one that reaches it was cut, and is not read."""
    deadline: Positive = 30.0
    """Seconds for one judgement, tries included. ``timeout`` ends all those of a group."""
    concurrency: PositiveInt = 32
    """Judgements asked for at the same time."""
    cache: NonNegativeInt = 10_000
    """Judgements that are remembered, by all that decides them; 0: none."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = [name for name in ("model", "engine", "server") if getattr(self, name) is not None]
        for name in NEEDED[self.placement]:
            if name not in given:
                raise ValueError(f"placement {self.placement} needs {name}: give it")
        for name in given:
            if name not in ALLOWED[self.placement]:
                raise ValueError(f"placement {self.placement} has no {name}: leave it out")
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale: found {list(self.scale)}; write [worst, best], the best is the larger number")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"votes: found {self.votes}, but at temperature 0 all are equal: raise temperature")
        return self
