"""The settings that policy gradients share, and which of them cannot go together. Light: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from relax_algorithms.credit import Aggregation
from relax_core.interfaces import ComponentConfig

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig

Level = Literal["token", "sequence"]


class EntropyBonus(ComponentConfig):
    """A bonus on the policy's entropy that changes linearly from ``start`` to ``end``."""

    start: NonNegativeFloat
    """Coefficient at step 0."""
    end: NonNegativeFloat
    """Coefficient from step ``steps`` on."""
    steps: PositiveInt
    """Steps between the two."""

    def at(self, step: int) -> float:
        """The coefficient at a step; steps count from 0."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


class Kl(ComponentConfig):
    """Keeps the policy near the reference: the model that the stage ``reference`` holds."""

    place: Literal["loss", "reward"] = "loss"
    """``loss``: a term of the loss. ``reward``: a penalty of each sampled token, taken from its reward; where a play
    has one reward, their sum is taken from it before plays are compared. There d is of mu, the policy that sampled."""
    coefficient: PositiveFloat
    """Factor of the divergence."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Of the divergence, from d = log pi - log ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; default: k3 in the
    loss, k1 in the reward."""
    unbiased: bool = False
    """In the loss: times the ratio pi / pi_old, which makes its gradient right for tokens that an older policy sampled
    (k2 takes the ratio without its gradient)."""

    @property
    def kind(self) -> Literal["k1", "k2", "k3"]:
        return self.estimator or ("k1" if self.place == "reward" else "k3")

    @model_validator(mode="after")
    def _where_it_works(self) -> Self:
        if self.place == "loss" and self.kind == "k1":
            raise ValueError("estimator: k1 in the loss has a gradient of zero mean and holds nothing: take k2 or k3")
        if self.place == "reward" and self.kind != "k1":
            raise ValueError(f"estimator: {self.kind} as a reward is biased: take k1, or place 'loss'")
        if self.place == "reward" and self.unbiased:
            raise ValueError("unbiased: is for place 'loss'; a reward needs no such factor: leave it out")
        return self


class Correction(ComponentConfig):
    """Weights of token losses by rho = pi_old / mu, where the engine's policy mu is not the trainer's pi_old.

    ``truncate``: min(rho, high), truncated importance sampling. ``mask``: rho where low <= rho <= high, else 0 (MIS,
    IcePop). ``decoupled``: rho itself, which with a clipped loss is decoupled PPO (arXiv:2110.00641, 2505.24298).
    """

    kind: Literal["truncate", "mask", "decoupled"] = "truncate"
    """``truncate``: rho up to ``high`` (TIS). ``mask``: rho between ``low`` and ``high``, else 0 (MIS, IcePop).
    ``decoupled``: rho as it is."""
    level: Level = "token"
    """``sequence``: rho is the product over the trajectory's sampled tokens."""
    low: NonNegativeFloat | None = None
    """For ``mask``; default 0.5."""
    high: PositiveFloat | None = None
    """Default: 2 for ``truncate``, 5 for ``mask``."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Of rho; without meaning for ``decoupled``."""
        default = 2.0 if self.kind == "truncate" else 5.0
        return (0.5 if self.low is None else self.low, default if self.high is None else self.high)

    @model_validator(mode="after")
    def _bounds_where_used(self) -> Self:
        if self.kind != "mask" and self.low is not None:
            raise ValueError(f"low: {self.kind} has no lower bound: leave it out, or take kind 'mask'")
        if self.kind == "decoupled" and self.high is not None:
            raise ValueError("high: decoupled takes the weight as it is: leave it out, or take kind 'truncate'")
        low, high = self.bounds
        if self.kind == "mask" and not low < 1 < high:
            raise ValueError(f"low {low}, high {high}: 1, where both policies agree, must lie between them")
        if self.kind == "truncate" and high < 1:
            raise ValueError(f"high: found {high}; it must be 1 or more, for 1 is where both policies agree")
        return self


