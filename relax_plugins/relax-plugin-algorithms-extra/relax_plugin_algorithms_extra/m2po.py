"""Second-moment trust policy optimisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveFloat

from relax_algorithms.options import Options
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, Row, ScoredGroup

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.config.schema import RunConfig

MASK = "m2_mask"
"""The column that ``prepare`` makes: 1 where a token is trained, 0 where it is left out or was not sampled."""
_CLIP = "m2po masks outliers instead of clipping the ratio: leave it out"


class M2po(PolicyGradient):
    """M2PO (arXiv:2510.01161): trains on stale data and leaves out only the outliers that make it unstable.

    With A of GRPO and r = pi / mu, mu being the policy that sampled: loss = -m r A per token. m is 0 for the tokens
    with the largest (log r)^2, as many of them that the mean of the others, M2, is at most ``threshold``. This concerns
    only tokens that the loss would push further away from mu (A > 0 and r > 1, or A < 0 and r < 1), in M2 as in m, as
    in the authors' code; all others are kept. Masked tokens stay in the counts of the aggregation. Equal (log r)^2 are
    left out together, so that m does not depend on the order of rows.

    M2 belongs to a whole batch. So ``prepare`` finds m once a step from all of its tokens, with pi as it is at the
    start of the step: for the step's first update that is the paper's mask, over the step's batch. Further updates of
    the step keep m, while r is that of the moment: what they add to r is not bounded by it (the paper finds m anew for
    each update). The metric ``m2`` is M2 of the kept tokens at the moment, averaged over updates: watch it with many.
    """

    about = About(
        formula="A of grpo; -m (pi / mu) A; m = 0 for the largest (log pi - log mu)^2 among the tokens with A > 0 and "
        "pi > mu, or A < 0 and pi < mu, until the mean of the rest is at most threshold; else 1",
        papers=("2510.01161",),
        use="Data that is many versions old (a large max_staleness), where clipping takes the gradient from the tokens "
        "that matter most.",
        defaults="threshold 0.04, which the paper uses for every model and does not find sensitive.",
    )
    needs = frozenset({"old_logprobs"})

    class Config(Options):
        """Settings of ``m2po``."""

        refuses: ClassVar[Mapping[str, str]] = {
            "correction": "the loss of m2po already weighs by pi / mu, and rho would count mu twice: leave it out",
            "clip_low": _CLIP,
            "clip_high": _CLIP,
            "dual_clip": _CLIP,
        }
        threshold: PositiveFloat = 0.04
        """Largest second moment of log pi - log mu, over the step's tokens that move away from mu and are trained."""

    config: Config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        yield from super().check(config, run)
        if run.old == "engine":
            yield "old is engine, but m2po compares the policy at the start of a step with the engine's: set recompute"

    @classmethod
    def notes(cls, config: Any, run: RunConfig) -> Iterable[str]:
        return ()  # staleness is what it is for; it needs no correction

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def prepare(self, rows: Sequence[Row]) -> Mapping[str, Columns]:
        """``m2_mask`` float32 (T,) of each row, from those of the whole step."""
        import numpy as np

        squares = {row.id: _harmful_squares(row) for row in rows}
        harmful = [values[values > 0] for values in squares.values()]
        limit = limit_of(np.concatenate([np.zeros(0), *harmful]), self.config.threshold)
        return {
            row.id: {MASK: ((row.columns["mask"] > 0) & (squares[row.id] < limit)).astype(np.float32)} for row in rows
        }

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops
        from relax_algorithms.terms import Terms, composed

        terms = Terms.of(batch, outputs)
        kept_BT = ops.masked(batch.columns[MASK], terms.mask_BT) > 0
        log_ratio_BT = ops.log_ratio(outputs.logprobs_BT, batch.logprobs_BT, terms.mask_BT)
        loss_BT = ops.masked(-log_ratio_BT.exp() * terms.advantages_BT, kept_BT)
        harmful_BT = kept_BT & (terms.advantages_BT * log_ratio_BT > 0)
        return composed(
            self.config, terms, loss_BT, ~kept_BT, {"m2": ops.masked_sum(log_ratio_BT.square(), harmful_BT)}
        )


def limit_of(squares: NDArray[np.float64], threshold: float) -> float:
    """The smallest of the squares (N,) to be left out, so that the mean of all below it is at most the threshold.

    Infinity when all may stay.
    """
    import numpy as np

    ascending = np.sort(squares)
    too_much = np.cumsum(ascending) > threshold * np.arange(1, len(ascending) + 1)
    return float(ascending[too_much.argmax()]) if too_much.any() else float("inf")


def _harmful_squares(row: Row) -> NDArray[np.float64]:
    """(log pi_old - log mu)^2 of each token that moves away from mu, 0 at all others; float64 (T,)."""
    import numpy as np

    columns = row.columns
    sampled = columns["mask"] > 0  # others may hold NaN; where nothing is trained the advantage is 0
    old, mu = (np.where(sampled, columns[name], 0).astype(np.float64) for name in ("old_logprobs", "logprobs"))
    log_ratio = np.clip(old - mu, -20, 20)  # as in every loss
    return np.where(columns["advantages"] * log_ratio > 0, log_ratio**2, 0.0)
