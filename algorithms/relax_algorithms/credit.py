"""Credit: from the rewards of a group to each row's advantages and to its share of the loss.

Pure functions on numpy, without torch: credit is given where the rollouts are, not on the trainer's devices.

Legend: G members of a group, T tokens of a row. A *row* is a sample; a trajectory (member) has one or several.
A row is *trained* when its trajectory has a finite reward and at least one of its own tokens was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeGuard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.interfaces import Columns, Member, ScoredGroup

    Values = NDArray[np.float64]
    """A number for each token of a row, float64 (T,)."""

Scale = Literal["std", "none"]
Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "constant", "prompt-mean"]

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def is_valid(reward: float | None) -> TypeGuard[float]:
    """Whether a reward counts. None abstains; NaN and infinity are a reward's error and are treated alike."""
    return reward is not None and math.isfinite(reward)


# --- advantages -------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[float | None], scale: Scale = "std") -> NDArray[np.float64]:
    """The advantage of each member of a group, float64 (G,).

    ``std``: (R - mean) / (std + 1e-6), GRPO (arXiv:2402.03300). ``none``: R - mean, Dr. GRPO (arXiv:2503.20783).
    Mean and standard deviation (the sample one, in two passes) are over the valid rewards. Exactly 0 for a member that
    abstained, for the only valid member of a group, and for all when their rewards are equal: rounding in the mean
    would otherwise be blown up by the tiny deviation.
    """
    import numpy as np

    advantages = np.zeros(len(rewards))
    valid = [member for member, reward in enumerate(rewards) if is_valid(reward)]
    values = np.array([rewards[member] for member in valid], dtype=np.float64)
    if len(values) < 2 or values.max() == values.min():
        return advantages
    deviations = values - values.mean()
    if scale == "std":
        deviations /= math.sqrt((deviations**2).sum() / (len(values) - 1)) + EPSILON
    advantages[valid] = deviations
    return advantages


def leave_one_out(rewards: Sequence[float | None]) -> NDArray[np.float64]:
    """R less the mean of the group's other valid rewards, float64 (G,): RLOO (arXiv:2402.14740).

    Exactly 0 for a member that abstained, for the only valid member of a group, and for all when their rewards are
    equal.
    """
    import numpy as np

    advantages = np.zeros(len(rewards))
    valid = {member: reward for member, reward in enumerate(rewards) if is_valid(reward)}
    if len(valid) < 2 or len(set(valid.values())) == 1:
        return advantages
    for member, reward in valid.items():
        others = (other for m, other in valid.items() if m != member)
        advantages[member] = reward - math.fsum(others) / (len(valid) - 1)
    return advantages


def group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, tuple[float, float]]:
    """What leaves a group-relative algorithm nothing to learn from, as (sum, count).

    ``groups_of_one``: groups with a single valid reward; ``groups_equal``: those whose two or more valid rewards are
    all equal; ``abstained``: members without a valid reward.
    """
    valid = [[m.reward for m in group.members if is_valid(m.reward)] for group in groups]
    members = sum(len(group.members) for group in groups)
    return {
        "groups_of_one": (float(sum(len(rewards) == 1 for rewards in valid)), float(len(groups))),
        "groups_equal": (float(sum(len(r) > 1 and max(r) == min(r) for r in valid)), float(len(groups))),
        "abstained": (float(members - sum(map(len, valid))), float(members)),
    }


# --- shares of the loss -----------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """A row's part in an optimizer update: sum of weight x token losses over all rows, divided by the sum of units."""

    weight: float
    units: float


NOT_TRAINED = Share(0.0, 0.0)


def aggregation(kind: Aggregation, groups: Sequence[ScoredGroup], constant: int | None = None) -> dict[str, Share]:
    """Every row's share, by row id. With token losses l, *trajectory* and *task* over trained tokens only:

    ============== ===================== ================ ============================================================
    kind           weight                units            loss
    ============== ===================== ================ ============================================================
    token-mean     1                     tokens           mean of l over all tokens; DAPO (arXiv:2503.14476)
    sequence-mean  1 / trajectory tokens 1 per trajectory mean over trajectories of their mean; GRPO (2402.03300)
    sequence-sum   1                     1 per trajectory mean over trajectories of their sum
    constant       1 / constant          1 per trajectory the same by a fixed length; Dr. GRPO (arXiv:2503.20783)
    prompt-mean    1 / task tokens       1 per task       mean over tasks of the token-mean inside the task
    ============== ===================== ================ ============================================================

    A unit per trajectory or task lies on its first trained row. An optimizer update must hold whole trajectories, and
    whole groups under prompt-mean; how it is cut into micro-batches or spread over ranks then never matters.
    """
    if (kind == "constant") != (constant is not None):
        raise ValueError(f"aggregation {kind!r} with constant {constant}: 'constant' needs one, no other takes one")
    scale = 1.0 if constant is None else 1 / constant
    shares: dict[str, Share] = {}
    for group in groups:
        task = sum(sum(trained_tokens(member)) for member in group.members)
        task_unit = 1.0  # 0 once the task's first trained row is met; likewise ``unit`` for the trajectory
        for member in group.members:
            counts = trained_tokens(member)
            unit = 1.0
            for row, count in zip(member.rows, counts, strict=True):
                if count == 0:
                    shares[row.id] = NOT_TRAINED
                    continue
                match kind:
                    case "token-mean":
                        shares[row.id] = Share(1.0, float(count))
                    case "sequence-mean":
                        shares[row.id] = Share(1 / sum(counts), unit)
                    case "sequence-sum" | "constant":
                        shares[row.id] = Share(scale, unit)
                    case "prompt-mean":
                        shares[row.id] = Share(1 / task, task_unit)
                unit = task_unit = 0.0
    return shares


