"""A copy of the policy that stays what it was at the start of the step: an old policy with weights of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.errors import RelaxError
from relax_core.interfaces import Columns, ModelAdapter, Row
from relax_core.old_policy import OldPolicy
from relax_core.torch.model_stage import frozen
from relax_core.torch.stage_config import ModelStageConfig
from relax_core.torch.swap import take_weights
from relax_core.weight_receiver import Receiver

if TYPE_CHECKING:
    from relax_core.run import Run
    from relax_core.types import Version
    from relax_core.weights import WeightUpdate


class PolicyCopy(OldPolicy):
    """Holds the newest published weights, and computes what the trainer would: at the run's temperature, with its bans,
    in the trainer's layout and type. It takes a GPU where it sees one.
    """

    apart = True

    def __init__(self, run: Run, adapter: ModelAdapter) -> None:
        trainer = run.stack.config("trainers", run.config.trainer, "trainer")
        alike = ("dtype", "layout", "tokens_per_micro_batch")
        config = ModelStageConfig(**{name: getattr(trainer, name) for name in alike if hasattr(trainer, name)})
        self.annotator = frozen(config, adapter, run.config.sampling.temperature)
        self.receiver = Receiver()
        self.version: Version | None = None
        self._lock = asyncio.Lock()
        """Held while rows are computed: new weights wait, so that no row sees two versions."""

    async def forward(self, rows: Sequence[Row], version: Version) -> list[Columns]:
        """See ``OldPolicy``. One call at a time, in the order in which they come."""
        async with self._lock:
            if self.version != version:
                holds = "no published weights" if self.version is None else _said(self.version)
                raise RelaxError(
                    f"old policy: asked for log-probs under {_said(version)}, it holds {holds}: a fault of Relax"
                )
            return await self.annotator.forward(rows, frozenset({"logprobs"}))

    async def load_weights(self, update: WeightUpdate) -> None:
        """Verified first, all or none. Raises WeightsError."""
        weights = await asyncio.to_thread(self.receiver.receive, update)
        async with self._lock:
            take_weights(self.annotator.compute.model, weights, self.receiver.kept(update))
            self.version = update.manifest.version
        self.receiver.took(update, adopted=False)


def _said(version: Version) -> str:
    return f"version {version.number} (lineage {version.lineage})"
