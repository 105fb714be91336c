"""Running a stage on rows, and what a model says of them by the definition. Legend: S sampled tokens, V vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from relax_core.bus import Claim, Holder
from relax_core.interfaces import ModelAdapter, Row, Stage

if TYPE_CHECKING:
    import torch


def columns_of(stage: Stage, rows: Sequence[Row]) -> dict[str, Any]:
    """What the stage makes of these rows, claimed together."""
    claim = Claim(stage.name, Holder(stage.name, 0), tuple(rows), tuple(dict.fromkeys(r.group for r in rows)))
    return dict(asyncio.run(stage.run(claim)))


def plain_logprobs(adapter: ModelAdapter, model: torch.nn.Module, line: Row, temperature: float) -> torch.Tensor:
    """(S, V): of every token at each sampled place of one row, by the definition: no layouts, no chunks."""
    import numpy as np
    import torch

    ids = torch.tensor(line.columns["tokens"].astype(np.int64))
    logits_TV = cast(Any, model)(input_ids=ids[None], use_cache=False).logits[0].double() / temperature
    logits_TV[:, list(adapter.banned_token_ids)] = -1e30
    sampled = np.flatnonzero(line.columns["mask"])
    logprobs_SV: torch.Tensor = logits_TV.log_softmax(-1)[sampled - 1]
    return logprobs_SV
