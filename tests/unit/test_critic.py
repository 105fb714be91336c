"""The critic: values by hand, whose gradient goes where, when it moves, and how it continues."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_core.actor_critic import ActorCritic
from relax_core.errors import CheckpointError, ConfigError, RelaxError
from relax_core.hookspecs import Callback, OptimizerEvent
from relax_core.interfaces import Algorithm, Batch, Columns, Cut, Loss, ModelAdapter, Outputs, Row, ScoredGroup, Trainer
from relax_core.run import Run
from relax_core.setup import TrainerSetup
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import forward, row, tiny_actor_critic, tiny_run, tiny_trainer, train, train_cuts
from relax_core.torch.config import TrainerConfig
from relax_core.torch.critic_stage import CriticStage
from relax_core.torch.layout import Kind
from relax_core.torch.trainer import TorchTrainer

KINDS: tuple[Kind, ...] = ("shared", "packed", "padded")
VALUES = frozenset({"logprobs", "values"})


class Both(Algorithm):
    """-A log pi for the policy and (V - target)^2 / 2 for the critic, as sums; each can be left out."""

    outputs = VALUES

    def __init__(self, policy: float | None = 1.0, target: float | None = 1.0) -> None:
        self.policy, self.target = policy, target

    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        raise NotImplementedError

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        total = torch.zeros(())
        if self.policy is not None:
            total = total - self.policy * (batch.advantages_BT * outputs.logprobs_BT)[batch.mask_BT].sum()
        return Loss(total, {})

    def value_loss(self, batch: Batch, values_BT: torch.Tensor) -> Loss:
        assert not values_BT[~batch.mask_BT].any()
        total = torch.zeros(())
        if self.target is not None:
            total = total + (values_BT - self.target)[batch.mask_BT].square().sum() / 2
        return Loss(total, {})


def with_critic(
    adapter: ModelAdapter | None = None, critic: Mapping[str, Any] | None = None, **settings: Any
) -> ActorCritic:
    return tiny_actor_critic(adapter, critic={"lr": 1e-2, "clip": None, **(critic or {})}, **settings)


def test_settings_of_a_critic_need_an_algorithm_with_one() -> None:
    settings = TrainerConfig.model_validate({"device": "cpu", "critic": {"lr": 1e-2}})
    with pytest.raises(ConfigError, match=r"^trainer\.critic: lr differs from the default, .*such as ppo$"):
        TorchTrainer(settings, TrainerSetup(tiny_adapter(), tiny_run()))
    written = TrainerConfig.model_validate(TrainerConfig(device="cpu").model_dump())  # as a resolved run file does
    TorchTrainer(written, TrainerSetup(tiny_adapter(), tiny_run()))


class Before(Callback):
    """Does something before each update."""

    def __init__(self, act: Callable[[OptimizerEvent], object]) -> None:
        self.act = act

    def before_optimizer_step(self, run: Run, event: OptimizerEvent) -> None:
        self.act(event)


def before_updates(trainer: ActorCritic, act: Callable[[OptimizerEvent], object]) -> None:
    part_of(trainer.policy).run.stack.add_callback(Before(act), "before")


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def some_rows() -> list[Row]:
    return [
        row("g/0", [5, 6, 7], [8, 10, 11, 1], mask=[1, 0, 1, 1], advantage=1.0),
        row("g/1", [5, 6, 7], [9, 1], advantage=-0.5),
        row("h/0", [6, 8], [12], advantage=0.7),
        row("h/1", [6, 8], [13, 14, 15, 1], advantage=-1.0),
    ]


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def state_of(optimizer: Any) -> list[torch.Tensor]:
    return [t.clone() for values in optimizer.state()["state"].values() for t in values.values()]


def same(module: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def part_of(trainer: Trainer) -> TorchTrainer:
    assert isinstance(trainer, TorchTrainer)
    return trainer


def policy_of(trainer: ActorCritic) -> torch.nn.Module:
    return part_of(trainer.policy).learner.module


def critic_of(trainer: ActorCritic) -> torch.nn.ModuleDict:
    return cast(torch.nn.ModuleDict, part_of(trainer.critic).learner.module)


def head_of(trainer: ActorCritic) -> torch.nn.Parameter:
    return cast(torch.nn.Parameter, critic_of(trainer)["head"].weight)


# --- values -----------------------------------------------------------------------------------------------------------


class Ones(TinyAdapter):
    """A model whose hidden state at a token is (the token's id, 1): no attention, so that all is known by hand."""

    def load(self, device: str, dtype: torch.dtype) -> Any:
        table = torch.stack([torch.arange(self.vocab_size), torch.ones(self.vocab_size)], 1)
        return torch.nn.ModuleDict({"embed": torch.nn.Embedding(self.vocab_size, 2, _weight=table.float())})

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        return cast(torch.Tensor, cast(Any, model)["embed"](inputs["input_ids"]))

    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ cast(torch.Tensor, cast(Any, model)["embed"].weight).T / 100


def ones() -> Ones:
    plain = tiny_adapter()
    return Ones(plain.config, plain.media)


def test_the_value_of_a_token_is_that_of_the_state_before_it() -> None:
    """V = 2 x id of the token before + 3."""
    trainer = with_critic(ones())
    rows = [row("g/0", [5, 6], [7, 8, 10], mask=[1, 0, 1]), row("g/1", [4], [9])]
    assert [c["values"].tolist() for c in forward(trainer, rows, "values")] == [[0] * 5, [0] * 2]  # it begins at zero
    with torch.no_grad():
        head_of(trainer).copy_(torch.tensor([[2.0, 3.0]]))
    found = [columns["values"] for columns in forward(trainer, rows, "values")]
    assert [values.tolist() for values in found] == [[0, 0, 15, 0, 19], [0, 11]]
    assert all(values.dtype == np.float32 for values in found)


def test_the_first_gradient_by_hand() -> None:
    """With V = 0 and target 1 the gradient of the head is -sum of hidden states / tokens; that of the model is 0.

    Hidden states: (6, 1), (8, 1) and (4, 1), so the gradient is -(18, 3) / 3 and its norm sqrt(37).
    """
    trainer = with_critic(ones())
    rows = [row("g/0", [5, 6], [7, 8, 10], mask=[1, 0, 1]), row("g/1", [4], [9])]
    embedding = critic_of(trainer)["model"]
    before = weights_of(embedding)
    metrics = train(trainer, 0, [rows], Both(policy=None)).metrics
    assert metrics["critic_grad_norm"] == pytest.approx(math.sqrt(37))
    assert metrics["loss"] == pytest.approx(0.5)
    assert head_of(trainer).tolist()[0] == pytest.approx([0.01, 0.01])  # AdamW's first step is the rate
    assert same(embedding, before)
    assert metrics["grad_norm"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_read_from_the_plain_models_hidden_states(kind: Kind) -> None:
    trainer = with_critic(layout=kind)
    weight_H = torch.linspace(-1, 1, 32)
    with torch.no_grad():
        head_of(trainer).copy_(weight_H[None])
    model = cast(Any, tiny_adapter().load("cpu", torch.float32)).model
    for r, columns in zip(some_rows(), forward(trainer, some_rows(), "values", "logprobs"), strict=True):
        assert columns.keys() == {"values", "logprobs"}
        with torch.no_grad():
            hidden_TH = model(input_ids=torch.tensor(r.columns["tokens"].tolist())[None]).last_hidden_state[0]
        expected = np.concatenate([[0], (hidden_TH[:-1] @ weight_H).numpy()])
        assert np.allclose(columns["values"], np.where(r.columns["mask"], expected, 0), atol=1e-4)


def test_a_row_without_sampled_tokens_has_the_value_zero() -> None:
    rows = [row("g/0", [5, 6], [7, 8], mask=[0, 0]), row("g/1", [5, 6], [7, 8])]
    assert forward(with_critic(), rows, "values")[0]["values"].tolist() == [0, 0, 0, 0]


def test_the_loss_sees_the_very_values_of_the_column() -> None:
    trainer = with_critic()
    train(trainer, 0, [some_rows()], Both())
    column = np.concatenate([c["values"][c["values"] != 0] for c in forward(trainer, some_rows(), "values")])
    seen: list[torch.Tensor] = []

    class Seeing(Both):
        def value_loss(self, batch: Batch, values_BT: torch.Tensor) -> Loss:
            seen.append(values_BT[batch.mask_BT].detach())
            return super().value_loss(batch, values_BT)

    train(trainer, 1, [some_rows()], Seeing())
    assert len(column) == 10
    assert np.array_equal(seen[0].numpy(), column)


# --- who learns -------------------------------------------------------------------------------------------------------


def test_while_only_values_are_trained_the_policy_keeps_every_bit() -> None:
    trainer = with_critic(weight_decay=0.1)
    train(trainer, 0, [some_rows()], Both(target=None))  # the optimizer has a state to spoil
    seen: list[tuple[str, int]] = []
    before_updates(trainer, lambda event: seen.append((event.learner, len(gradients(policy_of(trainer))))))
    optimizer = part_of(trainer.policy).learner.optimizer
    policy, state = weights_of(policy_of(trainer)), state_of(optimizer)
    critic = weights_of(critic_of(trainer))
    for policy_factor in (None, 0.0):  # absent, and exactly zero
        seen.clear()
        result = train(trainer, 1, [some_rows()[:2], some_rows()[2:]], Both(policy=policy_factor))
        assert (result.updates, result.skipped) == (1, 0)
        assert result.metrics["grad_norm"] == 0 < result.metrics["critic_grad_norm"]
        assert seen == [("critic", 0)]
    assert same(policy_of(trainer), policy)
    assert all(torch.equal(a, b) for a, b in zip(state, state_of(optimizer), strict=True))
    moved = [name for name, tensor in critic_of(trainer).state_dict().items() if not torch.equal(tensor, critic[name])]
    assert moved == list(critic)
    assert train(trainer, 2, [some_rows()], Both()).metrics["grad_norm"] > 0
    assert not same(policy_of(trainer), policy)


@pytest.mark.parametrize("target", [None, 0.0])
def test_while_only_the_policy_is_trained_the_critic_keeps_every_bit(target: float | None) -> None:
    """Without a value loss; and where it is exactly zero, since values begin there."""
    trainer = with_critic(weight_decay=0.1)
    before = weights_of(critic_of(trainer))
    result = train(trainer, 0, [some_rows()], Both(target=target))
    assert (result.updates, result.skipped, result.metrics["critic_grad_norm"]) == (1, 0, 0)
    assert same(critic_of(trainer), before)


def test_neither_moves_without_anything_to_learn() -> None:
    result = train(with_critic(), 0, [some_rows()], Both(policy=None, target=0.0))
    assert (result.updates, result.skipped) == (0, 1)


def test_a_critic_changes_nothing_of_how_the_policy_learns() -> None:
    """The same bits as without one; and building it draws nothing from torch's generator."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    both = with_critic(clip=0.1)
    assert torch.equal(torch.get_rng_state(), state)

    class Alone(Both):
        outputs = frozenset({"logprobs"})

        def loss(self, batch: Batch, outputs: Outputs) -> Loss:
            return Loss(-(batch.advantages_BT * outputs.logprobs_BT)[batch.mask_BT].sum(), {})

    alone = tiny_trainer(clip=0.1)
    for step in range(2):
        with_metrics = train(both, step, [some_rows()], Both()).metrics
        without = train(alone, step, [some_rows()], Alone()).metrics
        assert with_metrics["grad_norm"] == without["grad_norm"]
        assert with_metrics["computed_tokens"] == without["computed_tokens"]
        assert not [name for name in without if name.startswith("critic")]
    assert [name for name, _ in both.weights()] == [name for name, _ in alone.weights()]
    assert same(policy_of(both), weights_of(alone.learner.module))


def critic_gradient(kind: Kind, size: int) -> list[torch.Tensor]:
    """Of one update, cut into micro-batches of ``size`` rows."""
    trainer, rows = with_critic(layout=kind), some_rows()
    with torch.no_grad():
        head_of(trainer).copy_(torch.linspace(-1, 1, 32)[None])
    found: list[torch.Tensor] = []
    before_updates(trainer, lambda event: found.extend(gradients(critic_of(trainer)) * (event.learner == "critic")))
    train(trainer, 0, [rows[i : i + size] for i in range(0, 4, size)], Both())
    return found


def test_the_critics_gradient_does_not_depend_on_cut_or_layout() -> None:
    expected = critic_gradient("padded", 1)
    scale = max(float(g.abs().max()) for g in expected)
    for kind in KINDS:
        for size in (4, 2, 1):
            for a, b in zip(critic_gradient(kind, size), expected, strict=True):
                assert float((a - b).abs().max()) <= 1e-6 * scale


@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_learn_their_target(checkpointing: bool) -> None:
    trainer = with_critic(gradient_checkpointing=checkpointing)
    losses = [train(trainer, step, [some_rows()], Both(policy=None)).metrics["loss"] for step in range(15)]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.05


# --- its settings -----------------------------------------------------------------------------------------------------


def test_the_critic_has_a_rate_and_a_warm_up_of_its_own() -> None:
    trainer = with_critic(ones(), critic={"lr": 0.2, "warmup_steps": 4}, schedule="constant")
    rows = [row("g/0", [5, 6], [7, 8])]
    metrics = train(trainer, 1, [rows], Both()).metrics
    assert metrics["lr"] == 0.01
    assert metrics["critic_lr"] == pytest.approx(0.1)
    assert head_of(trainer).tolist()[0] == pytest.approx([0.1, 0.1])


def test_policy_and_critic_are_clipped_each_for_itself() -> None:
    trainer = with_critic(ones(), critic={"lr": 0.2, "clip": 0.5}, clip=None)
    norms: dict[str, float] = {}

    def note(event: OptimizerEvent) -> None:
        module = {"policy": policy_of, "critic": critic_of}[event.learner](trainer)
        norms[event.learner] = math.sqrt(sum(float(g.square().sum()) for g in gradients(module)))

    before_updates(trainer, note)
    metrics = train(trainer, 0, [[row("g/0", [5, 6], [7, 8])]], Both()).metrics
    assert norms == {
        "policy": pytest.approx(metrics["grad_norm"]),
        "critic": pytest.approx(0.5, abs=1e-4),
    }
    assert metrics["critic_grad_norm"] == pytest.approx(math.hypot(6.5, 1))  # before clipping; states (6, 1), (7, 1)


def test_by_default_its_rate_is_one_in_a_hundred_thousand() -> None:
    config = TrainerConfig()
    assert (config.critic.lr, config.critic.clip, config.critic.warmup_steps) == (1e-5, 1.0, 0)
    assert config.for_critic().lr == 1e-5 and config.for_critic().weight_decay == config.weight_decay


def test_its_projection_to_the_vocabulary_is_dropped() -> None:
    class Untied(TinyAdapter):
        def load(self, device: str, dtype: torch.dtype) -> Any:
            model = super().load(device, dtype)
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            return model

    plain = tiny_adapter()
    trainer = with_critic(Untied(plain.config, plain.media))
    assert "lm_head.weight" in dict(trainer.weights())
    assert not [name for name in critic_of(trainer).state_dict() if "lm_head" in name]
    assert train(trainer, 0, [some_rows()], Both()).updates == 1


# --- what is not finite -----------------------------------------------------------------------------------------------


def test_a_critics_gradient_that_is_not_finite_leaves_it_alone_and_then_ends_the_run() -> None:
    trainer = with_critic(max_nonfinite=2)
    critic, policy = weights_of(critic_of(trainer)), weights_of(policy_of(trainer))
    result = train(trainer, 0, [some_rows()], Both(target=math.inf))
    assert (result.updates, result.skipped, result.metrics["critic_nonfinite"]) == (1, 0, 1)
    assert result.metrics["nonfinite"] == 0 and "loss" not in result.metrics
    assert same(critic_of(trainer), critic) and not same(policy_of(trainer), policy)
    assert train(trainer, 1, [some_rows()], Both()).metrics["critic_nonfinite"] == 0  # the count starts again
    train(trainer, 2, [some_rows()], Both(target=math.inf))
    with pytest.raises(RelaxError, match=r"of 2 updates in a row was .* \(step 3\).*lower trainer\.critic\.lr"):
        train(trainer, 3, [some_rows()], Both(target=math.inf))


def test_a_policys_gradient_that_is_not_finite_leaves_the_critic_learning() -> None:
    trainer = with_critic(max_nonfinite=2)
    policy, critic = weights_of(policy_of(trainer)), weights_of(critic_of(trainer))
    result = train(trainer, 0, [some_rows()], Both(policy=math.nan))
    assert (result.updates, result.skipped, result.metrics["nonfinite"]) == (1, 0, 1)
    assert same(policy_of(trainer), policy) and not same(critic_of(trainer), critic)
    with pytest.raises(RelaxError, match=r"lower trainer\.lr"):
        train(trainer, 1, [some_rows()], Both(policy=math.nan))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_critic_continues_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "schedule": "cosine", "weight_decay": 0.01}
    through = with_critic(**settings)
    for step in range(4):
        expected = train(through, step, [some_rows()[:2], some_rows()[2:]], Both())
        if step == 1:
            through.save(tmp_path)
    resumed = with_critic(**settings)
    resumed.load(tmp_path)
    for step in (2, 3):
        result = train(resumed, step, [some_rows()[:2], some_rows()[2:]], Both())
    assert result.metrics == expected.metrics
    assert same(policy_of(resumed), weights_of(policy_of(through)))
    assert same(critic_of(resumed), weights_of(critic_of(through)))
    found, kept = (part_of(t.critic).learner.optimizer.masters() for t in (resumed, through))
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    values = [forward(t, some_rows(), "values") for t in (through, resumed)]
    assert all(np.array_equal(a["values"], b["values"]) for a, b in zip(*values, strict=True))


def test_a_checkpoint_of_a_run_with_another_algorithm_is_refused(tmp_path: Path) -> None:
    with_critic().save(tmp_path / "with")
    tiny_trainer().save(tmp_path / "without")
    alone, both = tiny_trainer(), with_critic()
    with pytest.raises(
        CheckpointError, match=r"with has a critic, and this run's algorithm needs none: .* begin a new"
    ):
        alone.load(tmp_path / "with")
    with pytest.raises(CheckpointError, match=r"without has no critic, and this run's algorithm needs one: .* begin"):
        both.load(tmp_path / "without")
    (tmp_path / "with" / "critic" / "optimizer.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"with/critic cannot be read"):
        both.load(tmp_path / "with")


# --- the stage --------------------------------------------------------------------------------------------------------


def stage_of(trainer: Trainer) -> tuple[CriticStage, list[tuple[str, list[str]]]]:
    """The stage, and what it asked the media store for."""
    asked: list[tuple[str, list[str]]] = []
    media = SimpleNamespace(
        retain=lambda k: asked.append(("retain", k)), release=lambda k: asked.append(("release", k))
    )
    setup = SimpleNamespace(trainer=trainer, media=media, count=1, exact=False, order="any")
    return CriticStage(cast(Any, setup)), asked


def test_the_stage_makes_values_of_scored_groups() -> None:
    trainer = with_critic()
    train(trainer, 0, [some_rows()], Both())
    stage, asked = stage_of(trainer)
    assert (stage.name, stage.by, stage.count) == ("critic", "group", 1)
    assert stage.needs == {"tokens", "mask", "positions", "media", "reward"}
    group = some_rows()[:2]
    made = asyncio.run(stage.run(cast(Any, SimpleNamespace(rows=tuple(group)))))
    expected = forward(trainer, group, "values")
    assert list(made) == ["g/0", "g/1"]
    for columns, wanted in zip(made.values(), expected, strict=True):
        assert columns.keys() == {"values"}
        assert np.array_equal(columns["values"], wanted["values"]) and columns["values"].any()
    assert asked == [("retain", []), ("release", [])]


def test_the_stage_is_built_for_the_column() -> None:
    from relax_core.config.columns import planned_stages

    class Needy(Both):
        needs = frozenset({"values"})

    run = tiny_run()
    plans, problems = planned_stages(run.config, run.stack, Needy())
    assert not problems
    assert [(plan.section.id, plan.columns) for plan in plans] == [("critic", frozenset({"values"}))]


def test_the_values_of_a_group_are_those_of_one_critic() -> None:
    """A group of several micro-batches is computed while an update waits to move the critic."""
    trainer = with_critic(tokens_per_micro_batch=8)
    rows = [row(f"g/{i}", [5, 6, 7], [8 + i, 9, 1]) for i in range(6)]
    train(trainer, 0, [some_rows()], Both())
    before = forward(trainer, rows, "values")

    async def plan() -> AsyncIterator[Cut]:
        await asyncio.sleep(0)
        yield Cut(some_rows(), True)

    async def both() -> list[Columns]:
        made, result = await asyncio.gather(
            trainer.forward(rows, frozenset({"values"})), trainer.step(1, plan(), Both())
        )
        assert result.updates == 1
        return made

    during, after = asyncio.run(both()), forward(trainer, rows, "values")
    assert all(np.array_equal(a["values"], b["values"]) for a, b in zip(before, during, strict=True))
    assert not any(np.array_equal(a["values"], b["values"]) for a, b in zip(before, after, strict=True))


def test_several_updates_move_the_critic_several_times() -> None:
    def cuts() -> Iterator[Cut]:
        return (Cut([r], True) for r in some_rows())

    trainer = with_critic(ones(), critic={"lr": 0.01})
    result = train_cuts(trainer, 0, cuts(), Both(policy=None))
    assert (result.updates, result.skipped) == (4, 0)
