"""REINFORCE++: returns of single tokens, whitened over the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from relax_algorithms import credit, returns
from relax_algorithms.options import Clipped, Kl
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig


class Penalty(Kl):
    """The KL of ``reinforce++``: as a loss it is k2 by default."""

    estimator: Literal["k1", "k2", "k3"] | None = None
    """Of the divergence, from d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; default: k2 in the
    loss, as in the paper's variant with a baseline, k1 in the reward."""

    @property
    def kind(self) -> Literal["k1", "k2", "k3"]:
        return self.estimator or ("k1" if self.place == "reward" else "k2")


class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++ (arXiv:2501.03262): PPO's clipped loss without a critic; the step is the baseline.

    A play's reward R lies on its last sampled token, and -coefficient x k1 on each one where the KL is a reward. A
    token's return G is the discounted sum from there on; A is G whitened over the step's sampled tokens. With
    ``baseline``, R less the mean of its task's plays takes the place of R. Per token, with r = pi / pi_old,
    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    """

    about = About(
        formula="G_t = sum_k gamma^k r_{t+k}, r = R on the last token (R - mean of its task with baseline), less "
        "beta k1 on each with KL in the reward; A = (G - mean of step) / (std of step + 1e-6); "
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        papers=("2501.03262",),
        use="When a task is played only once, or when every token is to be held near the reference by its own reward. "
        "With baseline: when tasks differ much in difficulty, and each is played several times.",
        defaults="Gamma 1: a reward for the whole play belongs to all of its tokens. Clip 0.2 on both sides, as in "
        "PPO. Always whitened: the step's mean is its only baseline. KL in the loss is k2, whose gradient is that of "
        "the divergence.",
    )
    compares = False  # with a baseline it does, which the settings decide

    class Config(Clipped):
        """Settings of ``reinforce++``."""

        gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
        """Discount from one sampled token to the next; observations between turns take none."""
        baseline: bool = False
        """Whether the mean reward of a task's valid plays is taken from each of their rewards before whitening."""
        whiten: Literal[True] = True
        """Always: advantages are whitened over the step's sampled tokens."""
        kl: Penalty | None = None
        """A penalty on the distance from a reference; default: none."""

        @field_validator("whiten", mode="before")
        @classmethod
        def _always(cls, value: object) -> object:
            if value is not True:
                raise ValueError(
                    "the step's mean is the baseline of reinforce++, and there is no other: leave whiten out, or take "
                    "an algorithm that compares the plays of a task, such as grpo or rloo"
                )
            return value

    config: Config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        if config.baseline and run.group_size < 2:
            yield (
                "baseline with group_size 1: the mean over a single play is its own reward, and nothing would be "
                "learned: leave baseline out, or set group_size to 2 or more"
            )
        yield from super().check(config, run)

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        return credit.group_metrics(groups) if self.config.baseline else {}

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        config = self.config
        found: dict[str, credit.Values] = {}
        for group in groups:
            for member, end in zip(group.members, self._ends(group), strict=True):
                rewards = returns.token_rewards(member, end, config.kl)
                found |= credit.placed(member, returns.discounted(rewards, config.gamma))
        return self.credited(groups, found)

    def _ends(self, group: ScoredGroup) -> Sequence[float]:
        """What each play gets on its last token; 0 for those that are not trained."""
        rewards = [member.reward for member in group.members]
        if self.config.baseline:
            return [float(advantage) for advantage in credit.group_advantages(rewards, "none")]
        return [reward if credit.is_valid(reward) else 0.0 for reward in rewards]

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        return clipped(self.config, Terms.of(batch, outputs))
