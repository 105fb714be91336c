"""Group-relative policy optimisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt, model_validator

from relax_algorithms import credit
from relax_core.interfaces import Algorithm, Batch, Columns, ComponentConfig, Loss, Outputs, ScoredGroup, Streaming

if TYPE_CHECKING:
    import torch

    from relax_core.config.schema import RunConfig


class EntropyBonus(ComponentConfig):
    """A bonus on the policy's entropy that changes linearly from ``start`` to ``end``."""

    start: Annotated[float, Field(ge=0)]
    """Coefficient at step 0."""
    end: Annotated[float, Field(ge=0)]
    """Coefficient from step ``steps`` on."""
    steps: PositiveInt
    """Steps between the two."""

    def at(self, step: int) -> float:
        """The coefficient at a step; steps count from 0."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


class Grpo(Algorithm):
    """GRPO (arXiv:2402.03300): a play's advantage is its reward compared with those of the same task.

    A = (R - mean) / std over the group, the same for all tokens of a play. Per token, with r = p / p_old,
    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - entropy coefficient x entropy, then the aggregation.

    The original is ``aggregation: sequence-mean``. DAPO's loss (arXiv:2503.14476): ``clip_high: 0.28``. Dr. GRPO
    (arXiv:2503.20783): ``aggregation: constant, constant: <response limit>, normalize_std: false``.

    ``needs`` is empty: whether p_old is recomputed is the run's choice (``old``, ``updates_per_step``). Where the batch
    brings no old log-probs, p_old is the policy being trained: r is 1 and nothing is clipped.
    """

    class Config(ComponentConfig):
        aggregation: credit.Aggregation = "token-mean"
        """How token losses become one number."""
        constant: PositiveInt | None = None
        """For ``aggregation: constant`` alone: divides a play's summed loss; such as its limit of sampled tokens."""
        normalize_std: bool = True
        """Whether the group's standard deviation divides the advantages."""
        clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
        """The ratio is kept above 1 - clip_low."""
        clip_high: Annotated[float, Field(gt=0)] = 0.2
        """The ratio is kept below 1 + clip_high."""
        dual_clip: Annotated[float, Field(gt=1)] | None = None
        """Bounds the loss of a negative advantage A by -dual_clip x A (arXiv:1912.09729); default: no bound."""
        entropy: EntropyBonus | None = None
        """Bonus on the policy's entropy; default: none."""

        @model_validator(mode="after")
        def _constant_where_needed(self) -> Grpo.Config:
            if (self.aggregation == "constant") != (self.constant is not None):
                raise ValueError(
                    f"aggregation is {self.aggregation!r} and constant is {self.constant}: "
                    "set 'constant' with aggregation 'constant', and only there"
                )
            return self

    streaming = Streaming.SCALE

    def __init__(self, config: Grpo.Config) -> None:
        super().__init__(config)
        if config.entropy is not None:
            self.outputs = self.outputs | {"entropy"}

    @classmethod
    def check(cls, config: Grpo.Config, run: RunConfig) -> Iterable[str]:
        if run.group_size < 2:
            yield (
                f"group_size is {run.group_size}, but {run.algorithm.id} compares the plays of a task with each other "
                "and would learn nothing: set group_size to 2 or more"
            )

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        scale: credit.Scale = "std" if self.config.normalize_std else "none"
        advantages = [credit.group_advantages([m.reward for m in group.members], scale) for group in groups]
        shares = credit.aggregation(self.config.aggregation, groups, self.config.constant)
        return credit.columns(groups, advantages, shares)

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        return credit.group_metrics(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops

        config = self.config
        mask_BT = ops.trained(batch)
        advantages_BT = ops.masked(batch.advantages_BT, mask_BT)
        old_BT = outputs.logprobs_BT.detach() if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        ratio_BT = ops.safe_ratio(outputs.logprobs_BT, old_BT, mask_BT)
        loss_BT = ops.clipped_surrogate(ratio_BT, advantages_BT, config.clip_low, config.clip_high, config.dual_clip)
        metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            "ratio": ops.masked_sum(ratio_BT, mask_BT),
            "clip_low": ops.masked_sum((advantages_BT < 0) & (ratio_BT < 1 - config.clip_low), mask_BT),
            "clip_high": ops.masked_sum((advantages_BT > 0) & (ratio_BT > 1 + config.clip_high), mask_BT),
            "kl_old": ops.masked_sum(ops.k3(old_BT, outputs.logprobs_BT.detach(), mask_BT), mask_BT),
        }
        if config.entropy is not None:
            assert outputs.entropy_BT is not None  # named in self.outputs
            loss_BT = loss_BT + ops.entropy_bonus(outputs.entropy_BT, config.entropy.at(batch.step), mask_BT)
            metrics["entropy"] = ops.masked_sum(outputs.entropy_BT, mask_BT)
        return Loss(ops.aggregate(loss_BT, batch), metrics)
