"""Proximal policy optimisation with a critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat

from relax_algorithms import credit, returns
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.config.schema import RunConfig


class Ppo(PolicyGradient):
    """PPO (arXiv:1707.06347): a critic V says what a play was worth before each token.

    A is the generalised advantage (arXiv:1506.02438) over a play's sampled tokens: its reward lies on the last one, and
    -coefficient x k1 on each one where the KL is a reward. The critic learns the returns A + V, with A before
    whitening. Per token, with r = pi / pi_old,
    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and the critic's value_coefficient x value loss (see
    ``ops.value_loss``).
    """

    about = About(
        formula="delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}, whitened over the step; "
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + "
        "c max((V - G)^2, (clip(V, V_old +- value_clip) - G)^2) / 2, G = A + V_old before whitening",
        papers=("1707.06347", "1506.02438"),
        use="Long plays in which single tokens or turns matter, and tasks that can be played only once; costs a second "
        "model, and steps in which the critic has yet to learn.",
        defaults="gamma 1 and lam 1: a play is finite and its reward comes at the end. A discount would hide it from "
        "the first of thousands of tokens (0.99^1000 is 0.00004), and so would lam 0.95, which looks only about 20 "
        "tokens ahead and trusts the critic for the rest, which at first knows nothing. Lower lam for less variance "
        "once it does. Clips 0.2, as in the paper and its code. value_coefficient 1: critic and policy are different "
        "models with optimizers of their own.",
    )
    needs = frozenset({"values"})
    outputs = frozenset({"logprobs", "values"})
    makes = frozenset({"returns"})
    compares = False

    class Config(Clipped):
        """Settings of ``ppo``."""

        gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
        """Discount from one sampled token to the next; observations between turns take none."""
        lam: Annotated[float, Field(ge=0, le=1)] = 1.0
        """How far an advantage looks before it trusts the critic: 1 to the end of the play, 0 one token."""
        whiten: bool = True
        """Whether advantages get mean 0 and deviation 1 over the step's sampled tokens; then training begins only when
        the step's rollout is complete. The critic's targets never are whitened."""
        value_clip: PositiveFloat | None = 0.2
        """In the value loss, how far a value may go from that at the start of the step, in units of the reward; null:
        as far as it likes."""
        value_coefficient: PositiveFloat = 1.0
        """Factor of the value loss. The critic has an optimizer of its own, and AdamW divides out a gradient's scale:
        so it changes only the reported total and how early the critic's gradient is clipped. Its speed is its learning
        rate."""
        critic_warmup: NonNegativeInt = 0
        """First steps of the run in which only the critic learns and the policy stays as it is."""

    config: Config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        if config.critic_warmup >= run.steps:
            yield (
                f"critic_warmup is {config.critic_warmup} and steps is {run.steps}: the policy would never be trained: "
                "lower critic_warmup, or raise steps"
            )
        yield from super().check(config, run)

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        config = self.config
        advantages: dict[str, credit.Values] = {}
        targets: dict[str, credit.Values] = {}
        for member in (member for group in groups for member in group.members):
            end = member.reward if credit.is_valid(member.reward) else 0.0
            values = credit.sampled(member, "values")
            found = returns.gae(returns.token_rewards(member, end, config.kl), values, config.gamma, config.lam)
            advantages |= credit.placed(member, found)
            targets |= credit.placed(member, found + values)
        return self.credited(groups, advantages, returns=targets)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        policy = clipped(self.config, Terms.of(batch, outputs))
        if batch.step < self.config.critic_warmup:  # not 0 x loss: the policy must get no gradient, not one of 0
            return replace(policy, total=policy.total.new_zeros(()))
        return policy

    def value_loss(self, batch: Batch, values_BT: Tensor) -> Loss:
        """Off-policy corrections weigh only the policy's loss: the critic learns the values of whoever sampled."""
        from relax_algorithms import ops

        targets_BT, clip, mask_BT = batch.columns["returns"], self.config.value_clip, ops.trained(batch)
        loss_BT, clipped_BT = ops.value_loss(values_BT, batch.columns["values"], targets_BT, clip, mask_BT)
        metrics = {
            "value_loss": ops.masked_sum(loss_BT, mask_BT),
            "value_clipped": ops.masked_sum(clipped_BT, mask_BT),
            "value": ops.masked_sum(values_BT, mask_BT),
            "returns": ops.masked_sum(targets_BT, mask_BT),
        }
        return Loss(self.config.value_coefficient * ops.aggregate(loss_BT, batch), metrics)
