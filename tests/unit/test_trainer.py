"""The embedded trainer against plain transformers forwards, and against itself under other cuts and layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_core.errors import CheckpointError, ConfigError, DataError, RelaxError
from relax_core.hookspecs import Callback, ForwardEvent, OptimizerEvent
from relax_core.interfaces import Batch, Cut, Loss, ModelAdapter, Outputs, Row
from relax_core.run import Run
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import forward, row, tiny_run, tiny_trainer, train, train_cuts
from relax_core.torch.layout import Kind
from relax_core.torch.logprobs import Limits
from relax_core.torch.trainer import TorchTrainer
from relax_core.types import MediaRef

KINDS: tuple[Kind, ...] = ("shared", "packed", "padded")
BANS = (4, 9, 17)


class Banning(TinyAdapter):
    """Bans some words too, so that bans matter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.banned_token_ids = (*self.banned_token_ids, *BANS)


def banning(**settings: Any) -> Banning:
    plain = tiny_adapter(**settings)
    return Banning(plain.config, plain.media)


def grpo(entropy: float | None = None, **settings: Any) -> Grpo:
    bonus = None if entropy is None else EntropyBonus(start=entropy, end=entropy, steps=1)
    return Grpo(Grpo.Config(entropy=bonus, **settings))


def rows_of_lengths(lengths: Sequence[int], prompts: int = 3, seed: int = 0) -> list[Row]:
    """Replies of these lengths to a few prompts; one has an observation in it, two are samples of one trajectory."""
    draw = np.random.default_rng(seed)
    starts = [draw.integers(5, 30, 3 + 2 * i).tolist() for i in range(prompts)]
    allowed = [i for i in range(3, 30) if i not in BANS]
    made = []
    for i, n in enumerate(lengths):
        mask = [1] * n
        if i == len(lengths) - 1 and n > 4:
            mask[2:4] = [0, 0]
        reply = draw.choice(allowed, n).tolist()
        made.append(row(f"g{i % prompts}/{i}", starts[i % prompts], reply, mask, advantage=float(draw.normal())))
    return made


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """Of the update that was about to happen, caught before the optimizer used it."""
    caught = cast(Catch, trainer.run.stack.callbacks["catch"])
    assert caught.gradients, "no update happened"
    return caught.gradients.pop()


class Catch(Callback):
    """Keeps each update's gradient and event."""

    def __init__(self) -> None:
        self.trainer: TorchTrainer | None = None
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.events: list[OptimizerEvent] = []

    def before_optimizer_step(self, run: Run, event: OptimizerEvent) -> None:
        assert self.trainer is not None
        found = self.trainer.model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in found if p.grad is not None})
        self.events.append(event)


def caught(adapter: ModelAdapter | None = None, temperature: float = 1.0, **settings: Any) -> TorchTrainer:
    """A trainer without clipping whose gradients are caught."""
    from relax_core.config.schema import SamplingSection

    run = tiny_run(sampling=SamplingSection(temperature=temperature))
    catch = Catch()
    run.stack.add_callback(catch, "catch")
    trainer = tiny_trainer(adapter, run=run, **{"clip": None, **settings})
    catch.trainer = trainer
    return trainer


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * scale, name


def plain_logprobs(adapter: TinyAdapter, r: Row, temperature: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """From the plain transformers model, one row at a time."""
    model = adapter.load("cpu", torch.float32)
    ids = torch.tensor(r.columns["tokens"].tolist())
    with torch.no_grad():
        logits = cast(Any, model)(input_ids=ids[None]).logits[0, :-1] / temperature
    logits[:, list(adapter.banned_token_ids)] = -1e9
    picked = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    found = np.concatenate([[0], picked]).astype(np.float32)
    return np.where(r.columns["mask"], found, 0).astype(np.float32)


# --- log-probs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 4])
def test_logprobs_are_those_of_the_plain_model(kind: Kind, window: int | None) -> None:
    adapter = banning(sliding_window=window)
    trainer = tiny_trainer(adapter, temperature=0.6, layout=kind)
    rows = rows_of_lengths([1, 2, 9, 4, 5, 6, 7, 8])
    for r, columns in zip(rows, forward(trainer, rows), strict=True):
        assert columns["logprobs"].dtype == np.float32
        assert np.allclose(columns["logprobs"], plain_logprobs(adapter, r, 0.6), atol=1e-5)


def test_layouts_agree_closely() -> None:
    rows = rows_of_lengths([3, 1, 9, 4, 2, 6, 7, 8])
    found = [forward(tiny_trainer(banning(), layout=kind), rows, "logprobs", "entropy") for kind in KINDS]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert np.abs(a["logprobs"] - b["logprobs"]).max() < 1e-5
            assert np.abs(a["entropy"] - b["entropy"]).max() < 1e-5


def test_entropy_is_that_of_the_tempered_distribution_without_banned_tokens() -> None:
    adapter = banning()
    trainer = tiny_trainer(adapter, temperature=0.6)
    (r,) = rows = [row("g/0", [5, 6, 7], [8, 10, 1])]
    entropy = forward(trainer, rows, "entropy")[0]["entropy"]
    with torch.no_grad():
        ids = torch.tensor(r.columns["tokens"].tolist())
        logits = cast(Any, adapter.load("cpu", torch.float32))(input_ids=ids[None]).logits[0, 2:5]
    logits[:, list(adapter.banned_token_ids)] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits / 0.6).entropy()  # type: ignore[no-untyped-call]
    assert np.allclose(entropy[3:], expected, atol=1e-5)
    assert (entropy[:3] == 0).all()


