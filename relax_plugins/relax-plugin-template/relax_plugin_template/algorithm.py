"""An algorithm: advantages from rewards, and a loss from advantages. The trainer knows nothing more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from relax_algorithms import credit
from relax_core.interfaces import Algorithm, Columns, ComponentConfig, Loss, Outputs, ScoredGroup

if TYPE_CHECKING:
    from relax_core.interfaces import Batch


class Reinforce(Algorithm):
    """REINFORCE (Williams 1992) with the mean reward of the group as baseline: -A log pi, token mean."""

    class Config(ComponentConfig):
        scale: float = 1.0
        """Factor of every advantage."""

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        advantages = [
            self.config.scale * credit.group_advantages([m.reward for m in group.members], "none") for group in groups
        ]
        return credit.columns(groups, credit.spread(groups, advantages), credit.aggregation("token-mean", groups))

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops

        mask_BT = ops.trained(batch)
        loss_BT = -ops.masked(batch.advantages_BT, mask_BT) * ops.masked(outputs.logprobs_BT, mask_BT)
        return Loss(ops.aggregate(loss_BT, batch), {})
