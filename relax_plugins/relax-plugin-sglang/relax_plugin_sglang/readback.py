"""A look at what the server has after an update: the first rows of a few tensors, beside what was sent."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from relax_core.errors import EngineError, WeightsError
from relax_plugin_sglang.client import ServerUnreachable

if TYPE_CHECKING:
    from torch import Tensor

    from relax_plugin_sglang.client import Client
    from relax_plugin_sglang.names import Named

_ROWS = 2


class Readback:
    """Of ``count`` tensors, others after each update. Models whose server cannot show its weights are not asked again:
    SGLang shows those of Llama and few others, by the checkpoint's names (it cuts them out of the fused ones)."""

    def __init__(self, client: Client, count: int = 3) -> None:
        self.client, self.count = client, count
        self.works: bool | None = None
        """Whether the server shows its weights; None: nobody has asked."""

    async def check(self, named: Named, label: str) -> None:
        """Raises WeightsError, with a number of each side, when the server has something else."""
        chosen = random.Random(label).sample(range(len(named)), min(self.count, len(named)))
        for name, tensor in (named[i] for i in sorted(chosen)):
            if self.works is False:
                return
            try:
                shown = await self.client.post("/get_weights_by_name", {"name": name, "truncate_size": _ROWS})
            except ServerUnreachable:
                raise
            except EngineError:
                shown = None
            self.works = shown is not None
            if shown is not None:
                _compare(name, tensor, shown)


def _compare(name: str, tensor: Tensor, shown: object) -> None:
    """The server may keep a lower precision than was sent."""
    import torch

    rows = tensor[:_ROWS].detach().cpu()
    found = torch.tensor(shown, dtype=torch.float32)
    candidates = [rows.float(), rows.bfloat16().float(), rows.half().float()]
    if found.shape != rows.shape:
        raise WeightsError(f"weights {name}: the server has rows of shape {tuple(found.shape)}, sent {rows.shape}")
    if not any(torch.equal(found, candidate) for candidate in candidates):
        worst = int((found - candidates[0]).abs().argmax())
        raise WeightsError(
            f"weights {name}: after the update the server has {found.flatten()[worst]:.9g} where "
            f"{candidates[0].flatten()[worst]:.9g} was sent (element {worst}); start it again"
        )