def test_a_big_vocabulary_is_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_lengths([1, 2, 3, 4, 5])
    results, largest = [], []

    class Watching(Banning):
        def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(len(hidden))
            return super().head(model, hidden)

    plain = banning()
    for tokens in (15, 3):  # all at once; three at a time, made again in the backward pass
        seen: list[int] = []
        limits = Limits(chunk=tokens * plain.vocab_size, block=plain.vocab_size, kept=0)
        monkeypatch.setattr("relax_core.torch.forward.limits_of", lambda device, found=limits: found)
        trainer = caught(Watching(plain.config, plain.media))
        train(trainer, 0, [rows], grpo(entropy=0.1))
        results.append((forward(trainer, rows), gradients(trainer)))
        largest.append(max(seen))
    assert largest[0] > 3 and largest[1] == 3
    for found, expected in zip(results[1][0], results[0][0], strict=True):
        assert np.allclose(found["logprobs"], expected["logprobs"], atol=1e-6)
    assert_close(results[1][1], results[0][1], 1e-6)


def test_rows_without_sampled_tokens_get_zeros() -> None:
    rows = [row("g/0", [5, 6], [7, 8], mask=[0, 0]), row("g/1", [5, 6], [7, 8])]
    first, second = forward(tiny_trainer(), rows)
    assert first["logprobs"].tolist() == [0, 0, 0, 0]
    assert second["logprobs"][2] < 0


def test_the_ratio_is_exactly_one_at_unchanged_weights() -> None:
    trainer = tiny_trainer(banning(), temperature=0.6, tokens_per_micro_batch=24)
    rows = rows_of_lengths([3, 1, 9, 4, 2, 6, 7, 8])
    old = forward(trainer, rows)
    rows = [replace(r, columns={**r.columns, "old_logprobs": o["logprobs"]}) for r, o in zip(rows, old, strict=True)]
    ratios = []

    class Ratio(Grpo):
        def loss(self, batch: Batch, outputs: Outputs) -> Loss:
            assert batch.old_logprobs_BT is not None
            ratios.append((outputs.logprobs_BT - batch.old_logprobs_BT)[batch.mask_BT].detach())
            return super().loss(batch, outputs)

    from itertools import groupby

    from relax_core.plan import pack

    groups = [list(members) for _, members in groupby(rows, key=lambda r: r.group)]
    cuts = pack(groups, trainer)
    assert len(cuts) > 2
    train(trainer, 0, cuts, Ratio(Grpo.Config()))
    assert torch.equal(torch.cat(ratios), torch.zeros(sum(int(r.columns["mask"].sum()) for r in rows)))


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_the_gradient_does_not_depend_on_cut_or_layout(aggregation: str) -> None:
    rows = rows_of_lengths([1, 2, 3, 4, 5, 6, 7, 8])
    if aggregation == "sequence-mean":  # the last two rows are samples of one trajectory of 15 - 2 trained tokens
        shares = [(1 / int(r.columns["mask"].sum()), 1.0) for r in rows[:6]] + [(1 / 13, 1.0), (1 / 13, 0.0)]
        rows = [
            replace(r, columns={**r.columns, "weight": w, "units": u}) for r, (w, u) in zip(rows, shares, strict=True)
        ]
    found = {}
    for kind in KINDS:
        for size in (8, 2, 1):
            trainer = caught(banning(), temperature=0.6, layout=kind)
            result = train(trainer, 0, [rows[i : i + size] for i in range(0, 8, size)], grpo(entropy=0.05))
            assert (result.updates, len(result.cuts)) == (1, 8 // size)
            found[kind, size] = gradients(trainer)
    for gradient in found.values():
        assert_close(gradient, found["padded", 1], 1e-6)


def test_the_gradient_is_that_of_the_written_formula() -> None:
    adapter = banning()
    trainer = caught(adapter, temperature=0.6)
    rows = rows_of_lengths([3, 1, 5, 7])
    result = train(trainer, 0, [rows], grpo())
    model = adapter.load("cpu", torch.float32)
    total = torch.zeros(())
    for r in rows:
        ids = torch.tensor(r.columns["tokens"].tolist())
        logits = cast(Any, model)(input_ids=ids[None]).logits[0, :-1] / 0.6
        logits = logits.index_fill(-1, torch.tensor(adapter.banned_token_ids), -1e9)
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total = total - (logprobs * torch.from_numpy(r.columns["advantages"][1:])).sum()
    trained = sum(int(r.columns["mask"].sum()) for r in rows)
    (total / trained).backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(gradients(trainer), expected, 1e-6)
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in expected.values()))
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_wider_neighbour_changes_nothing() -> None:
    """Other padded widths: the same rows beside a row that is not trained, and longer than all."""
    rows = rows_of_lengths([2, 3, 4, 5])
    alone, beside = caught(), caught()
    train(alone, 0, [rows], grpo())
    longest = row("g9/0", [5] * 40, [7] * 60, advantage=math.nan, weight=0.0, units=0.0, values=np.zeros(1))
    traceless = row("g9/1", [5] * 40, [7] * 60, advantage=0.0, units=0.0)  # computed, adds nothing
    result = train(beside, 0, [[longest, *rows[:2], traceless], rows[2:]], grpo())
    assert result.metrics["computed_tokens"] == sum(beside.cost(part) for part in ([*rows[:2], traceless], rows[2:]))
    assert_close(gradients(beside), gradients(alone), 1e-6)


