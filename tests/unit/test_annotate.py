"""What a model says of rows: the most probable tokens, whole distributions, rows with nothing to say of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import Row
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import row
from relax_core.torch.annotate import Annotator
from relax_core.torch.layout import Kind

VOCABULARY = 32
BANNED = (4, 9)


def adapter() -> TinyAdapter:
    made = tiny_adapter()
    made.banned_token_ids = (*made.banned_token_ids, *BANNED)
    return made


def annotator(layout: Kind = "shared", budget: int = 4096, temperature: float = 0.6) -> Annotator:
    own = adapter()
    return Annotator(own.load("cpu", torch.float32), own, layout, temperature, budget)


def said(by: Annotator, rows: Sequence[Row], *outputs: str, top_k: int | None = None) -> list[Mapping[str, Any]]:
    return list(asyncio.run(by.forward(rows, frozenset(outputs), top_k)))


def rows_of(*lengths: int) -> list[Row]:
    """Replies of these lengths, two to a prompt; from three tokens on the second is not sampled."""
    allowed = [i for i in range(3, VOCABULARY) if i not in BANNED]
    draw = np.random.default_rng(0)
    made = []
    for i, n in enumerate(lengths):
        mask = [int(t != 1 or n < 3) for t in range(n)]
        made.append(row(f"g{i // 2}/{i}", [5 + i // 2, 6, 7], draw.choice(allowed, n).tolist(), mask))
    return made


def plain(r: Row, temperature: float = 0.6) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Log-probs (sampled, V) of the plain transformers model without banned tokens."""
    ids = torch.tensor(r.columns["tokens"].tolist())
    with torch.no_grad():
        logits = cast(Any, adapter().load("cpu", torch.float32))(input_ids=ids[None]).logits[0] / temperature
    logits[:, list(adapter().banned_token_ids)] = -1e9
    found: np.ndarray[Any, np.dtype[np.float32]] = logits.log_softmax(-1).numpy()
    return found[np.flatnonzero(r.columns["mask"]) - 1]


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_the_most_probable_tokens_come_in_falling_order(layout: Kind) -> None:
    rows = rows_of(1, 5, 2, 7)
    for r, columns in zip(rows, said(annotator(layout), rows, "topk", top_k=4), strict=True):
        assert columns.keys() == {"topk_ids", "topk_logprobs"}
        ids, logprobs = columns["topk_ids"], columns["topk_logprobs"]
        assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
        expected = plain(r)
        order = np.argsort(-expected, axis=-1)[:, :4]
        assert ids.tolist() == order.tolist()
        assert np.allclose(logprobs, np.take_along_axis(expected, order, -1), atol=1e-5)
        assert not set(ids.flatten()) & set(adapter().banned_token_ids)


def test_whole_distributions_sum_to_one_and_hold_the_sampled_tokens() -> None:
    rows = rows_of(1, 5, 2, 7)
    for r, columns in zip(rows, said(annotator(), rows, "full_logprobs", "logprobs", "entropy"), strict=True):
        full, sampled = columns["full_logprobs"], np.flatnonzero(r.columns["mask"])
        assert full.shape == (len(sampled), VOCABULARY) and full.dtype == np.float32
        assert np.allclose(full, plain(r), atol=1e-5)
        assert np.allclose(np.exp(full).sum(-1), 1, atol=1e-5)
        picked = full[np.arange(len(sampled)), r.columns["tokens"][sampled]]
        assert np.allclose(columns["logprobs"][sampled], picked, atol=1e-5)
        assert np.allclose(columns["entropy"][sampled], -(np.exp(full) * full).sum(-1), atol=1e-5)


def test_the_student_is_asked_at_the_teachers_tokens() -> None:
    """``topk`` gives ids; ``topk_logprobs`` at these ids gives the same numbers back."""
    rows = rows_of(3, 1, 4)
    top = said(annotator(), rows, "topk", top_k=5)
    asked = [Row(r.id, r.group, {**r.columns, "topk_ids": t["topk_ids"]}) for r, t in zip(rows, top, strict=True)]
    for t, columns in zip(top, said(annotator(), asked, "topk_logprobs"), strict=True):
        assert np.allclose(columns["topk_logprobs"], t["topk_logprobs"], atol=1e-5)


