"""The cases of tests/cases/numbers.jsonl: inputs on which other trainers went wrong, each with what is right."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_algorithms import credit, returns
from relax_algorithms.callbacks.dynamic_sampling import DynamicSampling
from relax_algorithms.callbacks.overlong import Overlong
from relax_core.config.schema import RewardSection, SamplingSection
from relax_core.hookspecs import GroupEvent
from relax_core.interfaces import Algorithm, Outputs, Reward, Row
from relax_core.metrics import MetricsLog
from relax_core.plugins import activate
from relax_core.scoring import Scorer
from relax_core.testing.algorithm_checks import cuts, evaluate, example_rows, make_batch, scored_group
from relax_core.testing.training import forward, row, tiny_run, tiny_trainer, train
from relax_core.types import Group, Stop, Task, Trajectory, Turn, message

FILE = Path(__file__).resolve().parents[1] / "cases" / "numbers.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]
Case = dict[str, Any]
Handler = Callable[[Case, Path], None]
HANDLERS: dict[str, Handler] = {}
SETTINGS: dict[str, dict[str, Any]] = {"dr-grpo": {"constant": 8}}
RELATIVE = ("grpo", "dr-grpo", "dapo", "gspo", "sapo", "cispo", "rloo")
"""Algorithms that compare the plays of a task with each other."""


def handles(what: str) -> Callable[[Handler], Handler]:
    """Marks the test of the cases of a kind."""

    assert what not in HANDLERS, what
    return lambda handler: HANDLERS.setdefault(what, handler)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_case(case: Case, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    HANDLERS[case["what"]](case, tmp_path)


def test_every_line_has_a_test_and_every_test_a_line() -> None:
    assert {case["what"] for case in CASES} == set(HANDLERS)
    assert len(CASES) == 18


def algorithms(ids: Sequence[str] | None = None, **settings: Any) -> Iterator[tuple[str, Algorithm]]:
    """The built-in ones, by id; default: all."""
    stack = activate(())
    for id in ids or stack.components("algorithms"):
        cls = stack.load("algorithms", id)
        yield id, cls(cls.Config.model_validate(SETTINGS.get(id, {}) | settings))


def grpo(**settings: Any) -> Algorithm:
    ((_, found),) = algorithms(["grpo"], **settings)
    return found


# --- advantages and returns -------------------------------------------------------------------------------------------


@handles("group advantage")
def _(case: Case, folder: Path) -> None:
    """Rounding in the mean of equal float32 rewards must not be blown up by their tiny deviation."""
    rewards = [float(r) for r in np.array(case["rewards"], case["dtype"])]
    assert not (credit.group_advantages(rewards, "std") != 0).any()
    assert not (credit.group_advantages(rewards, "none") != 0).any()
    for id, algorithm in algorithms(RELATIVE):
        rows = example_rows(algorithm, [scored_group("a", [(r, [".##"]) for r in rewards])])
        assert not any(row.columns["advantages"].any() for row in rows), id


@handles("group of one")
def _(case: Case, folder: Path) -> None:
    for id, algorithm in algorithms(RELATIVE):
        group = scored_group("a", [(r, [".##"]) for r in case["rewards"]])
        (found,) = example_rows(algorithm, [group])
        assert not found.columns["advantages"].any() and found.columns["units"] > 0, id
        assert algorithm.group_metrics([group])["groups_of_one"] == (1, 1)
        (line,) = type(algorithm).check(algorithm.config, tiny_run(group_size=1).config)
        assert "group_size is 1" in line


@handles("rewards with abstain")
def _(case: Case, folder: Path) -> None:
    """Mean 1/2 and deviation sqrt(1/2) of the two valid ones; the others weigh nothing."""
    algorithm = grpo()
    rows = example_rows(algorithm, [scored_group("a", [(r, ["##"]) for r in case["rewards"]])])
    one = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert [float(row.columns["advantages"][0]) for row in rows] == pytest.approx([one, 0, -one, 0])
    assert [row.columns["weight"] for row in rows] == [1, 0, 1, 0]
    assert [row.columns["units"] for row in rows] == [2, 0, 2, 0]


@handles("reinforce++ returns")
def _(case: Case, folder: Path) -> None:
    (member,) = scored_group("a", [(1.0, ["".join(".#"[m] for m in case["mask"])])]).members
    rewards = returns.token_rewards(member, case["reward_at_end"], None)
    found = credit.placed(member, returns.discounted(rewards, case["gamma"]))["a/0/0"]
    assert [value if m else None for value, m in zip(found.tolist(), case["mask"], strict=True)] == case["right"]
    assert not found[np.array(case["mask"]) == 0].any()


# --- losses -----------------------------------------------------------------------------------------------------------


@handles("sequence-level loss")
def _(case: Case, folder: Path) -> None:
    """Advantages at masked tokens take no part, in GSPO's mean over the sequence either."""
    (mask,) = case["mask"]
    for id, algorithm in algorithms(RELATIVE):
        drawn = "".join(".#"[m] for m in mask)
        rows = example_rows(algorithm, [scored_group("a", [(1.0, [drawn]), (0.0, [drawn])])])
        found = []
        for masked in (0.0, 5.0, -1e6, math.nan):
            batch = make_batch(rows, padding=2)
            batch = replace(batch, advantages_BT=torch.where(batch.mask_BT, batch.advantages_BT, masked))
            assert batch.old_logprobs_BT is not None
            logprobs_BT = (batch.old_logprobs_BT + 1e-4).requires_grad_()  # near enough for GSPO's narrow clip
            total = algorithm.loss(batch, Outputs(logprobs_BT)).total
            found.append((total.item(), torch.autograd.grad(total, logprobs_BT)[0].tolist()))
        assert found[1:] == found[:1] * 3, id
        assert any(map(any, found[0][1])) and math.isfinite(found[0][0]), id


