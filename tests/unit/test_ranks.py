"""The gradient of an update does not depend on how its batch is cut, padded, or spread over ranks.

Every algorithm under every aggregation, on eight trajectories of lengths 1 to 8 (one of them of two rows) and a tiny
policy whose parameters they share. Ranks are processes that all-reduce over gloo: this file, run as a script.

Legend: B rows, T tokens of a window, V vocabulary, K candidates of a token, P parameters.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from relax_algorithms.testing import aggregations
from relax_core.interfaces import Algorithm, Batch, Loss, Outputs, Row, ScoredGroup
from relax_core.plugins import activate, installed_plugins
from relax_core.testing.algorithm_checks import cuts, example_rows, make_batch, scored_group
from relax_core.testing.algorithm_examples import BANNED, TOKENS, VOCABULARY, changed

WIDTH = 16
TOLERANCE = 1e-6
PLUGINS = [name for name in ("algorithms-extra",) if name in {entry.name for entry in installed_plugins()}]
MINIMAL: dict[str, dict[str, Any]] = {"dr-grpo": {"constant": 12}}
"""What an algorithm cannot do without."""
AGGREGATIONS = aggregations()
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"whiten": True}),
    ("grpo", {"kl": {"coefficient": 0.1}, "entropy": {"start": 0.1, "end": 0.05, "steps": 6}}),
    ("grpo", {"kl": {"coefficient": 0.1, "place": "reward"}}),
    ("grpo", {"correction": {"kind": "truncate", "level": "sequence", "high": 1.2}}),
    ("grpo", {"rejection": {"by": "product", "low": 0.5, "high": 2.0}}),
    ("grpo", {"opsm": 0.05}),
    ("reinforce++", {"baseline": True}),
    ("opd", {"over": "topk"}),
    ("opd", {"over": "full", "divergence": "jsd", "reward_weight": 0.5}),
]
BOUNDS = {1: (0, 8), 2: (0, 5, 8), 4: (0, 1, 4, 4, 8)}
"""Which trajectories each rank has, by how many ranks there are; of four one has none."""
LENGTHS: list[list[str]] = [
    ["#"],
    [".##"],
    [".###"],
    ["..##.##"],
    [".#####"],
    [".###", ".#.##.#"],
    [".###.####"],
    [".########"],
]
Vector = NDArray[np.float64]
Combined = dict[str, tuple[Algorithm, list[Row]]]


# --- combinations of algorithm and settings ---------------------------------------------------------------------------


def combinations() -> dict[str, Algorithm]:
    """By name. An algorithm may refuse an aggregation that makes no sense for it."""
    stack = activate(PLUGINS)
    found: dict[str, Algorithm] = {}
    for id in stack.components("algorithms"):
        cls = stack.load("algorithms", id)
        for settings in AGGREGATIONS:
            raw = (MINIMAL.get(id, {}) if settings.get("constant") else {}) | settings
            try:
                found[f"{id} {settings['aggregation']}"] = cls(cls.Config.model_validate(raw))
            except ValidationError as error:
                assert "aggregation" in str(error), f"{id} with {raw}: {error}"
    for id, settings in OPTIONS:
        cls = stack.load("algorithms", id)
        found[f"{id} {settings}"] = cls(cls.Config.model_validate(settings))
    return found


def rows_of(algorithm: Algorithm) -> list[Row]:
    """The step's rows, credited once, with other policies as near to the tiny one as in the examples."""
    rewards = [1.0, 0.0, 0.25, 0.5]
    drawn = [[(rewards[m], LENGTHS[4 * g + m]) for m in range(4)] for g in range(2)]
    groups = [scored_group(f"g{g}", members, algorithm.needs) for g, members in enumerate(drawn)]
    return example_rows(algorithm, [near(group) for group in groups])


def near(group: ScoredGroup) -> ScoredGroup:
    policy_TV = Policy().parameters["policy_TV"].detach().log_softmax(-1).numpy()

    def moved(columns: Any) -> dict[str, Any]:
        mask = columns["mask"] > 0
        first = int(mask.argmax())
        own = np.zeros(len(mask), np.float32)
        own[first:] = policy_TV[np.arange(len(mask) - first), columns["tokens"][first:]]
        changes = {name: own + columns[name] - columns["policy_logprobs"] for name in OTHERS if name in columns}
        return {**columns, **changes}

    return changed(group, moved)


