"""Checks that every algorithm must pass, whatever its formulas. In a plugin's tests, all there is to write::

    def test_mine() -> None:
        check_algorithm(Mine(Mine.Config()))

They run on the rows of ``example_groups``, through the algorithm's own ``advantages`` and ``loss``.

Legend: B rows of a micro-batch, T tokens of a row's window, which begins at its first sampled token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_core import keys
from relax_core.interfaces import Algorithm, Batch, Columns, Member, Outputs, Row, ScoredGroup, Streaming
from relax_core.types import Task

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

POLICY = {"logprobs": "policy_logprobs", "entropy": "policy_entropy", "values": "policy_values"}
"""What the trainer computes, and the column of an example that plays its part."""
TOLERANCE = 1e-6


def check_algorithm(algorithm: Algorithm, *, policy_gradient: bool = True) -> None:
    """Raise AssertionError, saying what is wrong, unless the algorithm keeps its promises.

    Its columns are well formed; its loss does not depend on how rows are cut into micro-batches, on padding, on what
    stands at masked tokens, or on untrained rows; and, as a policy gradient, its gradient at ratio 1 is
    -A x grad log p. Distillation and the like pass ``policy_gradient=False``.
    """
    check_columns(algorithm)
    check_streaming(algorithm)
    check_cuts(algorithm)
    check_masked(algorithm)
    check_untrained(algorithm)
    if policy_gradient:
        check_ratio_one(algorithm)


# --- the checks -------------------------------------------------------------------------------------------------------


def check_columns(algorithm: Algorithm) -> None:
    """Each row gets an advantage per token, a weight and units: nothing at masked tokens and in untrained rows."""
    import numpy as np

    groups = example_groups(algorithm.needs)
    made = algorithm.advantages(groups)
    members = [member for group in groups for member in group.members]
    assert set(made) == {row.id for member in members for row in member.rows}, (
        "advantages() must cover exactly the rows"
    )
    for member in members:
        for row in member.rows:
            mask, columns = row.columns["mask"], made[row.id]
            advantages, weight, units = columns["advantages"], columns["weight"], columns["units"]
            assert advantages.dtype == np.float32, f"{row.id}: advantages are {advantages.dtype}, not float32"
            assert advantages.shape == mask.shape, f"{row.id}: advantages have shape {advantages.shape}, not (T,)"
            assert np.isfinite([*advantages, weight, units]).all(), f"{row.id}: a number is not finite"
            assert min(weight, units) >= 0, f"{row.id}: weight {weight} or units {units} is negative"
            assert not advantages[mask == 0].any(), f"{row.id}: an advantage is not 0 where mask is 0"
            if member.reward is None or not mask.any():
                assert weight == units == 0 and not advantages.any(), f"{row.id}: has a share, but nothing to train"


def check_streaming(algorithm: Algorithm) -> None:
    """Unless it says ``Streaming.BATCH``, a group's columns do not depend on the other groups of the step."""
    import numpy as np

    if algorithm.streaming is Streaming.BATCH:
        return
    groups = example_groups(algorithm.needs)
    together = algorithm.advantages(groups)
    for group in groups:
        for row, alone in algorithm.advantages([group]).items():
            for name, value in alone.items():
                assert np.array_equal(value, together[row][name]), f"{row}: {name} depends on other groups"


def check_cuts(algorithm: Algorithm) -> None:
    """Micro-batches of any size, padded to any width, add up to the same loss, gradient and metrics."""
    rows = example_rows(algorithm)
    whole = evaluate(algorithm, rows)
    for size in (1, 2, 4):
        assert_equal(evaluate(algorithm, rows, size=size), whole, f"micro-batches of {size} rows")
    assert_equal(evaluate(algorithm, rows, padding=5), whole, "five more columns of padding")


def check_masked(algorithm: Algorithm) -> None:
    """Whatever stands at masked tokens, NaN and infinity included, changes nothing and gets no gradient."""
    import numpy as np

    rows = example_rows(algorithm)
    plain = evaluate(algorithm, rows)
    for name, gradient in plain.gradients.items():
        assert np.isfinite(gradient).all(), f"{name} has a gradient that is not finite"
    for garbage in (7.0, -1e9, float("inf"), float("nan")):
        changed = evaluate(algorithm, rows, garbage=garbage, padding=1)
        assert_equal(changed, plain, f"{garbage} at masked tokens")


