"""Checks that every algorithm must pass, whatever its formulas. In a plugin's tests, all there is to write::

    def test_mine() -> None:
        check_algorithm(Mine(Mine.Config()))

They run on the rows of ``example_groups``, through the algorithm's own ``advantages``, ``prepare`` and ``loss``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.interfaces import Algorithm, Columns, Row, ScoredGroup, Streaming
from relax_core.testing.algorithm_examples import (
    POLICY,
    Reward,
    changed,
    credited,
    example_groups,
    example_rows,
    on_policy,
    rows_of,
    scored_group,
)
from relax_core.testing.algorithm_update import Update, cuts, evaluate, make_batch, outputs, window

__all__ = [
    "POLICY",
    "Update",
    "check_algorithm",
    "cuts",
    "evaluate",
    "example_groups",
    "example_rows",
    "make_batch",
    "outputs",
    "scored_group",
]

TOLERANCE = 1e-6
NAN = float("nan")


def check_algorithm(algorithm: Algorithm, *, policy_gradient: bool = True) -> None:
    """Raise AssertionError, saying what is wrong, unless the algorithm keeps its promises.

    Its columns are well formed; its loss does not depend on how trajectories are cut into micro-batches, on padding, on
    what stands at masked tokens, or on untrained rows; it survives awkward rows; and, as a policy gradient, its
    gradient at ratio 1 is -A x grad log p. Distillation and the like pass ``policy_gradient=False``.
    """
    check_columns(algorithm)
    check_streaming(algorithm)
    check_cuts(algorithm)
    check_masked(algorithm)
    check_untrained(algorithm)
    check_awkward(algorithm)
    if policy_gradient:
        check_ratio_one(algorithm)


# --- columns ----------------------------------------------------------------------------------------------------------


def check_columns(algorithm: Algorithm) -> None:
    """Each row gets an advantage per token, a weight and units: nothing at masked tokens and in untrained rows.

    And the columns that the algorithm ``makes``, with finite numbers of the same shape.
    """
    groups = example_groups(algorithm.needs)
    well_formed(algorithm, groups, credited(algorithm, groups))


def well_formed(algorithm: Algorithm, groups: Sequence[ScoredGroup], made: Mapping[str, Columns]) -> None:
    """Raise AssertionError unless the columns ``made`` by ``advantages`` are as they must be."""
    assert set(made) == {row.id for row in rows_of(groups)}, "advantages() must cover exactly the rows"
    allowed = {"advantages", "weight", "units", *algorithm.makes}
    for member in (member for group in groups for member in group.members):
        for row in member.rows:
            mask, columns = row.columns["mask"], made[row.id]
            assert set(columns) == allowed, f"{row.id}: has the columns {sorted(columns)}, not {sorted(allowed)}"
            for name in ("advantages", *sorted(algorithm.makes)):
                _per_token(row.id, name, columns[name], mask)
            advantages, weight, units = columns["advantages"], columns["weight"], columns["units"]
            assert _finite([weight, units]), f"{row.id}: a number is not finite"
            assert min(weight, units) >= 0, f"{row.id}: weight {weight} or units {units} is negative"
            assert not advantages[mask == 0].any(), f"{row.id}: an advantage is not 0 where mask is 0"
            if member.reward is None or not mask.any():
                assert weight == units == 0 and not advantages.any(), f"{row.id}: has a share, but nothing to train"


def _per_token(row: str, name: str, values: Any, mask: Any) -> None:
    import numpy as np

    assert values.dtype == np.float32, f"{row}: {name} are {values.dtype}, not float32"
    assert values.shape == mask.shape, f"{row}: {name} have shape {values.shape}, not (T,)"
    assert _finite(values), f"{row}: a number of {name} is not finite"


def check_streaming(algorithm: Algorithm) -> None:
    """Unless it says ``Streaming.BATCH``, a group's columns do not depend on the other groups of the step."""
    if algorithm.streaming is Streaming.BATCH:
        return
    groups = example_groups(algorithm.needs)
    together = credited(algorithm, groups)
    for group in groups:
        _same_columns(credited(algorithm, [group]), together, "depends on other groups")