def test_what_stands_at_masked_tokens_never_matters() -> None:
    rows = rows_of_lengths([3, 6, 5, 8])
    spoiled = []
    for r in rows:
        columns = dict(r.columns)
        for name in ("logprobs", "advantages"):
            columns[name] = np.where(r.columns["mask"], columns[name], np.nan).astype(np.float32)
        spoiled.append(replace(r, columns=columns))
    clean, dirty = caught(), caught()
    train(clean, 0, [rows], grpo())
    result = train(dirty, 0, [spoiled], grpo())
    expected = gradients(clean)
    assert all(torch.equal(g, expected[name]) for name, g in gradients(dirty).items())
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_a_rows_later_observations_are_seen_but_not_trained() -> None:
    """A two-turn row [prompt | sampled | observation | sampled] has the gradient of its sampled tokens alone."""
    one = row("g/0", [5, 6, 7], [8, 10, 11, 12, 13, 1], mask=[1, 1, 0, 0, 1, 1])
    for kind in KINDS:
        trainer = caught(layout=kind)
        train(trainer, 0, [[one]], grpo())
        found = gradients(trainer)
        adapter = tiny_adapter()
        model = adapter.load("cpu", torch.float32)
        ids = torch.tensor(one.columns["tokens"].tolist())
        logits = cast(Any, model)(input_ids=ids[None]).logits[0, :-1]
        logits = logits.index_fill(-1, torch.tensor(adapter.banned_token_ids), -1e9)
        logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        (-logprobs[torch.tensor([2, 3, 6, 7])].sum() / 4).backward()
        assert_close(found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, 1e-6)


def test_gradient_checkpointing_has_the_same_gradient() -> None:
    rows = rows_of_lengths([3, 1, 5, 7])
    for kind in KINDS:
        plain, checkpointed = caught(layout=kind), caught(layout=kind, gradient_checkpointing=True)
        train(plain, 0, [rows[:2], rows[2:]], grpo())
        train(checkpointed, 0, [rows[:2], rows[2:]], grpo())
        assert_close(gradients(checkpointed), gradients(plain), 1e-6)


def test_bfloat16_sums_gradients_and_updates_in_float32() -> None:
    rows = rows_of_lengths([3, 1, 5, 7])
    exact, half = caught(), tiny_trainer(dtype="bfloat16", lr=1e-6)
    train(exact, 0, [rows], grpo())
    before = {n: t.clone() for n, t in half.policy.optimizer.masters().items()}
    result = train(half, 0, [[r] for r in rows], grpo())
    expected = math.sqrt(sum(float(g.pow(2).sum()) for g in gradients(exact).values()))
    assert result.metrics["grad_norm"] == pytest.approx(expected, rel=0.05)
    after = half.policy.optimizer.masters()
    assert all(t.dtype == torch.float32 for t in after.values())
    moved = [float((after[n] - before[n]).abs().max()) for n in before]
    assert min(moved) > 0  # a step of 1e-6 would be lost in bfloat16
    for name, tensor in half.weights():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, after[name].bfloat16())


# --- sharing ----------------------------------------------------------------------------------------------------------


class Counting(Banning):
    """Counts the tokens that the backbone computes."""

    tokens = 0

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        self.tokens += inputs["input_ids"].numel()
        return super().backbone(model, **inputs)


def test_a_prompt_is_computed_once_for_all_its_rows() -> None:
    plain = banning()
    adapter = Counting(plain.config, plain.media)
    trainer = tiny_trainer(adapter)
    rows = [row(f"g/{i}", [5, 6, 7, 8, 9, 10, 11], [7, 8, 1]) for i in range(8)]
    result = train(trainer, 0, [rows], grpo())
    assert adapter.tokens == 7 + 8 * 2 == result.metrics["computed_tokens"]


def test_a_model_that_cannot_share_gets_whole_padded_rows() -> None:
    plain = banning()
    adapter = Counting(plain.config, plain.media)
    adapter.shares_prefix = False
    trainer = caught(adapter)
    rows = rows_of_lengths([3, 1, 5, 7])
    assert trainer.cost(rows) == 4 * max(len(r.columns["tokens"]) - 1 for r in rows)
    train(trainer, 0, [rows], grpo())
    assert adapter.tokens == trainer.cost(rows)
    sharing = caught(banning())
    train(sharing, 0, [rows], grpo())
    assert_close(gradients(trainer), gradients(sharing), 1e-6)


def test_engine_and_trainer_do_not_share_a_config() -> None:
    from transformers import Qwen3ForCausalLM

    shared = cast(Any, tiny_adapter().load("cpu", torch.float32)).config

    class Sharing(Banning):
        def load(self, device: str, dtype: torch.dtype) -> Any:
            torch.manual_seed(0)
            return cast(Any, Qwen3ForCausalLM(shared)).to(dtype)

    plain = banning()
    trainer = tiny_trainer(Sharing(plain.config, plain.media))
    other = Qwen3ForCausalLM(shared)
    rows = rows_of_lengths([3])
    with trainer.compute.run([piece(rows[0])], frozenset({"logprobs"})):
        assert shared._attn_implementation == other.config._attn_implementation == "sdpa"
        other(input_ids=torch.tensor([[5, 6]]))