def check_untrained(algorithm: Algorithm) -> None:
    """Rows without a share count nowhere; with no other rows, loss and metrics are finite and there is no gradient."""
    import numpy as np

    rows = example_rows(algorithm)
    trained = [row for row in rows if row.columns["weight"]]
    untrained = [row for row in rows if not row.columns["weight"]]
    assert_equal(evaluate(algorithm, trained), evaluate(algorithm, rows), "without the untrained rows")
    nothing = evaluate(algorithm, untrained)
    assert nothing.loss == 0, f"the loss of untrained rows is {nothing.loss}, not 0"
    assert np.isfinite([*nothing.metrics.values()]).all(), (
        f"metrics of untrained rows are not finite: {nothing.metrics}"
    )


def check_ratio_one(algorithm: Algorithm) -> None:
    """Where engine, old and trained policy agree, each log-prob's gradient is -A x weight, and 0 at masked tokens."""
    import numpy as np

    rows = [Row(row.id, row.group, _on_policy(row.columns)) for row in example_rows(algorithm) if row.columns["weight"]]
    units = sum(row.columns["units"] for row in rows)
    expected = np.concatenate(
        [_window(row, -row.columns["advantages"] * row.columns["weight"] / units) for row in rows]
    )
    for old in (True, False):
        found = evaluate(algorithm, rows, old=old).gradients["logprobs"]
        error = np.abs(found - expected).max()
        assert error < TOLERANCE, f"at ratio 1 a gradient is off -A x grad log p by {error:.2e}"


def _on_policy(columns: Columns) -> Columns:
    """The columns with the log-probs of every policy replaced by those of the policy being trained."""
    return {name: columns["policy_logprobs"] if name.endswith("logprobs") else v for name, v in columns.items()}


# --- one optimizer update on examples ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Update:
    """The loss of an update, divided by its units, and its gradient by output: trained rows' windows in a line."""

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
) -> Update:
    """Accumulate the rows in micro-batches of ``size`` (default: one), as a trainer does.

    ``padding``: further columns on the right. ``garbage``: what stands at masked tokens. ``old``: whether the batch
    brings the log-probs of the policy at the start of the step.
    """
    import numpy as np
    import torch

    loss, units = 0.0, sum(row.columns["units"] for row in rows) or 1.0
    gradients: dict[str, list[NDArray[np.float32]]] = {name: [] for name in sorted(algorithm.outputs)}
    metrics: dict[str, tuple[float, float]] = {}
    for start in range(0, len(rows), size or len(rows)):
        cut = rows[start : start + (size or len(rows))]
        batch = make_batch(cut, padding=padding, garbage=garbage, old=old)
        leaves = {
            name: _padded(cut, POLICY[name], batch.mask_BT, garbage).requires_grad_()
            for name in sorted(algorithm.outputs)
        }
        result = algorithm.loss(batch, Outputs(**{f"{name}_BT": leaf for name, leaf in leaves.items()}))
        found = torch.autograd.grad(result.total, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            full = (torch.zeros_like(leaf) if gradient is None else gradient).numpy() / units
            assert not full[~batch.mask_BT.numpy()].any(), f"a masked token gets a gradient of its {name}"
            assert not full[batch.weight_B.numpy() == 0].any(), f"an untrained row gets a gradient of its {name}"
            lengths = [len(_window(row, row.columns["mask"])) if row.columns["weight"] else 0 for row in cut]
            gradients[name] += [row[:length] for row, length in zip(full, lengths, strict=True)]
        loss += result.total.item() / units
        for name, (total, count) in result.metrics.items():
            assert not total.requires_grad and not count.requires_grad, f"metric {name} is not detached"
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + total.item(), before[1] + count.item())
    return Update(loss, {name: np.concatenate(parts) for name, parts in gradients.items()}, metrics)


def assert_equal(found: Update, expected: Update, change: str) -> None:
    """Raise AssertionError naming the ``change`` unless both agree to 1e-6."""
    import numpy as np

    def same(a: Any, b: Any) -> bool:
        return bool(np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE))

    assert same(found.loss, expected.loss), f"{change}: the loss is {found.loss}, not {expected.loss}"
    for name, gradient in expected.gradients.items():
        assert same(found.gradients[name], gradient), f"{change}: the gradient of {name} differs"
    for name, metric in expected.metrics.items():
        assert same(found.metrics[name], metric), f"{change}: metric {name} is {found.metrics[name]}, not {metric}"