@handles("any loss")
def _(case: Case, folder: Path) -> None:
    for id, algorithm in algorithms():
        if "cuts" in case:
            check_cuts_and_ranks(id, algorithm, case)
        else:
            update = evaluate(algorithm, example_rows(algorithm), garbage=math.nan)
            assert math.isfinite(update.loss), id
            assert all(np.isfinite(gradient).all() for gradient in update.gradients.values()), id


def check_cuts_and_ranks(id: str, algorithm: Algorithm, case: Case) -> None:
    """Sums over micro-batches and over ranks, divided once by all units. tests/unit/test_ranks.py has real ranks."""
    assert case["batch"] == "8 sequences of lengths 1..8"
    drawn = [(float(n % 3 == 0), ["." + n * "#"]) for n in range(1, 9)]
    rows = example_rows(algorithm, [scored_group(f"g{g}", drawn[4 * g : 4 * g + 4], algorithm.needs) for g in range(2)])
    whole = evaluate(algorithm, rows)

    def same(gradients: dict[str, NDArray[np.float32]]) -> bool:
        return all(np.abs(gradients[name] - whole.gradients[name]).max() < 1e-6 for name in whole.gradients)

    for cut in case["cuts"]:
        count, size = map(int, cut.split("x"))
        assert count * size == 8
        assert same(dict(evaluate(algorithm, rows, size=size, padding=count).gradients)), f"{id} {cut}"
    units = sum(row.columns["units"] for row in rows)
    for ranks in case["ranks"]:
        gradients: dict[str, list[NDArray[np.float32]]] = {name: [] for name in whole.gradients}
        for mine in cuts(rows, 8 // ranks):
            own = sum(row.columns["units"] for row in mine) or 1.0
            for name, gradient in evaluate(algorithm, mine).gradients.items():
                gradients[name].append(gradient * np.float32(own / units))
        assert same({name: np.concatenate(parts) for name, parts in gradients.items()}), f"{id} over {ranks} ranks"


@handles("KL as a loss")
def _(case: Case, folder: Path) -> None:
    """Equal rewards, so that the KL alone has a gradient: descending it makes likelier what the reference finds so."""
    for kind in ("k2", "k3"):
        algorithm = grpo(kl={"coefficient": 0.1, "estimator": kind})
        rows = example_rows(algorithm, [scored_group("a", [(1.0, [".####"]), (1.0, ["#######"])], algorithm.needs)])
        gradient = evaluate(algorithm, rows).gradients["logprobs"]
        sampled = np.concatenate([row.columns["mask"][int(row.columns["mask"].argmax()) :] for row in rows]) > 0
        above = np.concatenate([
            (row.columns["policy_logprobs"] - row.columns["ref_logprobs"])[row.columns["mask"] > 0] for row in rows
        ])  # fmt: skip
        assert (np.abs(gradient[sampled]) > 1e-5).all()
        assert (np.sign(gradient[sampled]) == np.sign(above)).all()


# --- the trainer ------------------------------------------------------------------------------------------------------


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.weights()}