def piece(r: Row) -> Any:
    from relax_core.torch.layout import Piece

    return Piece.of(r)


def test_a_model_with_an_attention_of_its_own_is_refused_where_it_would_be_wrong() -> None:
    class Eager(Banning):
        def load(self, device: str, dtype: torch.dtype) -> Any:
            model = super().load(device, dtype)
            for layer in cast(Any, model).model.layers:  # what is set in the model's config is not seen
                layer.self_attn.config = type(model.config)(**model.config.to_dict())
                layer.self_attn.config._attn_implementation = "sdpa"
            return model

    plain = banning()
    with pytest.raises(ConfigError, match=r"trainer.layout: Qwen3ForCausalLM does not attend .* 'padded'"):
        forward(tiny_trainer(Eager(plain.config, plain.media)), rows_of_lengths([3]))
    forward(tiny_trainer(Eager(plain.config, plain.media), layout="padded"), rows_of_lengths([3]))


def test_media_in_prompts_and_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tiny_adapter(images=True)
    colours = {"a": [0.9, 0.1, 0.0], "b": [0.0, 0.3, 0.8]}
    for key, colour in colours.items():
        features = {"colour": np.array(colour, np.float32)}
        adapter.media.features(key, lambda made=features: made)  # type: ignore[misc]
    image, crop = MediaRef("image", "a", 1, 1), MediaRef("image", "b", 6, 1)
    rows = [
        row("g/0", [5, 3, 6], [7, 8, 9, 3, 9, 10, 1], mask=[1, 1, 0, 0, 0, 1, 1], media=[image, crop]),
        row("g/1", [5, 3, 6], [8, 1], media=[image]),
        row("h/0", [5, 4, 6], [8, 1]),
    ]
    found = {}
    for kind in KINDS:
        trainer = caught(adapter, layout=kind)
        result = train(trainer, 0, [rows], grpo())
        found[kind] = gradients(trainer)
        assert {"mismatch/image/abs", "mismatch/text/k3", "mismatch/abs"} <= result.metrics.keys()
    assert_close(found["shared"], found["padded"], 1e-6)
    assert_close(found["packed"], found["padded"], 1e-6)


# --- updates ----------------------------------------------------------------------------------------------------------


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def unchanged(trainer: TorchTrainer, before: dict[str, torch.Tensor], state: dict[str, Any]) -> bool:
    now = trainer.policy.optimizer.state()["state"]
    same_state = now.keys() == state.keys() and all(
        torch.equal(now[k][n], state[k][n]) for k in state for n in state[k]
    )
    return same_state and all(torch.equal(t, before[n]) for n, t in trainer.weights())


def copied(trainer: TorchTrainer) -> dict[str, Any]:
    state = trainer.policy.optimizer.state()["state"]
    return {k: {n: t.clone() for n, t in values.items()} for k, values in state.items()}


@pytest.mark.parametrize("case", ["empty", "untrained", "zero"])
def test_an_update_without_anything_to_learn_is_skipped(case: str) -> None:
    trainer = tiny_trainer(weight_decay=0.1)
    rows = rows_of_lengths([3, 4])
    train(trainer, 0, [rows], grpo())
    before, state = weights(trainer), copied(trainer)
    if case == "empty":
        rows = []
    elif case == "untrained":
        rows = [replace(r, columns={**r.columns, "weight": 0.0, "units": 0.0}) for r in rows]
    else:
        rows = [replace(r, columns={**r.columns, "advantages": 0 * r.columns["advantages"]}) for r in rows]
    result = train(trainer, 1, [rows], grpo())
    assert (result.updates, result.skipped) == (0, 1)
    assert unchanged(trainer, before, state)
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_zero_advantages_with_an_entropy_bonus_still_train() -> None:
    rows = [row("g/0", [5, 6], [7, 1], advantage=0.0)]
    assert train(tiny_trainer(), 0, [rows], grpo(entropy=0.1)).updates == 1


def test_a_gradient_that_is_not_finite_is_skipped_and_then_ends_the_run() -> None:
    trainer = tiny_trainer(max_nonfinite=2)
    rows = rows_of_lengths([3, 4])
    bad = [
        replace(rows[0], columns={**rows[0].columns, "advantages": np.full_like(rows[0].columns["advantages"], np.nan)})
    ]
    train(trainer, 0, [rows], grpo())
    before, state = weights(trainer), copied(trainer)
    result = train(trainer, 1, [bad], grpo())
    assert (result.updates, result.skipped, result.metrics["nonfinite"]) == (0, 1, 1)
    assert unchanged(trainer, before, state)
    assert all(math.isfinite(v) for v in result.metrics.values())
    assert train(trainer, 2, [rows], grpo()).updates == 1  # and the count starts again
    train(trainer, 3, [bad], grpo())
    with pytest.raises(
        RelaxError, match=r"trainer.max_nonfinite: the gradient norm of 2 updates in a row was nan \(step 4\)"
    ):
        train(trainer, 4, [bad], grpo())


