"""Groups of drawn rows, with every column that an algorithm may need, and policies that disagree about them.

Legend: T tokens of a row, M sampled tokens of a row, K = 3 candidates of each, V = 52 tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_core import keys
from relax_core.interfaces import TRAINER_COLUMNS, Algorithm, Columns, Member, Row, ScoredGroup
from relax_core.types import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float32]

POLICY = {
    "logprobs": "policy_logprobs",
    "entropy": "policy_entropy",
    "values": "policy_values",
    "topk_logprobs": "policy_topk_logprobs",
    "full_logprobs": "policy_full_logprobs",
}
"""What the trainer computes, and the column of an example that plays its part."""
ALWAYS = frozenset({"mask", "logprobs"})
"""Columns that ``advantages`` finds whatever the algorithm needs."""
TOKENS, VOCABULARY, CANDIDATES = 50, 52, 3
"""The last two of the vocabulary are banned."""
BANNED = -1e30
UNLIKELY = -120.0
"""So that the exp of a log-ratio that is not clamped overflows."""

Reward = float | Mapping[str, float | None] | None

_EXAMPLES: dict[str, list[tuple[Reward, list[str]]]] = {
    "task-0": [(1.0, ["..#"]), (0.0, [".##", "..###"]), (0.5, [".####"]), (None, [".##.###"])],
    "task-1": [(1.0, [".######"]), (0.25, [".."]), (0.0, [".###.####"]), (1.0, [".########"])],
}
"""A single token, a trajectory of two rows, an abstention, a row without a sampled token, observations in between."""


def example_groups(needs: frozenset[str] = frozenset()) -> list[ScoredGroup]:
    """Two tasks of four members each, with every column named in ``needs``; equal at every call."""
    return [scored_group(name, members, needs) for name, members in _EXAMPLES.items()]


def scored_group(
    name: str, members: Sequence[tuple[Reward, Sequence[str]]], needs: frozenset[str] = frozenset()
) -> ScoredGroup:
    """A group from each member's reward and rows. A row is drawn: ``#`` a sampled token, ``.`` another one.

    Also sampled, with log-ratios beyond 20: ``<`` a token that the trained policy alone finds impossible, ``>`` one
    that every policy but the trained one does, ``~`` one that the engine alone does. Rewards given by name count with
    their sum. All numbers are random, but a function of the row's id ``<name>/<member>/<row>``, and agree with each
    other: a policy's log-probs are those of one distribution, the teacher's K candidates its likeliest.
    """
    return ScoredGroup(
        name,
        Task(name, ()),
        [
            Member(
                _total(reward),
                reward if isinstance(reward, Mapping) else {"example": reward},
                [Row(f"{name}/{m}/{s}", name, _columns(row, needs, f"{name}/{m}/{s}")) for s, row in enumerate(rows)],
            )
            for m, (reward, rows) in enumerate(members)
        ],
    )


def _total(reward: Reward) -> float | None:
    if not isinstance(reward, Mapping):
        return reward
    valid = [value for value in reward.values() if value is not None]
    return sum(valid) if valid else None


def rows_of(groups: Sequence[ScoredGroup]) -> list[Row]:
    """All rows, in order."""
    return [row for group in groups for member in group.members for row in member.rows]


def example_rows(algorithm: Algorithm, groups: Sequence[ScoredGroup] | None = None) -> list[Row]:
    """The rows of the groups (default: ``example_groups``) with the columns that the algorithm makes.

    As in a run, ``advantages`` sees no column that it did not ask for, and ``prepare`` is called, with old log-probs,
    when the algorithm needs these.
    """
    groups = example_groups(algorithm.needs) if groups is None else groups
    made = credited(algorithm, groups)
    rows = [replace(row, columns={**row.columns, **made[row.id]}) for row in rows_of(groups)]
    if "old_logprobs" not in algorithm.needs:
        return rows
    prepared = algorithm.prepare(rows)
    return [replace(row, columns={**row.columns, **prepared.get(row.id, {})}) for row in rows]


def credited(algorithm: Algorithm, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
    """What ``advantages`` makes of the groups, shown to it as a run shows them."""
    seen = ALWAYS | (algorithm.needs - TRAINER_COLUMNS)
    return algorithm.advantages([changed(group, lambda columns: _only(columns, seen)) for group in groups])


def changed(group: ScoredGroup, change: Any) -> ScoredGroup:
    """The group with ``change(columns)`` as the columns of every row."""
    members = [
        replace(member, rows=[replace(row, columns=change(row.columns)) for row in member.rows])
        for member in group.members
    ]
    return replace(group, members=members)


def _only(columns: Columns, names: frozenset[str]) -> Columns:
    return {name: value for name, value in columns.items() if name in names}


def on_policy(columns: Columns) -> Columns:
    """The columns with the log-probs of every policy but the teacher replaced by those of the trained one."""
    return {
        name: columns["policy_logprobs"]
        if name.endswith("logprobs") and not name.startswith(("policy_", "teacher_"))
        else value
        for name, value in columns.items()
    }


# --- the numbers of a row ---------------------------------------------------------------------------------------------


def _columns(drawing: str, needs: frozenset[str], row: str) -> Columns:
    import numpy as np

    def numbers(name: str) -> Numbers:
        """(T,), in [0, 1); from the core's own stream, which no version of a library changes."""
        start = keys.stream(0, "algorithm checks", row, name)
        return np.array([keys.uniform(start, position) for position in range(len(drawing))], dtype=np.float32)

    def where(mark: str) -> NDArray[np.bool_]:
        return np.array([token == mark for token in drawing], dtype=np.bool_)

    base, teacher = (np.log(0.05 + 0.9 * numbers(name)) for name in ("policy_logprobs", "teacher_logprobs"))
    policy = np.where(where("<"), np.float32(UNLIKELY), base)
    teacher = np.where(where(">"), np.float32(UNLIKELY), teacher)
    tokens, mask = (TOKENS * numbers("tokens")).astype(np.int32), ~where(".")
    student_MV = _distribution(policy[mask], tokens[mask], f"{row} policy")
    teacher_MV = _distribution(teacher[mask], tokens[mask], f"{row} teacher")
    topk_MK = np.argsort(-teacher_MV, axis=-1, kind="stable")[:, :CANDIDATES].astype(np.int32)
    columns: dict[str, Any] = {
        "tokens": tokens,
        "mask": mask.astype(np.int8),
        "policy_logprobs": policy,
        "policy_entropy": 2 * numbers("policy_entropy"),
        "policy_values": 2 * numbers("policy_values") - 1,
        "policy_topk_logprobs": np.take_along_axis(student_MV, topk_MK, -1),
        "policy_full_logprobs": student_MV,
    }
    known = {
        "values": columns["policy_values"] + numbers("values") - 0.5,
        "teacher_logprobs": teacher,
        "teacher_full_logprobs": teacher_MV,
        "teacher_topk_logprobs": np.take_along_axis(teacher_MV, topk_MK, -1),
        "topk_ids": topk_MK,
    }
    for name in sorted({"logprobs", "old_logprobs", *needs}):
        if name in known:
            columns[name] = known[name]
        else:  # other policies: ratios from 0.6 to 1.6
            far = where(">") | where("~") if name == "logprobs" else where(">")
            columns[name] = np.where(far, np.float32(UNLIKELY), base) + numbers(name) - 0.5
    return columns


def _distribution(logprobs_M: Numbers, tokens_M: NDArray[np.int32], name: str) -> Numbers:
    """Log-probs (M, V) of whole distributions in which the sampled tokens have the given ones."""
    import numpy as np

    cells = np.arange(len(tokens_M) * VOCABULARY, dtype=np.uint64).reshape(len(tokens_M), VOCABULARY)
    start = np.full(1, keys.stream(0, "algorithm checks", name), np.uint64)
    weights_MV = 0.05 + keys.uniforms(start, cells)
    places = (np.arange(len(tokens_M)), tokens_M)
    weights_MV[places] = 0
    weights_MV[:, TOKENS:] = 0
    rest_M = -np.expm1(logprobs_M.astype(np.float64)) / weights_MV.sum(-1)
    with np.errstate(divide="ignore"):
        found_MV = np.log(weights_MV * rest_M[:, None])
    found_MV[places] = logprobs_M
    found_MV[:, TOKENS:] = BANNED
    made: Numbers = found_MV.astype(np.float32)
    return made