class Rejection(ComponentConfig):
    """Leaves out whole trajectories of which rho = pi_old / mu strays too far (as in arXiv:2512.23075)."""

    by: Literal["geometric-mean", "product"] = "geometric-mean"
    """Of rho over the trajectory's sampled tokens."""
    low: NonNegativeFloat
    """Below it the trajectory takes no part in the policy's loss."""
    high: PositiveFloat
    """Above it neither."""

    @model_validator(mode="after")
    def _holds_one(self) -> Self:
        if not self.low < 1 < self.high:
            raise ValueError(f"low {self.low}, high {self.high}: 1, where both policies agree, must lie between them")
        return self


class Options(ComponentConfig):
    """What every policy gradient offers."""

    refuses: ClassVar[Mapping[str, str]] = {}
    """Settings of other algorithms that make no sense here, and why."""

    aggregation: Aggregation = "token-mean"
    """How token losses become one number."""
    constant: PositiveInt | None = None
    """For ``aggregation: constant`` alone: divides a play's summed loss; such as its limit of sampled tokens."""
    whiten: bool = False
    """Whether advantages get mean 0 and deviation 1 over the step's sampled tokens; then training begins only when the
    step's rollout is complete. The step's mean is taken from all of them: a group with nothing to learn, 0 before, is
    no longer exactly 0."""
    kl: Kl | None = None
    """A penalty on the distance from a reference; default: none."""
    entropy: EntropyBonus | None = None
    """A bonus on the policy's entropy; default: none."""
    correction: Correction | None = None
    """Weights where engine and trainer differ; needs ``old: recompute``; default: none."""
    rejection: Rejection | None = None
    """Trajectories left out where engine and trainer differ; needs ``old: recompute``; default: none."""
    opsm: PositiveFloat | None = None
    """Off-policy sequence masking: a trajectory's negative advantages are left out once the mean of log pi_old - log pi
    over its tokens exceeds this; default: never."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, raw: Any) -> Any:
        given = raw if isinstance(raw, Mapping) else {}
        # A refused setting that the class inherits may be written out with its default, as a resolved run file does.
        found = [name for name in cls.refuses if name in given and not cls._is_default(name, given[name])]
        if found:
            raise ValueError("; ".join(f"{name}: {cls.refuses[name]}" for name in found))
        return raw

    @classmethod
    def _is_default(cls, name: str, value: Any) -> bool:
        return name in cls.model_fields and bool(cls.model_fields[name].default == value)

    @model_validator(mode="after")
    def _constant_where_needed(self) -> Self:
        if (self.aggregation == "constant") != (self.constant is not None):
            raise ValueError(
                f"aggregation is {self.aggregation!r} and constant is {self.constant}: "
                + (
                    "set constant to the response limit, the most tokens that a play may sample"
                    if self.constant is None
                    else "leave constant out, or set aggregation to 'constant'"
                )
            )
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Columns that these settings ask for."""
        return frozenset({"ref_logprobs"}) if self.kl else frozenset()

    @property
    def outputs(self) -> frozenset[str]:
        """Outputs that these settings ask for."""
        return frozenset({"entropy"}) if self.entropy else frozenset()


class Clipped(Options):
    """Options of an algorithm whose loss clips the ratio pi / pi_old."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is kept above 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is kept below 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of a negative advantage A by -dual_clip x A (arXiv:1912.09729); default: no bound."""


def problems(options: Options, run: RunConfig) -> Iterator[str]:
    """One line for each option that cannot work in the run."""
    for name in ("correction", "rejection"):
        if getattr(options, name) is not None and run.old == "engine":
            yield (
                f"{name} with old: engine: there pi_old is the engine's policy itself and rho is always 1: leave "
                f"{name} out, or set old to recompute"
            )
    if options.opsm is not None and run.updates_per_step == 1 and run.old == "recompute":
        yield (
            "opsm with updates_per_step 1 and old: recompute: the policy is pi_old and nothing is ever masked: leave "
            "it out, raise updates_per_step, or set old to engine"
        )