OTHERS = ("logprobs", "old_logprobs", "ref_logprobs")


# --- a tiny policy ----------------------------------------------------------------------------------------------------


class Policy:
    """A distribution and a value for each place of a window, whatever the tokens before it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        logits_TV = torch.randn(WIDTH, VOCABULARY, generator=generator)
        logits_TV[:, TOKENS:] = BANNED
        values_T = torch.randn(WIDTH, generator=generator)
        self.parameters = {"policy_TV": logits_TV.requires_grad_(), "values_T": values_T.requires_grad_()}

    def outputs(self, batch: Batch) -> Outputs:
        rows, width = batch.mask_BT.shape
        full_BTV = self.parameters["policy_TV"][:width].log_softmax(-1).expand(rows, -1, -1)
        ids_BTK = batch.columns.get("topk_ids")
        return Outputs(
            full_BTV.gather(-1, batch.tokens_BT[..., None])[..., 0],
            entropy_BT=-(full_BTV.exp() * full_BTV).sum(-1),
            topk_logprobs_BTK=None if ids_BTK is None else full_BTV.gather(-1, ids_BTK),
            full_logprobs_BTV=full_BTV,
        )

    def values(self, batch: Batch) -> Tensor:
        rows, width = batch.mask_BT.shape
        return self.parameters["values_T"][:width].expand(rows, -1)

    def gradient(self) -> Vector:
        """(P,), of both parameters."""
        found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters.values()]
        return np.concatenate([g.double().flatten().numpy() for g in found])


def accumulated(algorithm: Algorithm, rows: Sequence[Row], size: int, padding: int) -> Vector:
    """The summed gradient (P,) of micro-batches of ``size`` trajectories, and last the rows' units: (P + 1,)."""
    policy = Policy()
    for cut in cuts(rows, size) if rows else ():
        batch = make_batch(cut, step=3, padding=padding, garbage=math.nan)
        losses = [algorithm.loss(batch, policy.outputs(batch))]
        if "values" in algorithm.outputs:
            losses.append(algorithm.value_loss(batch, policy.values(batch)))
        for loss in losses:
            loss.total.backward()  # type: ignore[no-untyped-call]
    return np.append(policy.gradient(), math.fsum(row.columns["units"] for row in rows))


def divided(summed: Vector) -> Vector:
    mean: Vector = summed[:-1] / summed[-1]
    return mean


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def combined() -> Combined:
    """Every combination with its rows."""
    torch.set_num_threads(1)
    return {name: (algorithm, rows_of(algorithm)) for name, algorithm in combinations().items()}


@pytest.fixture(scope="module")
def whole(combined: Combined) -> dict[str, Vector]:
    """The gradient of one micro-batch of all trajectories, by combination."""
    return {name: divided(accumulated(algorithm, rows, 8, 0)) for name, (algorithm, rows) in combined.items()}


def test_every_algorithm_takes_part(whole: dict[str, Vector]) -> None:
    assert {f"grpo {settings['aggregation']}" for settings in AGGREGATIONS} <= set(whole)
    for id in activate(PLUGINS).components("algorithms"):
        assert any(name.startswith(f"{id} ") for name in whole), id
    for name, gradient in whole.items():
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-3, name


def test_cuts(combined: Combined, whole: dict[str, Vector]) -> None:
    """Two micro-batches of 4, eight of 1, each padded to another width."""
    for name, (algorithm, rows) in combined.items():
        for size, padding in ((4, 3), (1, 0), (8, 7)):
            found = divided(accumulated(algorithm, rows, size, padding))
            assert np.abs(found - whole[name]).max() < TOLERANCE, f"{name}, micro-batches of {size}"


