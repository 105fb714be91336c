"""Maximum-likelihood reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from relax_algorithms import credit
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.errors import DataError
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig


class Maxrl(PolicyGradient):
    """MaxRL (arXiv:2602.02710): maximises the log of a task's chance of success instead of the chance itself.

    A = (R - mean) / mean over the group's valid rewards, the same for all tokens of a play; per token GRPO's clipped
    loss. With rewards of 0 and 1 this is, in expectation, the gradient of log p up to the order of the group's size: a
    task solved by one play of eight gives that play the advantage 7, where R - mean would give 7/8.

    Rewards must be 0 or more: a negative one raises DataError, which names the task. Exactly 0 where all rewards of the
    group are equal, all 0 included, and where only one is valid.
    """

    about = About(
        formula="A = (R - mean) / mean, R >= 0; -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        papers=("2602.02710",),
        use="Tasks that are right or wrong, many of them still hard: rare successes count most, and pass@k suffers "
        "less than under grpo.",
        defaults="Clip 0.2 on both sides, as in PPO; on policy, as the paper trains, it does nothing. Nothing is added "
        "to the mean that divides: an advantage is at most the group's size less 1.",
    )

    class Config(Clipped):
        """Settings of ``maxrl``. Penalties, of length or otherwise, must leave every reward at 0 or more."""

        @model_validator(mode="after")
        def _no_penalty(self) -> Self:
            if self.kl is not None and self.kl.place == "reward":
                raise ValueError(
                    "kl.place: a penalty on the reward makes it negative, which maxrl refuses: take 'loss'"
                )
            return self

    config: Config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        yield from super().check(config, run)
        for reward in run.rewards:
            if reward.weight < 0:
                yield (
                    f"the reward {reward.label!r} has weight {reward.weight:g}: maxrl divides by the mean reward and "
                    "takes rewards of 0 or more: turn it into a reward of what is good, or take grpo"
                )
        if any(section.id == "overlong" for section in run.callbacks):
            yield "callback overlong makes rewards negative, which maxrl refuses: leave it out, or take grpo"

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.credited(groups, credit.spread(groups, [_advantages(group) for group in groups]))

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        return clipped(self.config, Terms.of(batch, outputs))


def _advantages(group: ScoredGroup) -> credit.Values:
    """Of each member, float64 (G,). Raises DataError when a reward is negative."""
    rewards = [member.reward for member in group.members]
    valid = [reward for reward in rewards if credit.is_valid(reward)]
    if min(valid, default=0.0) < 0:
        raise DataError(
            f"algorithm maxrl: a play of task {group.task.id!r} has the reward {min(valid):g}; maxrl divides by the "
            "mean and takes rewards of 0 or more: shift the rewards so that the worst is 0, or take grpo"
        )
    deviations = credit.group_advantages(rewards, "none")
    return deviations / (sum(valid) / len(valid)) if deviations.any() else deviations