def _same_columns(some: Mapping[str, Columns], all_: Mapping[str, Columns], problem: str) -> None:
    import numpy as np

    for row, columns in some.items():
        for name, value in columns.items():
            assert np.array_equal(value, all_[row][name]), f"{row}: {name} {problem}"


# --- invariance -------------------------------------------------------------------------------------------------------


def check_cuts(algorithm: Algorithm) -> None:
    """Micro-batches of any size, padded to any width, add up to the same loss, gradient and metrics."""
    rows = example_rows(algorithm)
    whole = evaluate(algorithm, rows)
    for size in (1, 2, 4):
        assert_equal(evaluate(algorithm, rows, size=size), whole, f"micro-batches of {size} trajectories")
    assert_equal(evaluate(algorithm, rows, padding=5), whole, "five more columns of padding")


def check_masked(algorithm: Algorithm) -> None:
    """Whatever stands at masked tokens, NaN and infinity included, changes nothing and gets no gradient."""
    rows = example_rows(algorithm)
    plain = evaluate(algorithm, rows)
    for name, gradient in plain.gradients.items():
        assert _finite(gradient), f"{name} has a gradient that is not finite"
    for garbage in (7.0, -1e9, float("inf"), NAN):
        changed = evaluate(algorithm, rows, garbage=garbage, padding=1)
        assert_equal(changed, plain, f"{garbage} at masked tokens")


def check_untrained(algorithm: Algorithm) -> None:
    """Rows without a share count nowhere; with no other rows, loss and metrics are finite and there is no gradient."""
    rows = example_rows(algorithm)
    trained = [row for row in rows if row.columns["weight"]]
    untrained = [row for row in rows if not row.columns["weight"]]
    assert_equal(evaluate(algorithm, trained), evaluate(algorithm, rows), "without the untrained rows")
    nothing = evaluate(algorithm, untrained)
    assert nothing.loss == 0, f"the loss of untrained rows is {nothing.loss}, not 0"
    assert _finite([*nothing.metrics.values()]), f"metrics of untrained rows are not finite: {nothing.metrics}"


def check_ratio_one(algorithm: Algorithm) -> None:
    """Where engine, old and trained policy agree, each log-prob's gradient is -A x weight, and 0 at masked tokens."""
    import numpy as np

    groups = [changed(group, on_policy) for group in example_groups(algorithm.needs)]
    rows = [row for row in example_rows(algorithm, groups) if row.columns["weight"]]
    units = sum(row.columns["units"] for row in rows)
    expected = np.concatenate([window(row, -row.columns["advantages"] * row.columns["weight"] / units) for row in rows])
    for old in (True, False):
        if not old and "old_logprobs" in algorithm.needs:
            continue  # then a run always brings them
        found = evaluate(algorithm, rows, old=old).gradients["logprobs"]
        error = np.abs(found - expected).max()
        assert error < TOLERANCE, f"at ratio 1 a gradient is off -A x grad log p by {error:.2e}"


# --- awkward rows -----------------------------------------------------------------------------------------------------