def unchanged(trainer: Any) -> bool:
    before = weights(tiny_trainer())
    return all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def replies(*lengths: int) -> list[Row]:
    return [
        row(f"g/{i}", [5, 6], [7 + (i + t) % 9 for t in range(n)], advantage=0.5 - i) for i, n in enumerate(lengths)
    ]


@handles("token-mean")
def _(case: Case, folder: Path) -> None:
    """One micro-batch of four rows, or four of one. Adam hides a gradient's scale: its norm must agree too."""
    rows = replies(1, 4, 2, 7)
    found = []
    for count in case["accumulation"]:
        size = len(rows) // count
        trainer = tiny_trainer(clip=None)
        result = train(trainer, 0, [rows[i : i + size] for i in range(0, len(rows), size)], grpo())
        assert len(result.cuts) == count
        found.append((result.metrics, weights(trainer)))
    (one, after_one), (four, after_four) = found
    for name in ("loss", "grad_norm"):
        assert four[name] == pytest.approx(one[name], rel=1e-5)
    before = weights(tiny_trainer())
    for name, tensor in after_one.items():
        moved = float((tensor - before[name]).abs().max())
        assert float((tensor - after_four[name]).abs().max()) <= max(1e-3 * moved, 1e-7), name


@handles("whole batch masked, or an empty response")
def _(case: Case, folder: Path) -> None:
    trainer = tiny_trainer()
    empty = row("g/9", [5, 6, 7], [8, 9], mask=[0, 0], weight=0.0, units=0.0)
    result = train(trainer, 0, [[empty, replace(empty, id="g/8")]], grpo())
    assert (result.updates, result.skipped) == (0, 1)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert unchanged(trainer)

    rows = replies(3, 2)
    without, beside = (train(tiny_trainer(), 0, [found], grpo()) for found in (rows, [rows[0], empty, rows[1]]))
    assert (beside.updates, beside.skipped) == (1, 0)
    for name in ("loss", "grad_norm"):
        assert beside.metrics[name] == without.metrics[name]
    none, some = forward(tiny_trainer(), [empty, rows[0]])
    assert none["logprobs"].tolist() == [0] * 5, "as long as the row, and nothing written"
    assert (some["logprobs"] < 0).tolist() == [False] * 2 + [True] * 3
    credited = example_rows(grpo(), [scored_group("a", [(1.0, [".##"]), (0.0, ["..."]), (0.0, [".#"])])])
    assert [found.columns["units"] for found in credited] == [2, 0, 1]


@handles("all advantages 0")
def _(case: Case, folder: Path) -> None:
    rows = [replace(r, columns={**r.columns, "advantages": 0 * r.columns["advantages"]}) for r in replies(3, 2)]
    trainer = tiny_trainer(weight_decay=0.1)
    result = train(trainer, 0, [rows], grpo())
    assert (result.updates, result.skipped) == (0, 1) and result.metrics["grad_norm"] == 0
    assert unchanged(trainer)
    assert train(trainer, 1, [replies(3, 2)], grpo()).updates == 1, "the run goes on"
    bonus = {"start": 0.1, "end": 0.1, "steps": 1}
    assert train(tiny_trainer(), 0, [rows], grpo(entropy=bonus)).updates == 1, "another term has a gradient"


