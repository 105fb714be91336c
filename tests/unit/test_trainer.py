"""The embedded trainer against plain transformers forwards, and against itself under other cuts and layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_core.interfaces import Batch, Loss, Outputs
from relax_core.testing.gradients import (
    KINDS,
    Banning,
    assert_close,
    banning,
    caught,
    gradients,
    plain_logprobs,
    rows_of_lengths,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import forward, row, tiny_trainer, train
from relax_core.torch.layout import Kind
from relax_core.torch.logprobs import Limits


def grpo(entropy: float | None = None, **settings: Any) -> Grpo:
    bonus = None if entropy is None else EntropyBonus(start=entropy, end=entropy, steps=1)
    return Grpo(Grpo.Config(entropy=bonus, **settings))


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
    before = {n: t.clone() for n, t in half.learner.optimizer.masters().items()}
    result = train(half, 0, [[r] for r in rows], grpo())
    expected = math.sqrt(sum(float(g.pow(2).sum()) for g in gradients(exact).values()))
    assert result.metrics["grad_norm"] == pytest.approx(expected, rel=0.05)
    after = half.learner.optimizer.masters()
    assert all(t.dtype == torch.float32 for t in after.values())
    moved = [float((after[n] - before[n]).abs().max()) for n in before]
    assert min(moved) > 0  # a step of 1e-6 would be lost in bfloat16
    for name, tensor in half.weights():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, after[name].bfloat16())