AWKWARD: Mapping[str, Sequence[tuple[Reward, Sequence[str]]]] = {
    "a group of one": [(1.0, [".##"])],
    "a uniform group": [(0.1, [".##"]), (0.1, [".#"]), (0.1, [".###"])],
    "a group without a reward": [(None, [".##"]), (None, [".#"])],
    "a group of one with a reward": [(None, [".##"]), (1.0, [".#"])],
    "an empty response": [(1.0, [".##"]), (0.0, ["..."]), (0.5, [".###"])],
    "a group of empty responses": [(1.0, ["..."]), (0.0, ["."])],
    "a trajectory with a masked row": [(1.0, [".##", "...."]), (0.0, [".#"])],
    "one token among long responses": [(1.0, ["#"]), (0.0, ["." + 40 * "#"]), (0.0, ["." + 30 * "#" + "..#"])],
    "a trajectory of several samples": [(1.0, [".#", "..##", ".###.#"]), (0.0, [".##"]), (0.5, ["#", "#"])],
    "tokens that the trained policy finds impossible": [(1.0, [".#<#"]), (0.0, [".<#"]), (0.5, ["<"])],
    "tokens that the other policies find impossible": [(1.0, [".#>#"]), (0.0, [".>#"]), (0.5, [">"])],
    "tokens that the engine alone finds impossible": [(1.0, [".#~#"]), (0.0, [".~#"]), (0.5, ["~"])],
}


def check_awkward(algorithm: Algorithm) -> None:
    """A group of each kind of ``AWKWARD``, with NaN under every mask, beside the examples: all stays finite.

    It changes neither the columns of other groups (unless the algorithm says ``Streaming.BATCH`` and it is trained) nor
    any gradient of theirs, and its own is the same in micro-batches of one trajectory.
    """
    import numpy as np

    groups = example_groups(algorithm.needs)
    plain = credited(algorithm, groups)
    for what, members in AWKWARD.items():
        awkward = scored_group("awkward", members, algorithm.needs)
        made = credited(algorithm, [*groups, awkward])
        well_formed(algorithm, [*groups, awkward], made)
        trained = any(made[row.id]["weight"] for row in rows_of([awkward]))
        if not trained or algorithm.streaming is not Streaming.BATCH:
            _same_columns(plain, made, f"changes beside {what}")
        rows = example_rows(algorithm, [*groups, awkward])
        others = [row for row in rows if row.group != "awkward"]
        found, rest = evaluate(algorithm, rows, garbage=NAN), evaluate(algorithm, others, garbage=NAN)
        check_finite(found, what)
        check_finite(evaluate(algorithm, [row for row in rows if row.group == "awkward"], garbage=NAN), f"only {what}")
        assert_equal(evaluate(algorithm, rows, size=1, garbage=NAN), found, f"{what}, each trajectory alone", 1e-4)
        share = _units(others) / _units(rows)
        for name, gradient in rest.gradients.items():
            beside = found.gradients[name][: len(gradient)]
            same = np.allclose(beside, gradient * share, rtol=1e-5, atol=TOLERANCE)
            assert same, f"the gradient of {name} of other rows changes beside {what}"


def _units(rows: Sequence[Row]) -> float:
    return sum(row.columns["units"] for row in rows) or 1.0


# --- comparing --------------------------------------------------------------------------------------------------------


def check_finite(update: Update, what: str) -> None:
    """Raise AssertionError unless loss, gradients and metrics are finite."""
    assert _finite([update.loss]), f"{what}: the loss is {update.loss}"
    for name, gradient in update.gradients.items():
        assert _finite(gradient), f"{what}: the gradient of {name} is not finite"
    for name, metric in update.metrics.items():
        assert _finite([*metric]), f"{what}: metric {name} is {metric}"


def _finite(values: Any) -> bool:
    import numpy as np

    return bool(np.isfinite(values).all())


def assert_equal(found: Update, expected: Update, change: str, relative: float = TOLERANCE) -> None:
    """Raise AssertionError naming the ``change`` unless both agree to 1e-6."""
    import numpy as np

    def same(a: Any, b: Any) -> bool:
        return bool(np.allclose(a, b, rtol=relative, atol=TOLERANCE))

    assert same(found.loss, expected.loss), f"{change}: the loss is {found.loss}, not {expected.loss}"
    for name, gradient in expected.gradients.items():
        assert same(found.gradients[name], gradient), f"{change}: the gradient of {name} differs"
    for name, metric in expected.metrics.items():
        assert same(found.metrics[name], metric), f"{change}: metric {name} is {found.metrics[name]}, not {metric}"