def test_several_updates_in_a_step_are_several_optimizer_steps() -> None:
    trainer, rows = caught(), rows_of_lengths([3, 4, 5, 6])
    cuts = [Cut(rows[:1], False), Cut(rows[1:2], True), Cut(rows[2:], True)]
    result = train_cuts(trainer, 0, cuts, grpo())
    assert (result.updates, result.skipped) == (2, 0)
    assert result.cuts == [(["g0/0"], False), (["g1/1"], True), (["g2/2", "g0/3"], True)]
    events = cast(Catch, trainer.run.stack.callbacks["catch"]).events
    assert [(e.step, e.update) for e in events] == [(0, 0), (0, 1)]
    one = caught()
    train(one, 0, [rows[:1], rows[1:2]], grpo())
    train(one, 0, [rows[2:]], grpo())
    assert all(torch.equal(t, weights(one)[n]) for n, t in trainer.weights())


def test_a_plan_must_end_with_an_update() -> None:
    with pytest.raises(RelaxError, match="the plan of step 3 ended within an update"):
        train_cuts(tiny_trainer(), 3, [Cut(rows_of_lengths([3]), False)], grpo())


def test_clipping_scales_the_gradient_to_its_limit() -> None:
    rows = rows_of_lengths([3, 4])
    free, bound = caught(), caught(clip=0.01)
    norm = train(free, 0, [rows], grpo()).metrics["grad_norm"]
    assert train(bound, 0, [rows], grpo()).metrics["grad_norm"] == norm > 0.01
    expected = {n: g * (0.01 / norm) for n, g in gradients(free).items()}
    assert_close(gradients(bound), expected, 1e-4)


def test_equal_work_gives_equal_bits() -> None:
    rows = rows_of_lengths([3, 1, 9, 4, 2, 6])
    ends = []
    for _ in range(2):
        trainer = tiny_trainer()
        results = [train(trainer, step, [rows[:3], rows[3:]], grpo(entropy=0.01)) for step in range(3)]
        ends.append((weights(trainer), [r.metrics for r in results]))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(t, ends[1][0][n]) for n, t in ends[0][0].items())


def test_training_raises_the_reward() -> None:
    """Rows that end with token 7 are good, the others are bad: its log-prob must rise."""
    trainer = tiny_trainer(lr=3e-3)
    good, bad = row("g/0", [5, 6], [7, 1], advantage=1.0), row("g/1", [5, 6], [8, 1], advantage=-1.0)
    before = forward(trainer, [good, bad])
    for step in range(5):
        train(trainer, step, [[good, bad]], grpo())
    after = forward(trainer, [good, bad])
    assert after[0]["logprobs"][2] > before[0]["logprobs"][2] + 0.5
    assert after[1]["logprobs"][2] < before[1]["logprobs"][2] - 0.5


# --- batches and hooks ------------------------------------------------------------------------------------------------


class Seeing(Grpo):
    """Keeps the batches that its loss sees."""

    def __init__(self) -> None:
        super().__init__(Grpo.Config())
        self.batches: list[Batch] = []

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        self.batches.append(batch)
        return super().loss(batch, outputs)


def test_a_batch_holds_windows_and_all_float_columns() -> None:
    algorithm = Seeing()
    values = [np.array([9, 9, 1, 2], np.float32), np.array([9, 9, 9, 3], np.float32)]
    rows = [row("g/0", [5, 6], [7, 1], values=values[0]), row("g/1", [5, 6, 7], [1], values=values[1], units=0.0)]
    train(tiny_trainer(), 4, [rows], algorithm)
    (batch,) = algorithm.batches
    assert batch.step == 4
    assert batch.tokens_BT.tolist() == [[7, 1], [1, 0]]
    assert batch.mask_BT.tolist() == [[True, True], [True, False]]
    assert batch.columns["values"].tolist() == [[1, 2], [3, 0]]
    assert batch.units_B.tolist() == [2, 0]
    assert batch.old_logprobs_BT is None
    assert set(batch.columns) == {"values"}


def test_a_column_that_only_some_rows_have_is_an_error() -> None:
    rows = [row("g/0", [5], [7, 1], values=np.zeros(3, np.float32)), row("g/1", [5], [7, 1])]
    with pytest.raises(DataError, match="row g/1: lacks the column 'values'"):
        train(tiny_trainer(), 0, [rows], grpo())


@pytest.mark.parametrize("size", [2, 4, 0])
@pytest.mark.parametrize("wrong", [("g/0",), ("g/1",), ("g/0", "g/1")])
def test_a_column_of_a_wrong_length_is_an_error(wrong: tuple[str, ...], size: int) -> None:
    """Of one row or of all: nothing is left out silently."""
    sizes = {id: size if id in wrong else 3 for id in ("g/0", "g/1")}
    rows = [row(id, [5], [7, 1], values=np.zeros(n, np.float32)) for id, n in sizes.items()]
    said = rf"^row {wrong[0]}: its column 'values' has shape \({size},\); allowed is \(3,\), one number for each"
    with pytest.raises(DataError, match=said):
        train(tiny_trainer(), 0, [rows], grpo())


