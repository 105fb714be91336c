"""Group reward-decoupled normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from relax_algorithms import credit
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.errors import nearest
from relax_core.interfaces import About, Batch, Columns, Loss, Member, Outputs, ScoredGroup, Streaming

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig


ROUNDING = 1e-12
"""A sum of advantages below it is what rounding left of advantages that cancel, and taken as 0."""


class Gdpo(PolicyGradient):
    """GDPO (arXiv:2601.05242): each reward is compared within the group for itself, before rewards are added.

    A_k = (R_k - mean) / std of reward k over the group's plays that have it; S = sum over k of weight_k x A_k;
    A = S / (std of S over the step's plays), the same for all tokens of a play; per token GRPO's clipped loss.

    - A reward that abstained for a play adds 0 to it and counts in no mean; so does every reward of a play that is not
      trained. A reward that is equal for all plays of a group adds exactly 0.
    - The step's deviation counts every trained play once, however long it is, as in the paper; those of groups with
      nothing to learn count too. It is taken around 0 and nothing is subtracted, since each A_k of a group sums to 0
      (the mean over trained plays differs from 0 only where a play sampled no token): a group with nothing to learn
      keeps exactly 0.
    - Only the rewards' own values are read. ``weight`` of the run file's rewards, and what callbacks make of their sum,
      change what is logged and filtered, but no advantage.
    """

    about = About(
        formula="A_k = (R_k - mean) / (std + 1e-6); S = sum_k weight_k A_k; A = S / (std of S over the step + 1e-6); "
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        papers=("2601.05242",),
        use="Two or more rewards of different scale or difficulty: under grpo one of them drowns the others, and plays "
        "that differ in what they got right may have equal sums.",
        defaults="All weights 1, whatever the rewards' scale: it is divided out. Clip 0.2 on both sides, as in grpo.",
    )
    streaming = Streaming.BATCH

    class Config(Clipped):
        """Settings of ``gdpo``."""

        refuses: ClassVar[Mapping[str, str]] = {
            "whiten": "gdpo always divides by the step's deviation: leave it out",
        }
        weights: Mapping[str, float] = {}
        """Factor of each reward's advantage, by the reward's name; default: 1 each."""

        @model_validator(mode="after")
        def _no_penalty(self) -> Self:
            if self.kl is not None and self.kl.place == "reward":
                raise ValueError(
                    "kl.place: gdpo normalises each reward for itself and has no sum to take it from: take 'loss'"
                )
            return self

    config: Config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        yield from super().check(config, run)
        names = [reward.label for reward in run.rewards]
        for name in config.weights:
            if name not in names:
                yield f"weights: no reward is named {name!r}{nearest(name, names)}; there is {', '.join(names)}"
        for reward in run.rewards:
            if reward.weight != 1 and reward.label not in config.weights:
                yield (
                    f"weights: the reward {reward.label!r} has weight {reward.weight:g}, which gdpo does not read: "
                    f"name it in weights, such as {{{reward.label}: {reward.weight:g}}}"
                )
        if names and not any(config.weights.get(name, 1.0) for name in names):
            yield "weights: every reward has weight 0, so that nothing would be learned: raise one"
        if any(section.id == "overlong" for section in run.callbacks):
            yield (
                "callback overlong changes the sum of rewards, which gdpo does not read: take a reward that penalises "
                "length instead"
            )

    @classmethod
    def notes(cls, config: Any, run: RunConfig) -> Iterable[str]:
        yield from super().notes(config, run)
        if any(section.id == "dynamic-sampling" for section in run.callbacks):
            yield (
                "dynamic-sampling filters groups whose sums of rewards are equal, from which gdpo may learn where the "
                "single rewards differ"
            )

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        """Those of all group-relative algorithms; ``groups_equal``: in which no single reward tells plays apart."""
        found = dict(super().group_metrics(groups))
        several = [group for group in groups if sum(credit.is_valid(m.reward) for m in group.members) > 1]
        found["groups_equal"] = (float(sum(not self._sums(group).any() for group in several)), float(len(groups)))
        return found

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        sums = [self._sums(group) for group in groups]
        trained = [
            float(value)
            for group, values in zip(groups, sums, strict=True)
            for member, value in zip(group.members, values, strict=True)
            if sum(credit.trained_tokens(member))
        ]
        squares = math.fsum(value**2 for value in trained)
        scale = math.sqrt(squares / max(len(trained) - 1, 1)) + credit.EPSILON
        return self.credited(groups, credit.spread(groups, [values / scale for values in sums]))

    def _sums(self, group: ScoredGroup) -> credit.Values:
        """The weighted sum of each member's normalised rewards, float64 (G,)."""
        import numpy as np

        names = dict.fromkeys(name for member in group.members for name in member.rewards)
        total = np.zeros(len(group.members))
        for name in names:
            values = [_reward(member, name) for member in group.members]
            total += self.config.weights.get(name, 1.0) * credit.group_advantages(values, "std")
        return np.where(abs(total) < ROUNDING, 0.0, total)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        return clipped(self.config, Terms.of(batch, outputs))


def _reward(member: Member, name: str) -> float | None:
    """The member's reward of that name; None where it abstained, and for a member that is not trained."""
    return member.rewards.get(name) if credit.is_valid(member.reward) else None
