"""How rows are shared out over ranks, which parameters stay frozen, and sleeping; all in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_core.errors import ConfigError, RelaxError
from relax_core.interfaces import Row
from relax_core.testing.gradients import rows_of_lengths
from relax_core.testing.training import forward, row, tiny_trainer, train
from relax_core.torch.pieces import Pieces
from relax_core.torch.shares import shares


def drawn_rows(seed: int) -> list[Row]:
    """Groups of one to six trajectories of very unequal lengths, some of two rows."""
    draw = np.random.default_rng(seed)
    rows = []
    for g in range(int(draw.integers(1, 9))):
        prompt = draw.integers(5, 30, int(draw.integers(2, 40))).tolist()
        for m in range(int(draw.integers(1, 7))):
            length = int(draw.exponential(20)) + 1
            rows += [row(f"g{g}/{m}/{s}", prompt, [7] * length) for s in range(1 + (length > 30))]
    return rows


def packed() -> Pieces:
    return Pieces("packed", 64)


def loads(parts: Sequence[Sequence[Row]]) -> list[int]:
    return [packed().cost(part) for part in parts]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_row_goes_to_one_rank_in_order_and_trajectories_stay_whole(size: int) -> None:
    for seed in range(20):
        rows = drawn_rows(seed)
        parts = shares(rows, packed(), size)
        assert parts == shares(rows, packed(), size) and len(parts) == size
        assert sorted(r.id for part in parts for r in part) == sorted(r.id for r in rows)
        order = {r.id: i for i, r in enumerate(rows)}
        assert all([order[r.id] for r in part] == sorted(order[r.id] for r in part) for part in parts)
        homes = {r.trajectory: set() for r in rows}  # type: ignore[var-annotated]
        for rank, part in enumerate(parts):
            for r in part:
                homes[r.trajectory].add(rank)
        assert all(len(home) == 1 for home in homes.values())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_no_rank_has_more_than_the_mean_and_one_trajectory(size: int) -> None:
    for seed in range(20):
        rows = drawn_rows(seed)
        costs: dict[str, int] = {}
        for r in rows:
            costs[r.trajectory] = costs.get(r.trajectory, 0) + packed().cost([r])
        mean = sum(costs.values()) / size
        assert max(loads(shares(rows, packed(), size))) <= max(1.1 * mean, mean + max(costs.values()))


def test_groups_stay_together_where_they_balance_and_are_halved_where_not() -> None:
    even = [row(f"g{g}/{m}", [5 + g] * 9, [7] * 4) for g in range(4) for m in range(4)]
    assert [{r.group for r in part} for part in shares(even, Pieces("shared", 64), 2)] == [{"g0", "g2"}, {"g1", "g3"}]
    alone = [row(f"g/{m}", [5] * 9, [7] * 4) for m in range(4)]
    assert [len(part) for part in shares(alone, Pieces("shared", 64), 2)] == [2, 2]
    assert shares([], packed(), 2) == [[], []]


# --- frozen parameters ------------------------------------------------------------------------------------------------


def test_frozen_parameters_keep_their_bits() -> None:
    trainer = tiny_trainer(frozen=("*layers.0.*", "model.norm.*"), weight_decay=0.1)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    train(trainer, 0, [rows_of_lengths([3, 4])], Grpo(Grpo.Config()))
    frozen = trainer.frozen_names()
    assert "model.norm.weight" in frozen and "model.layers.0.mlp.up_proj.weight" in frozen
    for name, tensor in trainer.weights():
        assert torch.equal(tensor, before[name]) == (name in frozen), name
    assert tiny_trainer().frozen_names() == frozenset()


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.frozen\.0: found '\*laiers\*', which matches no .*layers"):
        tiny_trainer(frozen=("*laiers*",))
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        tiny_trainer(frozen=("*",))


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_a_sleeping_trainer_refuses_to_compute_and_wakes_unchanged() -> None:
    trainer, rows = tiny_trainer(), rows_of_lengths([3, 4])
    train(trainer, 0, [rows], Grpo(Grpo.Config()))
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    memory = trainer.memory()
    size = sum(t.nbytes for t in before.values())
    assert (memory["masters"], memory["gradients"]) == (0, 0)
    assert size <= memory["weights"] < 1.01 * size  # rotary tables are not published
    assert 2 * size <= memory["optimizer"] < 2.1 * size
    asyncio.run(trainer.sleep())
    for act in (lambda: forward(trainer, rows), lambda: train(trainer, 1, [rows], Grpo(Grpo.Config()))):
        with pytest.raises(RelaxError, match="it sleeps"):
            act()
    assert all(torch.equal(t, before[name]) for name, t in trainer.weights())
    asyncio.run(trainer.wake())
    assert (trainer.sleeps, trainer.wakes) == (1, 1)
    assert train(trainer, 1, [rows], Grpo(Grpo.Config())).updates == 1
