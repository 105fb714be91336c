"""Reward ``genrm``: a language model reads what was played and says how good it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, get_args

from relax_core.errors import RelaxError
from relax_core.interfaces import Reward, RewardValue
from relax_core.types import Group, Message, Part, Stop, Text, Trajectory
from relax_plugin_genrm.asked import Judged, Prompt, Prompts, Votes
from relax_plugin_genrm.cache import Cache
from relax_plugin_genrm.config import GenRMConfig
from relax_plugin_genrm.judges import EngineJudge, Judge, ServerJudge
from relax_plugin_genrm.reading import Reading, Reason, read_score, read_verdict
from relax_plugin_genrm.shown import Defuser, Shown
from relax_plugin_genrm.template import Template
from relax_plugin_genrm.votes import Pair, pairs, scores, together

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.setup import RewardSetup

T = TypeVar("T")


class GenRM(Reward):
    """What a judge says of a play, between 0 (the worst of the scale) and 1 (the best); or, in mode ``pairwise``, how
    much of the comparisons with the other plays of its group it wins.

    Abstains, and never guesses, where too few judgements can be read: the judge was cut at its limit, stated no score,
    one outside of the scale or several, was late or gave no answer. Each reason's share of the judgements is a metric
    of the play, the whole is counted as a failure that names the last one. Abstains where the play failed, and in mode
    ``pairwise`` where it has nobody to be compared with.
    """

    Config = GenRMConfig
    config: GenRMConfig

    @classmethod
    def asks_policy(cls, config: GenRMConfig) -> bool:
        return config.placement == "shared"

    @classmethod
    def check(cls, config: GenRMConfig, run: RunConfig) -> Iterator[str]:
        if config.mode == "pairwise" and run.group_size < 2:
            yield "mode: found pairwise, but group_size is 1 and nothing to compare with: raise it, or take rubric"

    def __init__(self, config: GenRMConfig) -> None:
        super().__init__(config)
        self.by_group = config.mode == "pairwise" or config.placement != "external"
        self.label = "genrm"
        self._template = Template.read(config.mode, config.template)
        self._prompts, self._cache = Prompts(config), Cache(config.cache)
        self._server = ServerJudge(config) if config.placement == "external" else None
        self._judge: Judge | None = None
        self._set_judge(self._server)

    async def begin(self, setup: RewardSetup) -> None:
        self.label = setup.label
        if self._server is not None:
            self._server.begin(setup)
        elif self.config.placement == "own" or setup.policy is not None:
            self._set_judge(await EngineJudge.begin(self.config, setup))

    def _set_judge(self, judge: Judge | None) -> None:
        self._judge = judge
        defuse = Defuser(self._template.marks, judge.tokens if judge else ())
        self._shown = Shown(defuse, media=self.config.media, reasoning=self.config.reasoning)

    async def close(self) -> None:
        if self._judge is not None:
            await self._judge.close()

    async def __call__(self, trajectory: Trajectory) -> float | None:
        (found,) = await self._values([trajectory])
        if isinstance(found, BaseException):
            raise found
        return found

    async def score_group(self, group: Group) -> Sequence[RewardValue | BaseException]:
        return await self._values(group.trajectories)

    async def _values(self, trajectories: Sequence[Trajectory]) -> list[float | RelaxError | None]:
        plays = [trajectory for trajectory in trajectories if trajectory.error is None]
        scored = iter(await (self._compared(plays) if self.config.mode == "pairwise" else self._rated(plays)))
        return [None if trajectory.error is not None else next(scored) for trajectory in trajectories]

    # --- rubric -------------------------------------------------------------------------------------------------------

    async def _rated(self, plays: Sequence[Trajectory]) -> list[float | RelaxError | None]:
        prompts = await self._made(lambda: [self._prompt(play, {"reply": self._reply(play)}) for play in plays])
        judgements = await self._votes().of(prompts)
        return [self._one(play, judged) for play, judged in zip(plays, judgements, strict=True)]

    def _one(self, play: Trajectory, judged: Sequence[Judged]) -> float | RelaxError:
        self._note(play, judged)
        votes = [one.reading.value for one in judged]
        value = together(votes, self.config.aggregate, self.config.min_read)
        return self._unread(judged) if value is None else value

    # --- pairwise -----------------------------------------------------------------------------------------------------

    async def _compared(self, plays: Sequence[Trajectory]) -> list[float | RelaxError | None]:
        chosen = list(pairs(len(plays), self.config.opponents))
        replies = await self._made(lambda: [self._reply(play) for play in plays])
        unlike = [pair for pair in chosen if replies[pair[0]] != replies[pair[1]]]
        orders = [order for i, j in unlike for order in ((i, j), (j, i))]

        def prompt(first: int, second: int) -> Prompt:
            return self._prompt(plays[first], {"reply_a": replies[first], "reply_b": replies[second]})

        prompts = await self._made(lambda: [prompt(*order) for order in orders])
        judged = dict(zip(orders, await self._votes().of(prompts), strict=True))
        won: dict[Pair, float | None] = dict.fromkeys(chosen, 0.5)  # equal replies are a tie
        won |= {(i, j): self._won(judged[i, j], judged[j, i]) for i, j in unlike}
        values = scores(len(plays), won, self.config.scores, self.config.min_read)
        return [self._of_pairs(place, plays[place], value, judged) for place, value in enumerate(values)]

    def _won(self, in_order: Sequence[Judged], swapped: Sequence[Judged]) -> float | None:
        """What the first won, over both orders, so that it does not matter which one a judge prefers."""
        a = self._share(in_order)
        b = self._share(swapped)
        return None if a is None or b is None else (a + 1 - b) / 2

    def _share(self, judged: Sequence[Judged]) -> float | None:
        return together([one.reading.value for one in judged], self.config.aggregate, self.config.min_read)

    def _of_pairs(
        self, place: int, play: Trajectory, value: float | None, judged: Mapping[Pair, Sequence[Judged]]
    ) -> float | RelaxError | None:
        mine = [one for order, votes in judged.items() if place in order for one in votes]
        self._note(play, mine)
        both = [
            (self._share(votes), self._share(judged[order[1], order[0]]))
            for order, votes in judged.items()
            if order[0] == place
        ]
        read = [(a, b) for a, b in both if a is not None and b is not None]
        if read:  # A won, or B did, in both orders: its place in the prompt decided
            play.metrics[f"{self.label}/order_bias"] = sum((a - 0.5) * (b - 0.5) > 0 for a, b in read) / len(read)
        return self._unread(mine) if value is None and mine else value

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _reply(self, play: Trajectory) -> list[Part]:
        return self._shown.conversation(play) if self.config.show == "conversation" else self._shown.last(play)

    def _prompt(self, play: Trajectory, replies: Mapping[str, Sequence[Part]]) -> Prompt:
        config = self.config
        worst, best = config.scale
        places: dict[str, Sequence[Part]] = {
            "task": self._shown.task(play),
            "reference": self._shown.reference(play) if config.reference else [],
            "criteria": [Text("\n".join(f"- {line}" for line in config.criteria))],
            "worst": [Text(f"{worst:g}")],
            "best": [Text(f"{best:g}")],
            **replies,
        }
        messages: tuple[Message, ...] = self._template.filled(places)
        return self._prompts(messages)

    async def _made(self, make: Callable[[], T]) -> T:
        """What ``make`` gives, in a thread where it may read files."""
        return await asyncio.to_thread(make) if self.config.media else make()

    def _votes(self) -> Votes:
        if self._judge is None:
            where = self.config.placement
            raise RelaxError(f"placement {where} asks the engine of a run, and there is none: train or evaluate one")
        return Votes(self._judge, self.config, self._cache, self._read)

    def _read(self, text: str, stop: Stop) -> Reading:
        return (
            read_verdict(text, stop) if self.config.mode == "pairwise" else read_score(text, stop, *self.config.scale)
        )

    # --- what is told -------------------------------------------------------------------------------------------------

    def _note(self, play: Trajectory, judged: Sequence[Judged]) -> None:
        """How many judgements the play has, the share that was known already, and of each reason the share unread."""
        counts = Counter(one.reading.reason for one in judged)
        n = max(1, len(judged))
        play.metrics[f"{self.label}/judgements"] = float(len(judged))
        play.metrics[f"{self.label}/cached"] = sum(not one.asked for one in judged) / n
        for reason in get_args(Reason):
            play.metrics[f"{self.label}/unread/{reason}"] = counts[reason] / n

    def _unread(self, judged: Sequence[Judged]) -> RelaxError:
        unread: list[Reading] = [one.reading for one in judged if one.reading.reason is not None]
        counts = Counter(reading.reason for reading in unread)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=str))
        last = " ".join(unread[-1].text.split()) if unread else ""
        return RelaxError(
            f"{len(judged) - len(unread)} of {len(judged)} judgements could be read, of which {self.config.min_read:g} "
            f"must be ({reasons}); the last that could not: {last[-160:]!r}"
        )
