"""Decoupled clip and dynamic sampling policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import PositiveFloat

from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup


class Dapo(PolicyGradient):
    """DAPO (arXiv:2503.14476): GRPO with a higher upper clip, averaged over tokens.

    A = (R - mean) / std over the group. Per token, with r = pi / pi_old,
    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). What else the paper combines are callbacks:
    ``dynamic-sampling``, ``overlong`` and ``mask-truncated``.
    """

    about = About(
        formula="A = (R - mean) / (std + 1e-6); -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        papers=("2503.14476",),
        use="Long chains of thought whose entropy collapses under GRPO. The paper's recipe adds the callbacks "
        "dynamic-sampling (groups with equal rewards are replaced), overlong (long answers lose reward) and "
        "mask-truncated (cut-off answers are not trained): list them in the run file.",
        defaults="Clip 0.2 below and 0.28 above, as in the paper: unlikely tokens get more room to become likely. "
        "token-mean, as in the paper: each token weighs the same, however long its answer.",
    )

    class Config(Clipped):
        """Settings of ``dapo``."""

        clip_high: PositiveFloat = 0.28
        """The ratio is kept below 1 + clip_high."""

    config: Config

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        return self.compared(groups)

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms.terms import Terms, clipped

        return clipped(self.config, Terms.of(batch, outputs))