@handles("temperature 0.6, unchanged weights")
def _(case: Case, folder: Path) -> None:
    """The engine's log-probs of what it sampled, and the trainer's of the same tokens: before any update both agree."""
    from relax_core.testing.engines import Watched, request, serving
    from relax_core.testing.tiny import TinyConfig, tiny_adapter

    temperature = float(case["what"].split()[1].rstrip(","))
    sampled: list[Row] = []

    async def sample(engine: Any) -> None:
        for i in range(4):
            made = await engine.generate(request(f"t{i}", [5, 6 + i], 6, temperature=temperature))
            found = row(f"g/{i}", [5, 6 + i], made.ids, advantage=1.0 - i)
            logprobs = np.concatenate([np.zeros(2), made.logprobs]).astype(np.float32)
            sampled.append(replace(found, columns={**found.columns, "logprobs": logprobs}))

    serving(sample)
    adapter = Watched(TinyConfig(), tiny_adapter().media)
    trainer = tiny_trainer(adapter, temperature=temperature)
    rows = []
    for found, columns in zip(sampled, forward(trainer, sampled), strict=True):
        ratio = np.exp(columns["logprobs"] - found.columns["logprobs"])[found.columns["mask"] > 0]
        assert ratio == pytest.approx(1, abs=1e-4)
        rows.append(replace(found, columns={**found.columns, "old_logprobs": columns["logprobs"]}))
    assert train(trainer, 0, [rows[:2], rows[2:]], grpo()).metrics["ratio"] == pytest.approx(1, abs=1e-6)
    hot = forward(tiny_trainer(adapter), rows)
    assert np.abs(hot[0]["logprobs"] - rows[0].columns["old_logprobs"]).max() > 0.1, "at temperature 1 they differ"


# --- rewards ----------------------------------------------------------------------------------------------------------


def played(*tokens: int, reward: float | None = None) -> Group:
    task = Task("t", ())
    plays = [
        Trajectory(task, 0, m, [Turn((), message("assistant", ""), Stop.EOS, n)], reward=reward, raw_reward=reward)
        for m, n in enumerate(tokens)
    ]
    return Group("t@0", 0, task, 0, plays)


@handles("overlong shaping")
def _(case: Case, folder: Path) -> None:
    limit, lengths = case["L"], case["lengths"]
    right = {20: [0, 0, -1 / 20, -19 / 20, -1, -1], 0: [0, 0, 0, 0, 0, -1]}
    for buffer in case["B"]:
        callback = Overlong(Overlong.Config(limit=limit, buffer=buffer))
        group = played(*lengths, reward=0.0)
        assert callback.shape_rewards(tiny_run(), [0.0] * len(lengths), GroupEvent(group)) == pytest.approx(
            right[buffer]
        )


@handles("dynamic sampling")
def _(case: Case, folder: Path) -> None:
    """tests/unit/test_dynamic_sampling.py follows such a group through the score stage, and e2e tests through runs."""
    group = played(4, 9, 10, reward=1.0)
    run = tiny_run(sampling=SamplingSection(max_new_tokens=10))
    run.stack.add_callback(Overlong(Overlong.Config(buffer=4)), "callbacks.0")
    run.stack.add_callback(DynamicSampling(DynamicSampling.Config()), "callbacks.1")
    shaped = run.stack.pipe("shape_rewards", run, [1.0] * 3, GroupEvent(group))
    for trajectory, reward in zip(group.trajectories, shaped, strict=True):
        trajectory.reward = reward
    assert len(set(shaped)) == 3
    assert run.stack.pipe("filter_group", run, None, GroupEvent(group)) == "all rewards are 1"


@handles("remote scorer returns scores 0.0 beside another field 1.0")
def _(case: Case, folder: Path) -> None:
    """0 is a value: neither an abstention nor a reason to look elsewhere."""

    class Remote(Reward):
        async def __call__(self, trajectory: Trajectory) -> float | None:
            return {"scores": 0.0, "other": 1.0}["scores"]

    group = played(3, 4)
    asyncio.run(Scorer([(RewardSection(id="remote"), Remote(None))], lambda line: None).score(group))
    assert [t.reward for t in group.trajectories] == [0.0, 0.0]
    assert [t.rewards for t in group.trajectories] == [{"remote": 0.0}] * 2


# --- metrics ----------------------------------------------------------------------------------------------------------


@handles("metrics")
def _(case: Case, folder: Path) -> None:
    values = {"a": np.int64(3), "b": np.float32(0.5), "c": np.array([1.0, np.nan]), "d": math.nan, "e": torch.ones(())}
    MetricsLog(folder).write(1, values)
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    right = {"a": 3, "b": 0.5, "c": [1.0, None], "d": None, "e": 1.0}
    assert {name: json.loads(line)[name] for name in values} == right