def test_what_is_no_column_of_a_loss_is_left_out() -> None:
    algorithm = Seeing()
    others: dict[str, Any] = {
        "positions": np.zeros((3, 3), np.int32),
        "trajectory": object(),
        "group": object(),
        "reward": 0.5,
    }
    rows = [row("g/0", [5], [7, 1], **others, media_sizes=np.zeros(7, np.int32), name="x", cube=np.zeros((2, 2, 2)))]
    train(tiny_trainer(), 0, [rows], algorithm)
    assert not algorithm.batches[0].columns


def test_forward_hooks_change_what_the_loss_sees() -> None:
    class Change(Callback):
        def before_forward(self, run: Run, value: Batch, event: ForwardEvent) -> Batch:
            return replace(value, advantages_BT=value.advantages_BT * 2)

        def after_forward(self, run: Run, value: Outputs, event: ForwardEvent) -> Outputs:
            assert torch.equal(event.batch.advantages_BT[0, :1], torch.tensor([2.0]))
            return replace(value, logprobs_BT=value.logprobs_BT * 3)

    rows = [row("g/0", [5, 6], [7, 1])]
    plain, hooked = caught(), caught()
    hooked.run.stack.add_callback(Change(), "change")
    train(plain, 0, [rows], grpo())
    train(hooked, 0, [rows], grpo())
    assert_close(gradients(hooked), {n: 6 * g for n, g in gradients(plain).items()}, 1e-5)


class Asking(Grpo):
    """Asks for further outputs, and keeps what its loss sees."""

    def __init__(self, *outputs: str) -> None:
        super().__init__(Grpo.Config())
        self.outputs = frozenset({"logprobs", *outputs})
        self.seen: list[tuple[Batch, Outputs]] = []

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        self.seen.append((batch, outputs))
        return super().loss(batch, outputs)


def test_an_output_that_is_not_computed_is_refused() -> None:
    known = "entropy, full_logprobs, logprobs, topk_logprobs, values"
    with pytest.raises(ConfigError, match=rf"algorithm Asking: asks for the output 'hidden'; known are {known}"):
        train(tiny_trainer(), 0, [rows_of_lengths([2])], Asking("hidden"))
    with pytest.raises(ConfigError, match=r"forward: asks for the output 'topk'; known are"):
        forward(tiny_trainer(), rows_of_lengths([2]), "topk")
    for act in (
        lambda: train(tiny_trainer(), 0, [rows_of_lengths([2])], Asking("values")),
        lambda: forward(tiny_trainer(), rows_of_lengths([2]), "values"),
    ):
        with pytest.raises(ConfigError, match=r"asks for the output 'values', but this trainer .* without a critic"):
            act()


# --- columns with a line for each sampled token -----------------------------------------------------------------------


def two_rows(first: Any, second: Any) -> list[Row]:
    """``[5 6 | 7 (8) 1]`` and ``[5 6 9 | 7]`` with a column ``lines``; the token in brackets is not sampled."""
    return [
        row("g/0", [5, 6], [7, 8, 1], mask=[1, 0, 1], lines=first),
        row("g/1", [5, 6, 9], [7], lines=second),
    ]


def test_lines_of_sampled_tokens_stand_where_these_stand() -> None:
    algorithm = Seeing()
    rows = two_rows(np.array([[1, 2], [3, 4]], np.float64), np.array([[5, 6]], np.float64))
    train(tiny_trainer(), 0, [rows], algorithm)
    found = algorithm.batches[0].columns["lines"]
    assert found.dtype == torch.float32
    assert found.tolist() == [[[1, 2], [0, 0], [3, 4]], [[5, 6], [0, 0], [0, 0]]]


def test_lines_of_integers_stay_integers() -> None:
    algorithm = Seeing()
    big = 2**24 + 1  # float32 does not hold it
    train(tiny_trainer(), 0, [two_rows(np.array([[big], [2]], np.int32), np.array([[3]], np.int32))], algorithm)
    found = algorithm.batches[0].columns["lines"]
    assert found.dtype == torch.int64
    assert found.tolist() == [[[big], [0], [2]], [[3], [0], [0]]]


def test_positions_are_never_taken_for_lines() -> None:
    """Three axes beside three sampled tokens."""
    algorithm = Seeing()
    positions = np.broadcast_to(np.arange(5, dtype=np.int32), (3, 5))
    train(tiny_trainer(), 0, [[row("g/0", [5, 6], [7, 8, 1], positions=positions)]], algorithm)
    assert not algorithm.batches[0].columns