def test_the_most_probable_tokens_are_those_of_the_whole_distribution() -> None:
    """One computation gives both: not a bit differs."""
    for columns in said(annotator(), rows_of(3, 1, 4), "topk", "full_logprobs", top_k=5):
        picked = np.take_along_axis(columns["full_logprobs"], columns["topk_ids"].astype(np.int64), -1)
        assert np.array_equal(columns["topk_logprobs"], picked)


@pytest.mark.parametrize("elements", [1, 3 * VOCABULARY])
def test_the_most_probable_tokens_are_found_chunk_by_chunk(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(3, 1, 4, 6)
    whole = said(annotator(), rows, "topk", top_k=3)
    module = __import__("relax_core.torch.annotate", fromlist=["x"])
    monkeypatch.setitem(cast(Any, module)._TOP_CHUNK, "cpu", elements)
    for a, b in zip(whole, said(annotator(), rows, "topk", top_k=3), strict=True):
        assert np.array_equal(a["topk_ids"], b["topk_ids"])
        assert np.allclose(a["topk_logprobs"], b["topk_logprobs"], atol=1e-6)


def test_each_row_gets_its_own_lines_however_rows_are_cut() -> None:
    rows = rows_of(3, 1, 4, 6, 2, 5)
    outputs = ("topk", "full_logprobs", "logprobs")
    whole = said(annotator(), rows, *outputs, top_k=2)
    small = annotator(budget=8)
    assert len(list(small.pieces.micro_batches(rows))) >= 4
    for a, b in zip(whole, said(small, rows, *outputs, top_k=2), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert np.allclose(a[name], b[name], atol=1e-5), name


def test_rows_without_sampled_tokens_get_zeros_and_no_lines() -> None:
    nothing = row("g0/9", [5, 6], [7, 8], mask=[0, 0], topk_ids=np.zeros((0, 3), np.int32))
    sampled = row("g0/0", [5, 6], [7], topk_ids=np.array([[5, 6, 7]], np.int32))
    for rows in ([nothing], [sampled, nothing]):
        columns = said(annotator(), rows, "logprobs", "entropy", "full_logprobs", "topk_logprobs")[-1]
        assert columns["logprobs"].tolist() == columns["entropy"].tolist() == [0, 0, 0, 0]
        assert (columns["full_logprobs"].shape, columns["topk_logprobs"].shape) == ((0, VOCABULARY), (0, 3))
        top = said(annotator(), rows, "topk", top_k=2)[-1]
        assert (top["topk_ids"].shape, top["topk_ids"].dtype) == ((0, 2), np.int32)
        assert (top["topk_logprobs"].shape, top["topk_logprobs"].dtype) == ((0, 2), np.float32)


def test_nothing_of_it_has_a_gradient() -> None:
    by = annotator()
    by.compute.model.requires_grad_(True)
    said(by, rows_of(3), "topk", "full_logprobs", "logprobs", top_k=2)
    assert all(p.grad is None for p in by.compute.model.parameters())


@pytest.mark.parametrize(
    ("outputs", "top_k", "message"),
    [
        (("values",), None, r"forward: asks for the output 'values'; known are entropy, .*topk"),
        (("topk",), None, r"'topk' needs a top_k from 1 to 32, .*; found None"),
        (("topk",), 0, r"found 0"),
        (("topk",), 33, r"found 33"),
        (("topk", "topk_logprobs"), 2, r"make the same column"),
    ],
)
def test_what_cannot_be_computed_is_refused(outputs: tuple[str, ...], top_k: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        said(annotator(), rows_of(2), *outputs, top_k=top_k)


def test_ids_that_are_missing_are_an_error_of_their_row() -> None:
    with pytest.raises(DataError, match=r"row g0/0: lacks the column 'topk_ids'"):
        said(annotator(), rows_of(2), "topk_logprobs")
