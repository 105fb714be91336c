"""On-policy distillation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from relax_algorithms import credit
from relax_algorithms.options import Clipped
from relax_algorithms.policy_gradient import PolicyGradient
from relax_core.interfaces import About, Batch, Columns, Loss, Outputs, ScoredGroup

if TYPE_CHECKING:
    from torch import Tensor

    from relax_algorithms.terms import Metrics, Terms
    from relax_core.config.schema import RunConfig

_NEEDS = {
    "sampled": frozenset({"teacher_logprobs"}),
    "topk": frozenset({"topk_ids", "teacher_topk_logprobs"}),
    "full": frozenset({"teacher_full_logprobs"}),
}
_OUTPUTS = {
    "sampled": frozenset[str](),
    "topk": frozenset({"topk_logprobs"}),
    "full": frozenset({"full_logprobs"}),
}
_OF_THE_REWARD = ("clip_low", "clip_high", "dual_clip", "whiten")
_OF_SAMPLED_TOKENS = ("correction", "rejection", "opsm")


class Opd(PolicyGradient):
    """On-policy distillation (arXiv:2306.13649, 2306.08543): the student plays, a teacher says what it would have said.

    The loss of a token is ``weight`` x the distance from the teacher + ``reward_weight`` x the loss of GRPO. Over
    ``sampled`` tokens the first is a policy gradient: -r A with A = sg(log pi_T - log pi), an estimate of the reverse
    divergence's gradient. Over ``topk`` and ``full`` it is a divergence of the two distributions (see divergence.py).
    In each place it counts what is said there, not where that leads. A play on which every reward abstains is not
    trained, here too, although distillation alone looks at no reward.
    """

    about = About(
        formula="weight x (sampled: -r sg(log pi_T - log pi); topk, full: KL(pi || pi_T), KL(pi_T || pi) or JSD) "
        "+ reward_weight x GRPO's loss",
        papers=("2306.13649", "2306.08543"),
        use="A better model of the same vocabulary is at hand: each token is judged, so far fewer plays are needed "
        "than with a reward. Mixed with a reward to become better than the teacher.",
        defaults="The sampled token and the reverse divergence: the cheapest, and it is right on what the student "
        "itself says. topk and full have less noise for more memory. No reward. Clipping concerns the reward's part "
        "alone.",
    )
    compares = False

    class Config(Clipped):
        """Settings of ``opd``."""

        over: Literal["sampled", "topk", "full"] = "sampled"
        """Which tokens of the vocabulary are compared in each place: the one that was sampled, the teacher's most
        probable ones (``top_k`` of the stage ``teacher``) and the rest as one, or all (a number for each token of the
        vocabulary travels with each sampled one: for small vocabularies)."""
        divergence: Literal["reverse", "forward", "jsd"] = "reverse"
        """``reverse``: KL(student || teacher). ``forward``: KL(teacher || student). ``jsd``: between the two."""
        beta: Annotated[float, Field(gt=0, lt=1)] | None = None
        """Of ``jsd``, the teacher's share in the mixture: near 0 it is like ``forward``, near 1 like ``reverse``;
        default: 0.5."""
        weight: PositiveFloat = 1.0
        """Factor of the distance from the teacher."""
        reward_weight: NonNegativeFloat = 0.0
        """Factor of the loss by which GRPO learns from the reward; 0: distillation alone."""

        @model_validator(mode="after")
        def _together(self) -> Self:
            if found := [*_conflicts(self)]:
                raise ValueError("; ".join(found))
            return self

        @property
        def needs(self) -> frozenset[str]:
            return super().needs | _NEEDS[self.over]

        @property
        def outputs(self) -> frozenset[str]:
            return super().outputs | _OUTPUTS[self.over]

    config: Config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        if config.reward_weight and run.group_size < 2:
            yield (
                f"group_size is {run.group_size}, but reward_weight {config.reward_weight} compares the plays of a "
                "task with each other: set group_size to 2 or more, or reward_weight to 0"
            )
        yield from super().check(config, run)

    @classmethod
    def notes(cls, config: Any, run: RunConfig) -> Iterable[str]:
        return super().notes(config, run) if config.over == "sampled" or config.reward_weight else ()

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        return credit.group_metrics(groups) if self.config.reward_weight else {}

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        """Those of the reward, as in GRPO; 0 for distillation alone. The teacher's come with the loss: they follow the
        policy as it is in each update."""
        if self.config.reward_weight:
            return self.compared(groups)
        return self.credited(groups, credit.spread(groups, [[0.0] * len(group.members) for group in groups]))

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        from relax_algorithms import ops
        from relax_algorithms.terms import Terms, composed

        config, terms = self.config, Terms.of(batch, outputs)
        low, high, dual = config.clip_low, config.clip_high, config.dual_clip
        loss_BT = config.reward_weight * ops.clipped_surrogate(terms.ratio_BT, terms.advantages_BT, low, high, dual)
        clipped_BT = ops.is_clipped(terms.ratio_BT, terms.advantages_BT, low, high, dual)
        if config.over == "sampled":
            from_teacher_BT = -ops.k1(outputs.logprobs_BT.detach(), batch.columns["teacher_logprobs"], terms.mask_BT)
            loss_BT = loss_BT - config.weight * terms.ratio_BT * from_teacher_BT
            both_BT = config.weight * from_teacher_BT + config.reward_weight * terms.advantages_BT
            found = {"kl_teacher": ops.masked_sum(-from_teacher_BT, terms.mask_BT)}
            return composed(config, replace(terms, advantages_BT=both_BT), loss_BT, clipped_BT, found)
        divergence_BT, metrics = self._divergence(terms)
        policy = composed(config, terms, loss_BT, clipped_BT, metrics)
        # added after corrections: these weigh the token that was sampled, on which no divergence depends
        return replace(policy, total=policy.total + ops.aggregate(config.weight * divergence_BT, batch))

    def _divergence(self, terms: Terms) -> tuple[Tensor, Metrics]:
        """The divergence at each trained token (B, T), 0 elsewhere, with gradient; and what to report of it."""
        from relax_algorithms import divergence as distances
        from relax_algorithms import ops

        config, mask_BT, columns, outputs = self.config, terms.mask_BT, terms.batch.columns, terms.outputs
        beta = 0.5 if config.beta is None else config.beta
        if config.over == "topk":
            assert outputs.topk_logprobs_BTK is not None  # named in the outputs
            # few numbers: those of other tokens, which hold anything, are left out before anything is made of them
            student = distances.with_rest(outputs.topk_logprobs_BTK[mask_BT])
            teacher = distances.with_rest(columns["teacher_topk_logprobs"][mask_BT])
            found = distances.with_reverse(config.divergence, student, teacher, beta)
            found_BT, reverse_BT = (x.new_zeros(mask_BT.shape).masked_scatter(mask_BT, x) for x in found)
        else:
            assert outputs.full_logprobs_BTV is not None
            student, teacher = outputs.full_logprobs_BTV, columns["teacher_full_logprobs"]
            found_BT, reverse_BT = distances.with_reverse(config.divergence, student, teacher, beta, mask_BT)
        return found_BT, {
            "kl_teacher": ops.masked_sum(reverse_BT, mask_BT),
            "divergence": ops.masked_sum(found_BT, mask_BT),
        }


def _conflicts(config: Opd.Config) -> Iterator[str]:
    """One line for each setting that means nothing beside the others."""
    if config.over == "sampled" and config.divergence != "reverse":
        yield (
            f"divergence: {config.divergence} compares distributions, and over 'sampled' knows one token of each: take "
            "divergence 'reverse', or over 'topk' or 'full'"
        )
    if config.beta is not None and config.divergence != "jsd":
        yield f"beta: is for divergence 'jsd', found {config.divergence!r}: leave it out"
    if config.reward_weight:
        return
    fields = type(config).model_fields
    for name in _OF_THE_REWARD:
        if getattr(config, name) != fields[name].default:
            yield f"{name}: concerns the advantages of the reward, and reward_weight is 0: leave it out, or raise that"
    if config.kl is not None and config.kl.place == "reward":
        yield "kl.place: 'reward' with reward_weight 0 changes nothing: take 'loss', or raise reward_weight"
    if config.over != "sampled":
        for name in _OF_SAMPLED_TOKENS:
            if getattr(config, name) is not None:
                yield (
                    f"{name}: weighs sampled tokens, on which a divergence over {config.over!r} does not depend, and "
                    "reward_weight is 0: leave it out"
                )
