"""What a loss gets from the embedded trainer: windows, columns, lines of numbers, further outputs; hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_core.errors import ConfigError, DataError
from relax_core.hookspecs import Callback, ForwardEvent
from relax_core.interfaces import Batch, Loss, Outputs, Row
from relax_core.run import Run
from relax_core.testing.gradients import (
    BANS,
    KINDS,
    assert_close,
    banning,
    caught,
    gradients,
    rows_of_lengths,
)
from relax_core.testing.training import forward, row, tiny_trainer, train
from relax_core.torch.layout import Kind


def grpo(entropy: float | None = None, **settings: Any) -> Grpo:
    bonus = None if entropy is None else EntropyBonus(start=entropy, end=entropy, steps=1)
    return Grpo(Grpo.Config(entropy=bonus, **settings))


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
    known = "entropy, full_logprobs, logprobs, topk_logprobs"
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