def trained_tokens(member: Member) -> list[int]:
    """The number of trained tokens of each row of a trajectory."""
    return [int(row.columns["mask"].sum()) if is_valid(member.reward) else 0 for row in member.rows]


# --- per token --------------------------------------------------------------------------------------------------------


def spread(groups: Sequence[ScoredGroup], values: Sequence[Sequence[float] | Values]) -> dict[str, Values]:
    """By row id: ``values[g][m]`` at every sampled token of member ``m`` of group ``g``, 0 at others; float64 (T,)."""
    import numpy as np

    return {
        row.id: np.where(row.columns["mask"], np.float64(value), 0.0)
        for group, numbers in zip(groups, values, strict=True)
        for member, value in zip(group.members, numbers, strict=True)
        for row in member.rows
    }


def sampled(member: Member, column: str) -> Values:
    """A column at the sampled tokens of all rows of a trajectory, in order, float64."""
    import numpy as np

    parts = [np.asarray(row.columns[column], np.float64)[row.columns["mask"] > 0] for row in member.rows]
    return np.concatenate(parts) if parts else np.zeros(0)


def placed(member: Member, values: Values) -> dict[str, Values]:
    """By row id: numbers of the trajectory's sampled tokens, in order, where these stand; 0 at others."""
    import numpy as np

    found: dict[str, Values] = {}
    start = 0
    for row in member.rows:
        places = np.flatnonzero(row.columns["mask"])
        found[row.id] = np.zeros(len(row.columns["mask"]))
        found[row.id][places] = values[start : start + len(places)]
        start += len(places)
    if start != len(values):
        raise ValueError(f"{len(values)} numbers for {start} sampled tokens: give one for each")
    return found


def kl_of(member: Member) -> float:
    """Sum over a trajectory's sampled tokens of k1 = log mu - log ref: mu is the policy that sampled them."""
    return float((sampled(member, "logprobs") - sampled(member, "ref_logprobs")).sum())


def whitened(groups: Sequence[ScoredGroup], values: Mapping[str, Values]) -> dict[str, Values]:
    """Values with mean 0 and standard deviation 1 over the trained tokens of all groups: of the whole step.

    In two passes, sample deviation + 1e-6; exactly 0 where all are equal, and for a single token. Others get 0.
    """
    import numpy as np

    trained = {
        row.id: (row.columns["mask"] > 0) & is_valid(member.reward)
        for group in groups
        for member in group.members
        for row in member.rows
    }
    every = np.concatenate([values[id][mask] for id, mask in trained.items()] or [np.zeros(0)])
    if len(every) < 2 or every.max() == every.min():
        return {id: np.zeros(len(mask)) for id, mask in trained.items()}
    mean = every.mean()
    deviation = math.sqrt(((every - mean) ** 2).sum() / (len(every) - 1)) + EPSILON
    return {id: np.where(mask, (values[id] - mean) / deviation, 0.0) for id, mask in trained.items()}


# --- columns ----------------------------------------------------------------------------------------------------------


def columns(
    groups: Sequence[ScoredGroup],
    advantages: Mapping[str, Values],
    shares: Mapping[str, Share],
    **extra: Mapping[str, Values],
) -> dict[str, Columns]:
    """By row id what ``Algorithm.advantages`` returns: ``advantages`` float32 (T,), ``weight``, ``units``.

    ``advantages`` and ``extra`` are by row id; rows without a share, and tokens that were not sampled, get 0.
    """
    import numpy as np

    made: dict[str, Columns] = {}
    for row in (row for group in groups for member in group.members for row in member.rows):
        share = shares[row.id]
        trained = (row.columns["mask"] > 0) & (share.weight != 0)
        per_token = {"advantages": advantages, **extra}
        made[row.id] = {
            **{name: np.where(trained, by_row[row.id], 0.0).astype(np.float32) for name, by_row in per_token.items()},
            "weight": share.weight,
            "units": share.units,
        }
    return made
