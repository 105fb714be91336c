"""What policy gradients have in common: options, credit for each token, and the parts of a loss.

An algorithm gives ``advantages``, which ends in ``credited``, and ``loss``, which ends in ``terms.composed``: these add
what the options ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from relax_algorithms import credit
from relax_algorithms.options import Options, problems
from relax_core.interfaces import Algorithm, Columns, ScoredGroup, Streaming

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.config.schema import RunConfig


class PolicyGradient(Algorithm):
    """Base of algorithms whose gradient, on policy, is that of -A log pi under an aggregation."""

    Config = Options
    config: Options
    compares: ClassVar[bool] = True
    """Whether its advantages compare the plays of a task with each other."""

    def __init__(self, config: Options) -> None:
        super().__init__(config)
        self.needs = self.needs | config.needs
        self.outputs = self.outputs | config.outputs
        if config.whiten:
            self.streaming = Streaming.BATCH

    @classmethod
    def check(cls, config: Options, run: RunConfig) -> Iterable[str]:
        if cls.compares and run.group_size < 2:
            yield (
                f"group_size is {run.group_size}, but {run.algorithm.id} compares the plays of a task with each other "
                "and would learn nothing: set group_size to 2 or more"
            )
        yield from problems(config, run)

    @classmethod
    def notes(cls, config: Options, run: RunConfig) -> Iterable[str]:
        if run.max_staleness and run.old == "recompute" and config.correction is None:
            yield (
                f"max_staleness is {run.max_staleness}, and nothing corrects for what an older policy sampled: set "
                "algorithm.correction ({kind: truncate}), or old: engine, whose ratio is to the policy that sampled"
            )

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        return credit.group_metrics(groups) if self.compares else {}

    def rewards(self, group: ScoredGroup) -> list[float | None]:
        """Of each member, less its KL penalty where the options ask for one."""
        kl = self.config.kl
        if kl is None or kl.place == "loss":
            return [member.reward for member in group.members]
        return [
            member.reward - kl.coefficient * credit.kl_of(member) if credit.is_valid(member.reward) else None
            for member in group.members
        ]

    def compared(self, groups: Sequence[ScoredGroup], scale: credit.Scale = "std") -> Mapping[str, Columns]:
        """The columns of every row, where a play's advantage is its reward compared with those of its group."""
        advantages = [credit.group_advantages(self.rewards(group), scale) for group in groups]
        return self.credited(groups, credit.spread(groups, advantages))

    def credited(
        self,
        groups: Sequence[ScoredGroup],
        advantages: Mapping[str, NDArray[np.float64]],
        **extra: Mapping[str, NDArray[np.float64]],
    ) -> Mapping[str, Columns]:
        """The columns of every row, from its advantages (T,) by row id. ``extra``: further columns, likewise."""
        config = self.config
        if config.whiten:
            advantages = credit.whitened(groups, advantages)
        shares = credit.aggregation(config.aggregation, groups, config.constant)
        return credit.columns(groups, advantages, shares, **extra)