def test_the_rows_hold_what_they_should(combined: Combined) -> None:
    _, rows = combined["grpo token-mean"]
    sampled: dict[str, int] = {}
    for row in rows:
        sampled[row.trajectory] = sampled.get(row.trajectory, 0) + int(row.columns["mask"].sum())
    assert list(sampled.values()) == [1, 2, 3, 4, 5, 7, 7, 8] and len(rows) == 9
    policy = Policy()
    batch = make_batch(rows)
    assert batch.old_logprobs_BT is not None
    ratio_BT = (policy.outputs(batch).logprobs_BT - batch.old_logprobs_BT).exp()[batch.mask_BT]
    assert 0.6 < ratio_BT.min() < 0.8 and 1.2 < ratio_BT.max() < 1.7


def test_a_mean_over_the_micro_batch_is_seen() -> None:
    """What this file is for: the same comparison with a loss that divides by its own tokens."""
    algorithm: Algorithm = activate(()).build_default("algorithms", "grpo")
    rows = rows_of(algorithm)
    right = algorithm.loss

    def wrong(batch: Batch, outputs: Outputs) -> Loss:
        loss = right(batch, outputs)
        return replace(loss, total=loss.total / batch.mask_BT.sum())

    algorithm.loss = wrong  # type: ignore[method-assign]
    one, other = (divided(accumulated(algorithm, rows, size, 0)) for size in (8, 4))
    assert np.abs(one * 8 - other * 8).max() > 1e-3


# --- ranks ------------------------------------------------------------------------------------------------------------


def shares(rows: Sequence[Row], ranks: int) -> Iterator[list[Row]]:
    """The rows of each rank: whole trajectories."""
    whole = list(cuts(rows, 1))
    for start, end in pairwise(BOUNDS[ranks]):
        yield [row for trajectory in whole[start:end] for row in trajectory]


def main(folder: Path, rank: int) -> None:
    """One of four processes. Of every combination, its share among 1, 2 and 4 ranks; rank 0 writes what they add up to.

    Beside it the mean over ranks of each rank's own mean, which is what a careless trainer would take.
    """
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    try:
        combined = {name: (algorithm, rows_of(algorithm)) for name, algorithm in combinations().items()}
        found: dict[str, Vector] = {}
        for ranks in BOUNDS:
            group = dist.new_group(list(range(ranks)))
            if rank >= ranks:
                continue
            mine = np.stack([
                accumulated(algorithm, [*shares(rows, ranks)][rank], size=2, padding=rank)
                for algorithm, rows in combined.values()
            ])  # fmt: skip
            means = mine[:, :-1] / np.maximum(mine[:, -1:], 1e-9)
            found[f"sum {ranks}"] = reduced(mine, group)
            found[f"mean {ranks}"] = reduced(means, group) / ranks
        if rank == 0:
            np.savez(folder / "found.npz", allow_pickle=False, names=np.array(list(combined)), **found)
    finally:
        dist.destroy_process_group()


def reduced(values: Vector, group: Any) -> Vector:
    """The sum over the ranks of the group."""
    import torch.distributed as dist

    total = torch.from_numpy(values.copy())
    dist.all_reduce(total, group=group)
    return total.numpy()


@pytest.fixture(scope="module")
def over_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 wrote. The processes take some seconds, and are ended after 100."""
    folder = tmp_path_factory.mktemp("ranks")
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(said)[-3000:]
    return dict(np.load(folder / "found.npz"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", BOUNDS)
def test_ranks(over_ranks: dict[str, Any], whole: dict[str, Vector], ranks: int) -> None:
    assert over_ranks["names"].tolist() == list(whole)
    for name, summed in zip(whole, over_ranks[f"sum {ranks}"], strict=True):
        assert np.abs(divided(summed) - whole[name]).max() < TOLERANCE, f"{name} over {ranks} ranks"


@pytest.mark.timeout(120)
def test_a_mean_over_ranks_is_seen(over_ranks: dict[str, Any], whole: dict[str, Vector]) -> None:
    """Each rank's own mean, averaged: right for one rank, wrong for several."""
    place = list(whole).index("grpo token-mean")
    error = {n: np.abs(over_ranks[f"mean {n}"][place] - whole["grpo token-mean"]).max() for n in BOUNDS}
    assert error[1] < TOLERANCE and error[2] > 1e-3 and error[4] > 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
