"""One optimizer update of an algorithm on given rows, without a model: loss, metrics, and gradients by output.

Legend: B rows of a micro-batch, T tokens of a row's window, which begins at its first sampled token; K numbers of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from relax_core.interfaces import VALUES, Algorithm, Batch, Loss, Outputs, Row
from relax_core.testing.algorithm_examples import POLICY

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

SHAPES = {"topk_logprobs": "BTK", "full_logprobs": "BTV"}
"""Of the outputs that are wider than (B, T)."""


@dataclass(frozen=True, slots=True)
class Update:
    """The loss of an update, divided by its units, and its gradient by output: trained rows' windows in a line.

    With a critic its loss is added, and its metrics stand beside the policy's.
    """

    loss: float
    gradients: Mapping[str, NDArray[np.float32]]
    metrics: Mapping[str, tuple[float, float]]


def evaluate(
    algorithm: Algorithm,
    rows: Sequence[Row],
    *,
    size: int | None = None,
    padding: int = 0,
    garbage: float = 0.0,
    old: bool = True,
    step: int = 0,
) -> Update:
    """Accumulate the rows in micro-batches of ``size`` trajectories (default: one of all), as a trainer does.

    ``padding``: further columns on the right. ``garbage``: what stands at masked tokens. ``old``: whether the batch
    brings the log-probs of the policy at the start of the step. Rows are those of ``example_rows``.
    """
    import numpy as np
    import torch

    loss, units = 0.0, sum(row.columns["units"] for row in rows) or 1.0
    gradients: dict[str, list[NDArray[np.float32]]] = {name: [] for name in sorted(algorithm.outputs)}
    metrics: dict[str, tuple[float, float]] = {}
    for cut in cuts(rows, size):
        batch = make_batch(cut, step=step, padding=padding, garbage=garbage, old=old)
        leaves = {
            name: _padded(cut, POLICY[name], batch.mask_BT, garbage).requires_grad_()
            for name in sorted(algorithm.outputs)
        }
        result = _both_losses(algorithm, batch, leaves)
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if result.total.requires_grad:
            found = torch.autograd.grad(result.total, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            full = (torch.zeros_like(leaf) if gradient is None else gradient).numpy() / units
            assert not full[~batch.mask_BT.numpy()].any(), f"a masked token gets a gradient of its {name}"
            assert not full[batch.weight_B.numpy() == 0].any(), f"an untrained row gets a gradient of its {name}"
            lengths = [len(window(row, row.columns["mask"])) if row.columns["weight"] else 0 for row in cut]
            gradients[name] += [row[:length] for row, length in zip(full, lengths, strict=True)]
        loss += result.total.item() / units
        for name, (total, count) in result.metrics.items():
            assert not total.requires_grad and not count.requires_grad, f"metric {name} is not detached"
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + total.item(), before[1] + count.item())
    return Update(loss, {name: np.concatenate(parts) for name, parts in gradients.items()}, metrics)


def _both_losses(algorithm: Algorithm, batch: Batch, leaves: Mapping[str, torch.Tensor]) -> Loss:
    """The policy's loss, and a critic's added to it where there are values."""
    policy = algorithm.loss(batch, outputs({name: leaf for name, leaf in leaves.items() if name not in VALUES}))
    if "values" not in leaves:
        return policy
    critic = algorithm.value_loss(batch, leaves["values"])
    assert not critic.metrics.keys() & policy.metrics.keys(), "loss and value_loss report a metric of the same name"
    return replace(policy, total=policy.total + critic.total, metrics={**critic.metrics, **policy.metrics})


def outputs(grids: Mapping[str, torch.Tensor]) -> Outputs:
    """What the policy's trainer gives, from its tensors by name (``logprobs``, ``topk_logprobs``, ...)."""
    return Outputs(**{f"{name}_{SHAPES.get(name, 'BT')}": grid for name, grid in grids.items()})


def cuts(rows: Sequence[Row], size: int | None = None) -> Iterator[list[Row]]:
    """The rows in micro-batches of so many whole trajectories (default: all)."""
    whole = [list(members) for _, members in groupby(rows, key=lambda row: row.trajectory)]
    step = size or len(whole)
    for start in range(0, len(whole), step):
        yield [row for trajectory in whole[start : start + step] for row in trajectory]


def make_batch(
    rows: Sequence[Row], *, step: int = 0, padding: int = 0, garbage: float = 0.0, old: bool = True
) -> Batch:
    """A micro-batch of credited rows (see ``example_rows``), on the CPU in float32."""
    import torch

    from relax_core.torch.batch import numbered

    windows = [window(row, row.columns["mask"]) for row in rows]
    mask_BT = torch.zeros(len(rows), max(map(len, windows)) + padding, dtype=torch.bool)
    for i, part in enumerate(windows):
        mask_BT[i, : len(part)] = torch.from_numpy(part != 0)
    named = {"tokens", "mask", "logprobs", "old_logprobs", "advantages", "weight", "units", *POLICY.values()}
    others = [name for name in rows[0].columns if name not in named]
    return Batch(
        step=step,
        tokens_BT=_padded(rows, "tokens", mask_BT, 0),
        mask_BT=mask_BT,
        logprobs_BT=_padded(rows, "logprobs", mask_BT, garbage),
        old_logprobs_BT=_padded(rows, "old_logprobs", mask_BT, garbage) if old else None,
        advantages_BT=_padded(rows, "advantages", mask_BT, garbage),
        weight_B=torch.tensor([row.columns["weight"] for row in rows]),
        units_B=torch.tensor([row.columns["units"] for row in rows]),
        sequence_B=torch.tensor(numbered([row.trajectory for row in rows])),
        columns={name: _padded(rows, name, mask_BT, garbage) for name in others},
    )


def window(row: Row, column: NDArray[Any]) -> NDArray[Any]:
    """The part of a column from the first sampled token on; empty if there is none."""
    mask = row.columns["mask"]
    return column[int(mask.argmax()) if mask.any() else len(mask) :]


def _padded(rows: Sequence[Row], name: str, mask_BT: torch.Tensor, garbage: float) -> torch.Tensor:
    """A column's windows, left-aligned: (B, T), or (B, T, K) of one with a line for each sampled token.

    ``garbage`` stands at every masked token; ids there are 0.
    """
    import numpy as np
    import torch

    columns = [np.asarray(row.columns[name]) for row in rows]
    is_ids = columns[0].dtype.kind in "iu"
    wide = columns[0].shape[1:]
    values = torch.full(
        (*mask_BT.shape, *wide), 0 if is_ids else garbage, dtype=torch.int64 if is_ids else torch.float32
    )
    for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
        sampled = column if wide else column[row.columns["mask"] > 0]
        values[i, mask_BT[i]] = torch.from_numpy(sampled).to(values.dtype)
    return values