def test_lines_of_a_wrong_number_in_every_row_are_an_error() -> None:
    with pytest.raises(DataError, match=r"row g/0: its column 'lines' has shape \(3, 2\); allowed is \(2, K\)"):
        train(tiny_trainer(), 0, [two_rows(np.zeros((3, 2)), np.zeros((4, 2)))], grpo())


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (np.zeros((1, 3)), r"row g/1: its column 'lines' has 3 numbers for a token, row g/0 has 2"),
        (np.zeros((2, 2)), r"row g/1: its column 'lines' has shape \(2, 2\); allowed is \(1, K\)"),
        (None, r"row g/1: lacks the column 'lines'"),
    ],
)
def test_lines_that_do_not_fit_are_an_error_of_their_row(second: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        train(tiny_trainer(), 0, [two_rows(np.zeros((2, 2)), second)], grpo())


# --- further outputs --------------------------------------------------------------------------------------------------


def with_ids(rows: Sequence[Row], count: int = 3) -> list[Row]:
    draw = np.random.default_rng(1)
    allowed = [i for i in range(5, 30) if i not in BANS]
    return [
        replace(r, columns={**r.columns, "topk_ids": draw.choice(allowed, (int(r.columns["mask"].sum()), count))})
        for r in rows
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_lines_of_logprobs_are_those_of_the_plain_model(kind: Kind) -> None:
    adapter = banning()
    trainer = tiny_trainer(adapter, temperature=0.6, layout=kind)
    rows = with_ids(rows_of_lengths([1, 9, 4, 6]))
    algorithm = Asking("topk_logprobs", "full_logprobs")
    found = forward(trainer, rows, "topk_logprobs", "full_logprobs", "logprobs")
    train(trainer, 0, [rows], algorithm)
    ((batch, outputs),) = algorithm.seen
    assert outputs.topk_logprobs_BTK is not None and outputs.full_logprobs_BTV is not None
    model = adapter.load("cpu", torch.float32)
    for i, (r, columns) in enumerate(zip(rows, found, strict=True)):
        ids = torch.tensor(r.columns["tokens"].tolist())
        with torch.no_grad():
            logits = cast(Any, model)(input_ids=ids[None]).logits[0, :-1] / 0.6
        logits[:, list(adapter.banned_token_ids)] = -1e9
        full = logits.log_softmax(-1)[torch.from_numpy(np.flatnonzero(r.columns["mask"]) - 1)].numpy()
        topk = np.take_along_axis(full, r.columns["topk_ids"], -1)
        assert np.allclose(columns["full_logprobs"], full, atol=1e-5)
        assert np.allclose(columns["topk_logprobs"], topk, atol=1e-5)
        mask_T = batch.mask_BT[i]
        assert np.allclose(outputs.full_logprobs_BTV[i][mask_T].detach(), full, atol=1e-5)
        assert np.allclose(outputs.topk_logprobs_BTK[i][mask_T].detach(), topk, atol=1e-5)
        assert not outputs.topk_logprobs_BTK[i][~mask_T].any()


def test_ids_are_those_of_the_row_whatever_a_hook_does_to_the_mask() -> None:
    class FirstOnly(Callback):
        def before_forward(self, run: Run, value: Batch, event: ForwardEvent) -> Batch:
            mask_BT = value.mask_BT.clone()
            mask_BT[:, 1:] = False
            return replace(value, mask_BT=mask_BT)

    rows = with_ids(rows_of_lengths([3, 2]))
    seen = []
    for hooked in (False, True):
        trainer, algorithm = tiny_trainer(), Asking("topk_logprobs")
        if hooked:
            trainer.run.stack.add_callback(FirstOnly(), "first")
        train(trainer, 0, [rows], algorithm)
        seen.append(algorithm.seen[0][1].topk_logprobs_BTK)
    assert seen[0] is not None and seen[1] is not None
    assert torch.equal(seen[0], seen[1])


def test_logprobs_at_ids_need_the_ids() -> None:
    with pytest.raises(DataError, match=r"'topk_logprobs' needs the column 'topk_ids'"):
        train(tiny_trainer(), 0, [rows_of_lengths([2])], Asking("topk_logprobs"))


# --- engine and trainer -----------------------------------------------------------------------------------------------


def test_mismatch_compares_with_the_engine_by_modality() -> None:
    trainer = tiny_trainer()
    rows = [row("g/0", [5, 6], [7, 1]), row("g/1", [5, 6, 9], [8, 7, 1])]
    own = forward(trainer, rows)
    shifted = [
        replace(r, columns={**r.columns, "logprobs": np.where(r.columns["mask"], o["logprobs"] - d, np.nan)})
        for r, o, d in zip(rows, own, (0.1, -0.2), strict=True)
    ]
    metrics = train(trainer, 0, [shifted], grpo()).metrics
    assert metrics["mismatch/abs"] == pytest.approx((2 * 0.1 + 3 * 0.2) / 5, abs=1e-5)
    k3 = [math.expm1(d) - d for d in (0.1, -0.2)]
    assert metrics["mismatch/k3"] == pytest.approx((2 * k3[0] + 3 * k3[1]) / 5, abs=1e-5)
    assert metrics["mismatch/text/abs"] == metrics["mismatch/abs"]


def off_by(trainer: TorchTrainer, rows: Sequence[Row], distances: Sequence[float], old: bool = False) -> list[Row]:
    """The rows as an engine sampled them whose log-probs are lower by these distances; ``old``: pi_old is the same."""
    made = []
    for r, own, d in zip(rows, forward(trainer, rows), distances, strict=True):
        logprobs = np.where(r.columns["mask"], own["logprobs"] - d, 0).astype(np.float32)
        columns = {**r.columns, "logprobs": logprobs} | ({"old_logprobs": logprobs} if old else {})
        made.append(replace(r, columns=columns))
    return made


def test_with_old_engine_only_the_policy_of_the_steps_start_is_compared() -> None:
    """Four updates of one row each: the batch's old log-probs are the engine's, so later rows would differ by 0."""
    trainer = tiny_trainer(run=tiny_run(old="engine"))
    rows = off_by(trainer, rows_of_lengths([3, 4, 5, 6]), (0.3, 0.2, 0.1, 0.4), old=True)
    result = train_cuts(trainer, 0, [Cut([r], True) for r in rows], grpo())
    assert result.updates == 4
    assert result.metrics["mismatch/abs"] == pytest.approx(0.3, abs=1e-5)
    assert result.metrics["mismatch/text/k3"] == pytest.approx(math.expm1(0.3) - 0.3, abs=1e-5)


def test_with_old_engine_rows_count_until_the_policy_moves() -> None:
    trainer = tiny_trainer(run=tiny_run(old="engine"))
    rows = off_by(trainer, rows_of_lengths([3, 4, 5]), (0.3, 0.2, 0.1), old=True)
    rows[0] = replace(rows[0], columns={**rows[0].columns, "advantages": 0 * rows[0].columns["advantages"]})
    result = train_cuts(trainer, 0, [Cut([r], True) for r in rows], grpo())
    assert (result.updates, result.skipped) == (2, 1)
    assert result.metrics["mismatch/abs"] == pytest.approx((3 * 0.3 + 4 * 0.2) / 7, abs=1e-5)


def test_with_recomputed_old_logprobs_every_row_is_compared_once() -> None:
    trainer = caught()
    rows = off_by(trainer, rows_of_lengths([3, 4]), (0.3, 0.2))
    rows = [
        replace(r, columns={**r.columns, "old_logprobs": o["logprobs"]})
        for r, o in zip(rows, forward(trainer, rows), strict=True)
    ]
    result = train_cuts(trainer, 0, [Cut([r], True) for r in rows] * 2, grpo())  # two epochs
    assert result.updates == 4
    assert result.metrics["mismatch/abs"] == pytest.approx((3 * 0.3 + 4 * 0.2) / 7, abs=1e-5)


class Clipping(Grpo):
    """Says that the tokens 7 were clipped; and, which must not count, every token that is not sampled."""

    def loss(self, batch: Batch, outputs: Outputs) -> Loss:
        return replace(super().loss(batch, outputs), clipped_BT=(batch.tokens_BT == 7) | ~batch.mask_BT)


def test_the_clipped_share_is_counted_by_modality() -> None:
    adapter = tiny_adapter(images=True)
    adapter.media.features("a", lambda: {"colour": np.zeros(3, np.float32)})
    rows = [
        row("g/0", [5, 3], [7, 7, 8, 7], mask=[1, 0, 1, 1], media=[MediaRef("image", "a", 1, 1)]),  # 2 of 3
        row("h/0", [5, 6], [7, 8, 9, 10]),  # 1 of 4
        row("h/1", [5, 6], [8]),  # 0 of 1
    ]
    for cuts in ([rows], [rows[:1], rows[1:]]):
        metrics = train(tiny_trainer(adapter), 0, cuts, Clipping(Grpo.Config())).metrics
        assert metrics["mismatch/clipped"] == pytest.approx(3 / 8)
        assert metrics["mismatch/image/clipped"] == pytest.approx(2 / 3)
        assert metrics["mismatch/text/clipped"] == pytest.approx(1 / 5)


def test_the_clipped_share_is_over_all_updates() -> None:
    first, second = row("h/0", [5, 6], [7, 8, 9]), row("h/1", [5, 6], [7])
    metrics = train_cuts(tiny_trainer(), 0, [Cut([first], True), Cut([second], True)], Clipping(Grpo.Config())).metrics
    assert metrics["mismatch/clipped"] == metrics["mismatch/text/clipped"] == pytest.approx(2 / 4)


def test_a_step_with_a_trained_token_has_every_mismatch_metric() -> None:
    class Silent(Grpo):
        def loss(self, batch: Batch, outputs: Outputs) -> Loss:
            return replace(super().loss(batch, outputs), clipped_BT=None)

    metrics = train(tiny_trainer(), 0, [[row("g/0", [5], [7])]], Silent(Grpo.Config())).metrics
    assert {f"mismatch/{kind}{name}" for kind in ("", "text/") for name in ("abs", "k3", "clipped")} <= metrics.keys()
    assert metrics["mismatch/clipped"] == 0


# --- weights and checkpoints ------------------------------------------------------------------------------------------


def test_weights_have_hugging_face_names_and_tied_ones_come_once() -> None:
    trainer = tiny_trainer()
    names = [name for name, _ in trainer.weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == len(dict(trainer.model.named_parameters()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_trainer_continues_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.01}
    rows = rows_of_lengths([3, 1, 9, 4, 2, 6])
    through = tiny_trainer(**settings)
    for step in range(4):
        through_result = train(through, step, [rows[:3], rows[3:]], grpo())
        if step == 1:
            through.save(tmp_path)
    resumed = tiny_trainer(**settings)
    resumed.load(tmp_path)
    for step in (2, 3):
        result = train(resumed, step, [rows[:3], rows[3:]], grpo())
    assert result.metrics == through_result.metrics
    assert all(torch.equal(t, weights(resumed)[n]) for n, t in through.weights())
    assert all(
        torch.equal(t, resumed.policy.optimizer.masters()[n]) for n, t in through.policy.optimizer.masters().items()
    )


def test_a_checkpoint_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"weights.safetensors: 'model.embed_tokens.weight' has shape \(32, 32\)"):
        tiny_trainer(tiny_adapter("a b c")).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model.layers.2.input_layernorm.weight' is missing in the checkpoint"):
        tiny_trainer(tiny_adapter(layers=3)).load(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load(tmp_path)
