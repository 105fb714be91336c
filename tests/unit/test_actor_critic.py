"""Policy and critic as one trainer: one plan for both, whose cuts come when the policy asks, and one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.ppo import Ppo
from relax_core.actor_critic import CRITIC, ActorCritic, build_trainer, together
from relax_core.errors import RelaxError
from relax_core.interfaces import VALUES, Algorithm, Columns, Cut, Row, StepResult, Trainer
from relax_core.run import Run, build_adapter, build_algorithm
from relax_core.testing.runs import run_file
from relax_core.testing.training import forward, row, tiny_actor_critic, train_cuts

PPO = Ppo(Ppo.Config(critic_warmup=1, value_clip=None))


def some_rows(step: int = 0) -> list[Row]:
    """With what a step of PPO has: values and targets."""
    drawn = np.random.default_rng(step)
    rows = [
        row("g/0/0", [5, 6, 7], [8, 10, 11, 1], mask=[1, 0, 1, 1], advantage=1.0),
        row("g/1/0", [5, 6, 7], [9, 1], advantage=-0.5),
        row("h/0/0", [6, 8], [12], advantage=0.7),
        row("h/1/0", [6, 8], [13, 14, 15, 1], advantage=-1.0),
    ]

    def numbers(r: Row) -> Any:
        return np.where(r.columns["mask"], drawn.normal(size=len(r.columns["mask"])), 0).astype(np.float32)

    return [
        r.having({"values": numbers(r), "returns": numbers(r), "old_logprobs": r.columns["logprobs"]}) for r in rows
    ]


def cuts_of(step: int) -> list[Cut]:
    """Two updates; in the third step nothing is trained in the first of them, in the fourth in both."""
    rows = some_rows(step)
    unused = [r.having({"weight": 0.0, "units": 0.0}) for r in rows]
    first, second = (unused if step >= 2 else rows)[:2], (unused if step == 3 else rows)[2:]
    return [Cut(first[:1], False), Cut(first[1:], True), Cut(second, True)]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def equal(a: Trainer, b: Trainer) -> bool:
    ours, theirs = weights_of(a), weights_of(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- a step of both ---------------------------------------------------------------------------------------------------


def test_together_is_each_alone() -> None:
    """The same weights and metrics, bit by bit, as of a policy and a critic that step one after the other."""
    both, apart = tiny_actor_critic(), tiny_actor_critic()
    for step in range(4):
        found = train_cuts(both, step, cuts_of(step), PPO)
        policy = train_cuts(apart.policy, step, cuts_of(step), PPO)
        critic = train_cuts(apart.critic, step, cuts_of(step), PPO)
        expected = {**policy.metrics, **critic.metrics}
        if step < 3:
            expected["loss"] = policy.metrics["loss"] + critic.metrics["critic_loss"]
        assert found.metrics == expected
        assert found.cuts == policy.cuts and found.moved == tuple(map(bool, critic.moved))
        assert (list(policy.moved), list(critic.moved)) == MOVED[step]
        assert (found.updates, found.skipped) == (sum(MOVED[step][1]), 2 - sum(MOVED[step][1]))
    assert equal(both.policy, apart.policy) and equal(both.critic, apart.critic)
    values = forward(both, some_rows(), "values", "logprobs")
    alone = forward(apart, some_rows(), "values")
    assert all(np.array_equal(v["values"], c["values"]) for v, c in zip(values, alone, strict=True))
    assert all(columns.keys() == {"values", "logprobs"} and columns["values"].any() for columns in values)
    assert equal(both, both.policy)


MOVED: list[tuple[list[bool], list[bool]]] = [
    ([False, False], [True, True]),  # the critic warms up
    ([True, True], [True, True]),
    ([False, True], [False, True]),
    ([False, False], [False, False]),
]


class Stand(Trainer):
    """Takes so many cuts, then waits for its turn, fails, or ends."""

    def __init__(self, fails: Exception | None = None, wait: bool = False) -> None:
        super().__init__(None)
        self.fails, self.wait = fails, wait
        self.taken: list[str] = []
        self.ended = False

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        try:
            async for cut in plan:
                self.taken.append(cut.rows[0].id)
                if self.fails is not None:
                    raise self.fails
                await (asyncio.Event().wait() if self.wait else asyncio.sleep(0))
            return StepResult({}, (True,), ())
        finally:
            self.ended = True

    budget = 10

    def cost(self, rows: Sequence[Row]) -> int:
        return len(rows)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        return [dict.fromkeys(outputs, id(self)) for _ in rows]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


async def given(ids: Sequence[str], asked: list[str], fails: Exception | None = None) -> AsyncIterator[Cut]:
    for id in ids:
        asked.append(id)
        yield Cut([row(f"{id}/0/0", [5], [6])], id == ids[-1])
    if fails is not None:
        raise fails


def stepped(policy: Stand, critic: Stand, plan: AsyncIterator[Cut]) -> StepResult:
    async def both() -> StepResult:
        return await asyncio.wait_for(ActorCritic(policy, critic).step(0, plan, PPO), 5)

    return asyncio.run(both())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("who", ["policy", "critic", "plan"])
def test_an_error_of_one_ends_the_step_of_both(who: str) -> None:
    """Though the other would wait for ever; and it is raised as it was."""
    error = RelaxError("out of memory")
    policy = Stand(fails=error if who == "policy" else None, wait=who == "critic")
    critic = Stand(fails=error if who == "critic" else None, wait=who != "critic")
    with pytest.raises(RelaxError, match="out of memory") as caught:
        stepped(policy, critic, given("ab", [], error if who == "plan" else None))
    assert caught.value is error
    assert policy.ended and critic.ended


@pytest.mark.timeout(20)
def test_the_plan_goes_on_while_the_critic_lags_behind() -> None:
    asked: list[str] = []
    policy, critic = Stand(), Stand(wait=True)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(ActorCritic(policy, critic).step(0, given("abc", asked), PPO), 0.2))
    assert (asked, len(policy.taken), len(critic.taken)) == (["a", "b", "c"], 3, 1)
    assert policy.ended and critic.ended


@pytest.mark.timeout(20)
def test_the_plan_waits_for_the_policy() -> None:
    """It is asked for the next cut when the policy is: what the two share is never used by both at once."""
    asked: list[str] = []
    policy, critic = Stand(wait=True), Stand()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(ActorCritic(policy, critic).step(0, given("abc", asked), PPO), 0.2))
    assert (asked, len(critic.taken)) == (["a"], 1)


def test_outputs_come_from_who_computes_them() -> None:
    policy, critic = Stand(), Stand()
    trainer = ActorCritic(policy, critic)
    (found,) = forward(trainer, some_rows()[:1], "logprobs", "values", "entropy")
    assert found == {"logprobs": id(policy), "entropy": id(policy), "values": id(critic)}
    assert forward(trainer, some_rows()[:1], "values") == [{"values": id(critic)}]
    assert forward(trainer, some_rows()[:1], "logprobs") == [{"logprobs": id(policy)}]


def test_together_raises_the_error_itself() -> None:
    async def fails() -> int:
        raise ValueError("one")

    async def waits() -> int:
        await asyncio.Event().wait()
        return 1

    with pytest.raises(ValueError, match="one"):
        asyncio.run(together(waits(), fails()))


# --- checkpoints and memory -------------------------------------------------------------------------------------------


def test_each_goes_on_from_what_both_saved(tmp_path: Path) -> None:
    """And both from what each has saved: the critic's files are in a folder of the policy's."""
    both, apart = tiny_actor_critic(), tiny_actor_critic()
    for step in range(2):
        train_cuts(both, step, cuts_of(step), PPO)
    both.save(tmp_path / "both")
    assert sorted(p.name for p in (tmp_path / "both").iterdir() if p.is_file()) == sorted(
        p.name for p in (tmp_path / "both" / CRITIC).iterdir()
    )
    apart.policy.load(tmp_path / "both")
    apart.critic.load(tmp_path / "both" / CRITIC)
    apart.policy.save(tmp_path / "apart")
    apart.critic.save(tmp_path / "apart" / CRITIC)
    again = tiny_actor_critic()
    again.load(tmp_path / "apart")
    expected, found = (train_cuts(trainer, 2, cuts_of(2), PPO) for trainer in (both, again))
    assert found.metrics == expected.metrics
    assert equal(both.policy, again.policy) and equal(both.critic, again.critic)


def test_both_sleep_and_wake() -> None:
    trainer = tiny_actor_critic()
    asyncio.run(trainer.sleep())
    for outputs in ("logprobs", "values"):
        with pytest.raises(RelaxError, match="it sleeps"):
            forward(trainer, some_rows(), outputs)
    asyncio.run(trainer.wake())
    assert len(forward(trainer, some_rows(), "logprobs", "values")) == 4


# --- building ---------------------------------------------------------------------------------------------------------


def test_a_critic_is_built_where_values_are_trained(tmp_path: Path) -> None:
    from relax_core.launch import prepare

    run: Run = prepare(run_file(tmp_path, algorithm={"id": "ppo"}), report=lambda line: None)
    adapter, _ = build_adapter(run)
    outputs = build_algorithm(run).outputs
    trainer = build_trainer(run, adapter, outputs)
    assert isinstance(trainer, ActorCritic)
    assert trainer.budget == trainer.policy.budget and trainer.cost(some_rows()) == trainer.policy.cost(some_rows())
    assert not isinstance(build_trainer(run, adapter, outputs - VALUES), ActorCritic)
    evaluating = build_trainer(run, adapter, outputs, training=False)
    assert not isinstance(evaluating, ActorCritic)
    trainer.save(tmp_path / "saved")
    evaluating.load(tmp_path / "saved")  # the policy alone, of a run with a critic
    assert equal(trainer, evaluating)


def test_cuts_for_many_ranks_are_cut_again() -> None:
    """A critic with fewer ranks than the policy gets cuts above its own budget: the gradient is the same."""
    whole, parts = tiny_actor_critic(), tiny_actor_critic(tokens_per_micro_batch=8)
    critic = cast(Any, parts.critic)
    forwards: list[int] = []
    real = critic.trainee.run

    def counted(pieces: Sequence[Any], *more: Any) -> Any:
        forwards.append(len(pieces))
        return real(pieces, *more)

    critic.trainee.run = counted
    for trainer in (whole, parts):
        train_cuts(trainer, 0, [Cut(some_rows(), True)], PPO)
    assert sum(forwards) == 4 and len(forwards) > 1
    ours, theirs = weights_of(whole.critic), weights_of(parts.critic)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4


def test_an_algorithm_must_say_how_values_are_learned() -> None:
    class Silent(Ppo):
        value_loss = Algorithm.value_loss

    with pytest.raises(NotImplementedError, match="Silent has values in its outputs, and no value_loss"):
        train_cuts(tiny_actor_critic(), 0, cuts_of(0), Silent(Ppo.Config()))