def make_batch(
    rows: Sequence[Row], *, step: int = 0, padding: int = 0, garbage: float = 0.0, old: bool = True
) -> Batch:
    """A micro-batch of credited rows (see ``example_rows``), on the CPU in float32."""
    import torch

    from relax_core.torch.batch import numbered

    windows = [_window(row, row.columns["mask"]) for row in rows]
    mask_BT = torch.zeros(len(rows), max(map(len, windows)) + padding, dtype=torch.bool)
    for i, window in enumerate(windows):
        mask_BT[i, : len(window)] = torch.from_numpy(window != 0)
    named = {"tokens", "mask", "logprobs", "old_logprobs", "advantages", "weight", "units", *POLICY.values()}
    others = [name for name in rows[0].columns if name not in named]
    return Batch(
        step=step,
        tokens_BT=_padded(rows, "tokens", mask_BT, 0).long(),
        mask_BT=mask_BT,
        logprobs_BT=_padded(rows, "logprobs", mask_BT, garbage),
        old_logprobs_BT=_padded(rows, "old_logprobs", mask_BT, garbage) if old else None,
        advantages_BT=_padded(rows, "advantages", mask_BT, garbage),
        weight_B=torch.tensor([row.columns["weight"] for row in rows]),
        units_B=torch.tensor([row.columns["units"] for row in rows]),
        sequence_B=torch.tensor(numbered([row.trajectory for row in rows])),
        columns={name: _padded(rows, name, mask_BT, garbage) for name in others},
    )


def _window(row: Row, column: NDArray[Any]) -> NDArray[Any]:
    """The part of a column from the first sampled token on; empty if there is none."""
    mask = row.columns["mask"]
    return column[int(mask.argmax()) if mask.any() else len(mask) :]


def _padded(rows: Sequence[Row], name: str, mask_BT: torch.Tensor, garbage: float) -> torch.Tensor:
    """A column's windows, left-aligned (B, T), with ``garbage`` at every masked token."""
    import torch

    values_BT = torch.zeros(mask_BT.shape)
    for i, row in enumerate(rows):
        window = _window(row, row.columns[name])
        values_BT[i, : len(window)] = torch.from_numpy(window)
    return torch.where(mask_BT, values_BT, garbage)


# --- examples ---------------------------------------------------------------------------------------------------------

_EXAMPLES: dict[str, list[tuple[float | None, list[str]]]] = {
    "task-0": [(1.0, ["..#"]), (0.0, [".##", "..###"]), (0.5, [".####"]), (None, [".##.###"])],
    "task-1": [(1.0, [".######"]), (0.25, [".."]), (0.0, [".###.####"]), (1.0, [".########"])],
}
"""A single token, a trajectory of two rows, an abstention, a row without a sampled token, observations in between."""


def example_groups(needs: frozenset[str] = frozenset()) -> list[ScoredGroup]:
    """Two tasks of four members each, with every column named in ``needs``; equal at every call."""
    return [scored_group(name, members, needs) for name, members in _EXAMPLES.items()]


def scored_group(
    name: str, members: Sequence[tuple[float | None, Sequence[str]]], needs: frozenset[str] = frozenset()
) -> ScoredGroup:
    """A group from each member's reward and rows. A row is drawn: ``#`` a sampled token, ``.`` another one.

    Its numbers are random, but a function of its id: row ids are ``<name>/<member>/<row>``.
    """
    return ScoredGroup(
        name,
        Task(name, ()),
        [
            Member(
                reward,
                {"example": reward},
                [Row(f"{name}/{m}/{s}", name, _columns(row, needs, f"{name}/{m}/{s}")) for s, row in enumerate(rows)],
            )
            for m, (reward, rows) in enumerate(members)
        ],
    )


def example_rows(algorithm: Algorithm, groups: Sequence[ScoredGroup] | None = None) -> list[Row]:
    """The rows of the groups (default: ``example_groups``) with the columns that the algorithm makes."""
    groups = example_groups(algorithm.needs) if groups is None else groups
    made = algorithm.advantages(groups)
    rows = [row for group in groups for member in group.members for row in member.rows]
    return [Row(row.id, row.group, {**row.columns, **made[row.id]}) for row in rows]


def _columns(drawing: str, needs: frozenset[str], row: str) -> Columns:
    import numpy as np

    def numbers(name: str) -> NDArray[np.float32]:
        """In [0, 1); from the core's own stream, which no version of a library changes."""
        start = keys.stream(0, "algorithm checks", row, name)
        return np.array([keys.uniform(start, position) for position in range(len(drawing))], dtype=np.float32)

    policy = np.log(0.05 + 0.9 * numbers("policy_logprobs"))
    columns: dict[str, Any] = {
        "tokens": (50 * numbers("tokens")).astype(np.int32),
        "mask": np.array([token == "#" for token in drawing], dtype=np.int8),
        "policy_logprobs": policy,
        "policy_entropy": 2 * numbers("policy_entropy"),
        "policy_values": 2 * numbers("policy_values") - 1,
    }
    for name in sorted({"logprobs", "old_logprobs", *needs}):  # other policies: ratios from 0.6 to 1.6
        columns[name] = policy + numbers(name) - 0.5
    return columns
