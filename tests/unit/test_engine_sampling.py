"""Drawing tokens: inverse CDF of a keyed uniform, bans, temperature, greedy rows, top-k and top-p."""

import math

import numpy as np
import pytest
import torch

from relax_core import keys
from relax_core.testing.engines import request
from relax_core.torch.queue import Prompt, Waiting
from relax_core.torch.rows import Rows
from relax_core.torch.sampling import Rules, chunks, draw

NONE = torch.empty(0, dtype=torch.long)
PROBS = [0.1, 0.2, 0.3, 0.4]


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().float()


def rules(temperature: list[float], top_k: list[int] | None = None, top_p: list[float] | None = None) -> Rules:
    n = len(temperature)
    return Rules.of(
        np.array(temperature, np.float32),
        np.array(top_k or [0] * n, np.int64),
        np.array(top_p or [1.0] * n),
        torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 0), (0.05, 0), (0.15, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (0.99, 3), (1 - 2.0**-53, 3)],
)
def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_number(u: float, token: int) -> None:
    ids, logprobs = draw(logits(PROBS), torch.tensor([u], dtype=torch.float64), Rules(), NONE)
    assert ids.tolist() == [token]
    assert logprobs[0].item() == pytest.approx(math.log(PROBS[token]), abs=1e-6)


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.39, 1), (0.41, 2), (1 - 2.0**-53, 2)])
def test_banned_tokens_at_either_end_are_never_drawn_and_have_no_mass(u: float, token: int) -> None:
    banned = torch.tensor([0, 3])
    ids, logprobs = draw(logits(PROBS), torch.tensor([u], dtype=torch.float64), Rules(), banned)
    assert ids.tolist() == [token]
    assert logprobs[0].item() == pytest.approx(math.log(PROBS[token] / 0.5), abs=1e-6)


def test_temperature_flattens_and_greedy_takes_the_argmax_at_temperature_one() -> None:
    u = torch.full((3,), 0.5, dtype=torch.float64)
    ids, logprobs = draw(logits(PROBS, PROBS, PROBS), u, rules([2.0, 0.0, 1.0]), NONE)
    roots = [math.sqrt(p) for p in PROBS]
    assert ids.tolist() == [2, 3, 2]
    assert logprobs.tolist() == pytest.approx([math.log(roots[2] / sum(roots)), math.log(0.4), math.log(0.3)], abs=1e-6)


def test_an_all_greedy_batch_equals_greedy_rows_of_a_mixed_one() -> None:
    u = torch.zeros(2, dtype=torch.float64)
    alone = draw(logits(PROBS, PROBS[::-1]), u, rules([0.0, 0.0]), NONE)
    assert alone[0].tolist() == [3, 0]
    assert alone[1].tolist() == pytest.approx([math.log(0.4)] * 2, abs=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(2, 1.0, {2, 3}), (0, 0.39, {3}), (0, 0.41, {2, 3}), (0, 0.71, {1, 2, 3}), (3, 0.5, {2, 3}), (1, 0.01, {3})],
)
def test_top_k_then_top_p_bound_what_is_drawn_but_log_probs_are_of_all(
    top_k: int, top_p: float, kept: set[int]
) -> None:
    n = 200
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    rows = logits(*[PROBS] * n)
    ids, logprobs = draw(rows, u, rules([1.0] * n, [top_k] * n, [top_p] * n), NONE)
    assert set(ids.tolist()) == kept
    for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(math.log(PROBS[token]), abs=1e-6)
    share = ids.bincount(minlength=4)[3].item() / n
    assert share == pytest.approx(0.4 / sum(PROBS[t] for t in kept), abs=0.01)


def test_rows_with_and_without_filters_share_a_batch() -> None:
    u = torch.tensor([0.05, 0.05], dtype=torch.float64)
    ids, _ = draw(logits(PROBS, PROBS), u, rules([1.0, 1.0], [0, 1], [1.0, 1.0]), NONE)
    assert ids.tolist() == [0, 3]


def test_a_row_is_drawn_alike_alone_in_a_batch_and_in_chunks() -> None:
    torch.manual_seed(0)
    rows, u = torch.randn(64, 100) * 3, torch.rand(64, dtype=torch.float64)
    ids, logprobs = draw(rows.clone(), u, Rules(), torch.tensor([5]))
    for part in (slice(0, 1), slice(7, 9), slice(30, 64)):
        some, their = draw(rows[part].clone(), u[part], Rules(), torch.tensor([5]))
        assert some.equal(ids[part])
        assert their.equal(logprobs[part])


def test_frequencies_follow_the_probabilities() -> None:
    n = 20_000
    start = np.full(n, keys.stream(0, "frequency"), np.uint64)
    u = torch.from_numpy(keys.uniforms(start, np.arange(n, dtype=np.uint64)))
    ids, _ = draw(logits(PROBS).expand(n, 4).clone(), u, Rules(), NONE)
    for token, p in enumerate(PROBS):
        assert (ids == token).double().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))


def test_chunks_cover_all_rows_and_bound_memory() -> None:
    parts = chunks(256, 150_000, torch.device("cpu"))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(256))
    assert max(part.stop - part.start for part in parts) * 150_000 <= 1 << 22
    assert len(chunks(256, 64, torch.device("cpu"))) == 1


def test_numbers_are_those_of_the_request_key_at_the_turn_position() -> None:
    from dataclasses import replace

    rows = Rows(seed=7)
    continued = replace(request("a", [3, 4], 9), drawn=5)
    rows.add([Waiting(0, continued, Prompt.of(continued))])
    start = keys.draw_stream(7, continued.key)
    assert rows.uniforms(0).tolist() == [keys.uniform(start, 5)]
    rows.append(0, np.array([3]), np.array([0.0], np.float32), 0)
    assert rows.uniforms(0).tolist() == [keys.uniform(start, 6)]
