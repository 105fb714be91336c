"""The decoder against the full forward without cache, and rows that come and go."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relax_core.errors import DataError, EngineError, WeightsError
from relax_core.interfaces import Completion, Request, Segment
from relax_core.testing.engines import changed_weights, full_logprobs, request
from relax_core.testing.tiny import TinyAdapter, TinyConfig, tiny_adapter
from relax_core.torch.decoder import POOLS, Decoder
from relax_core.torch.kv import attention_windows
from relax_core.types import Encoded, MediaRef, Stop, Version


class CountingAdapter(TinyAdapter):
    """Notes the prompts of each prefill, and how many rows each forward had."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[list[tuple[int, ...]]] = []
        self.forwards: list[tuple[int, int]] = []

    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        self.read.append([tuple(s.ids) for s in segments])
        return super().forward_inputs(segments, width)

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        self.forwards.append((len(inputs["input_ids"]), inputs["input_ids"].shape[1]))
        return super().backbone(model, **inputs)


def counting(**settings: Any) -> CountingAdapter:
    return CountingAdapter(TinyConfig(**settings), tiny_adapter().media)


def decoder(adapter: TinyAdapter | None = None, **limits: Any) -> Decoder:
    torch.set_num_threads(1)
    adapter = adapter or tiny_adapter()
    return Decoder(adapter, adapter.load("cpu", torch.float32), seed=3, **limits)


def endless(adapter: TinyAdapter) -> TinyAdapter:
    """Replies end by their limit only."""
    adapter.banned_token_ids = (*adapter.banned_token_ids, 1)
    return adapter


def finish(d: Decoder) -> dict[int, Completion]:
    """Step until nothing is left; results by ticket. Fails on errors."""
    done: dict[int, Completion] = {}
    while d.busy("train"):
        for ticket, result in d.step("train"):
            assert isinstance(result, Completion), result
            done[ticket] = result
    return done


def run(d: Decoder, requests: Iterable[Request]) -> list[Completion]:
    tickets = [d.submit(r) for r in requests]
    done = finish(d)
    return [done[t] for t in tickets]


def mixed_requests(count: int, seed: int = 0, temperatures: Sequence[float] = (1.0,)) -> list[Request]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 32) for _ in range(rng.randint(1, 20))] for _ in range(count // 3)]
    return [
        request(
            f"r{i}",
            rng.choice(prompts),
            rng.randint(1, 24),
            temperature=rng.choice(temperatures),
            order=(i,),
        )
        for i in range(count)
    ]


def assert_full(d: Decoder, requests: Sequence[Request], results: Sequence[Completion]) -> None:
    for r, c in zip(requests, results, strict=True):
        expected = full_logprobs(d.adapter, d.model, r.prompt, c.ids, r.sampling.temperature)
        assert c.logprobs == pytest.approx(expected, abs=1e-5), r.id


# --- log-probs and independence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 5}, {"max_prefill_tokens": 24}, {"max_cache_tokens": 200}])
def test_log_probs_equal_the_full_forward_for_rows_of_mixed_lengths(window: int | None, limits: dict[str, int]) -> None:
    d = decoder(tiny_adapter(sliding_window=window), **limits)
    requests = mixed_requests(24, temperatures=(1.0, 0.7, 1.6, 0.0))
    results = run(d, requests)
    assert_full(d, requests, results)
    assert {c.stop for c in results} == {Stop.EOS, Stop.LENGTH}
    for r, c in zip(requests, results, strict=True):
        assert len(c.ids) == len(c.logprobs) == len(c.versions) <= r.sampling.max_new_tokens
        assert (c.stop is Stop.EOS) == (c.ids[-1] == 1)
        assert c.stop is Stop.EOS or len(c.ids) == r.sampling.max_new_tokens


def test_long_rows_let_the_cache_grow_and_windows_may_hide_whole_blocks() -> None:
    adapter = endless(tiny_adapter(max_positions=1024, sliding_window=9, layers=2))
    d = decoder(adapter)
    requests = [request("long", [3 + i % 29 for i in range(620)], 6), request("new", [5, 6], 300)]
    results = run(d, requests)
    assert [len(c.ids) for c in results] == [6, 300]
    assert_full(d, requests, results)


def test_a_row_draws_the_same_tokens_alone_and_among_rows_that_come_and_go() -> None:
    requests = mixed_requests(30, seed=1)
    alone = [run(decoder(), [r])[0] for r in requests]
    rng = random.Random(5)
    d, waiting, done = decoder(max_rows=7), list(enumerate(requests)), {}
    index: dict[int, int] = {}
    while waiting or d.busy("train"):
        for _ in range(rng.randint(0, 3)):
            if waiting:
                i, r = waiting.pop(rng.randrange(len(waiting)))
                index[d.submit(r)] = i
        for ticket, result in d.step("train"):
            assert isinstance(result, Completion)
            done[index[ticket]] = result
    for i, c in enumerate(alone):
        assert done[i].ids == c.ids
        assert done[i].logprobs == pytest.approx(c.logprobs, abs=1e-5)


def test_greedy_takes_the_most_probable_token() -> None:
    d = decoder()
    r = request("g", [7, 8, 9], 6, temperature=0.0)
    (c,) = run(d, [r])
    for i, token in enumerate(c.ids):
        best = max(
            (full_logprobs(d.adapter, d.model, Encoded([*r.prompt.ids, *c.ids[:i]]), [t])[0], t)
            for t in range(d.adapter.vocab_size)
        )
        assert token == best[1]


def test_banned_tokens_are_never_sampled_however_probable() -> None:
    adapter = tiny_adapter()
    free = run(decoder(adapter), [request(f"f{i}", [4, 5], 12) for i in range(40)])
    drawn = {t for c in free for t in c.ids}
    banned = sorted(drawn)[len(drawn) // 2 :]
    adapter.banned_token_ids = (*adapter.banned_token_ids, *banned)
    d = decoder(adapter)
    requests = [request(f"f{i}", [4, 5], 12) for i in range(40)]
    results = run(d, requests)
    assert not {t for c in results for t in c.ids} & {*banned, 0, 2}
    assert_full(d, requests, results)


def test_three_axis_positions_go_on_from_their_maximum() -> None:
    d = decoder(endless(tiny_adapter()))
    positions = np.array([[0, 1, 1, 1, 2, 3]] * 3, np.int32)  # an image of three tokens takes one position
    requests = [
        request("axes", Encoded([3, 4, 5, 6, 7, 8], (), positions), 9),
        request("plain", [3, 4, 5, 6, 7, 8], 9),
    ]
    results = run(d, requests)
    assert_full(d, requests, results)
    assert results[0].logprobs != pytest.approx(results[1].logprobs, abs=1e-3)


def test_evaluation_rows_leave_the_bits_of_training_rows_alone() -> None:
    requests = mixed_requests(9, seed=2)
    quiet = run(decoder(), requests)
    d = decoder()
    tickets = [d.submit(r) for r in requests]
    done: dict[int, Completion] = {}
    for i in range(60):
        d.submit(request(f"e{i}", [4 + i % 5, 9], 5, pool="eval", top_p=0.9, top_k=8))
        for pool in POOLS:
            done |= {t: c for t, c in d.step(pool) if isinstance(c, Completion)}
    assert [done[t] for t in tickets] == quiet


# --- prompts --------------------------------------------------------------------------------------------------------


def test_each_unique_prompt_is_read_once_for_all_its_requests() -> None:
    adapter = counting()
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10], [3, 4]]
    requests = [request(f"{m}/{i}", p, 4, order=(i, m)) for m in range(8) for i, p in enumerate(prompts)]
    d = decoder(adapter)
    results = run(d, requests)
    assert sorted(p for read in adapter.read for p in read) == sorted(map(tuple, prompts))
    assert len(adapter.read) == 1
    assert d.prefilled == 4
    assert_full(d, requests, results)


def test_a_group_cut_by_max_rows_takes_its_prompt_from_a_running_row_until_weights_change() -> None:
    adapter = counting()
    endless(adapter)
    d = decoder(adapter, max_rows=3)
    requests = [request(f"{m}", [3, 4, 5, 6], 3 + 2 * m, order=(m,)) for m in range(8)]
    results = run(d, requests)
    assert d.prefilled == 1
    assert_full(d, requests, results)
    d.submit(request("old", [3, 4, 5, 6], 20))
    d.step("train")
    d.swap(Version(0, 1), changed_weights(d.model, 1))
    late = request("late", [3, 4, 5, 6], 5)
    ticket = d.submit(late)
    assert_full(d, [late], [finish(d)[ticket]])
    assert d.prefilled == 3


def test_prompts_differ_by_media_and_positions_too() -> None:
    media = tiny_adapter(images=True).media
    adapter = CountingAdapter(TinyConfig(images=True), media)
    for key, colour in (("red", (1, 0, 0)), ("blue", (0, 0, 1))):
        media.put(key, {"colour": np.array(colour, np.float32)})
    image = [adapter.ids["<image>"], 6]
    prompts = {key: Encoded(image, (MediaRef("image", key, 0, 1),)) for key in ("red", "blue")}
    requests = [request(f"{key}{i}", prompt, 6) for key, prompt in prompts.items() for i in (0, 1)]
    d = decoder(adapter)
    results = run(d, requests)
    assert d.prefilled == 2
    assert_full(d, requests, results)


def test_max_prefill_tokens_bounds_padded_prompts_and_lets_a_long_one_go_alone() -> None:
    adapter = counting()
    d = decoder(adapter, max_prefill_tokens=16)
    run(d, [request(f"{n}", [3] * n, 1, order=(n,)) for n in (1, 2, 3, 4, 5, 6, 30)])
    sizes = [(len(read), max(map(len, read))) for read in adapter.read]
    assert sizes == [(4, 4), (2, 6), (1, 30)]


# --- versions, aborts, order ----------------------------------------------------------------------------------------


def test_versions_are_those_of_the_weights_that_drew_each_token() -> None:
    d = decoder(endless(tiny_adapter()))
    before = run(d, [request("a", [3, 4], 10)])[0]
    ticket = d.submit(request("a", [3, 4], 10))
    d.step("train")  # the prompt's token and one more
    d.step("train")
    d.swap(Version(2, 5), changed_weights(d.model, 0, 0.3))
    after = finish(d)[ticket]
    assert after.versions == [Version(0, 0)] * 3 + [Version(2, 5)] * 7
    assert after.ids[:3] == before.ids[:3]
    assert after.logprobs[:3] == before.logprobs[:3]
    assert after.logprobs[3:] != before.logprobs[3:]


@pytest.mark.parametrize("steps", [1, 4])
def test_an_aborted_and_continued_turn_draws_what_an_unbroken_one_does(steps: int) -> None:
    requests = mixed_requests(12, seed=4)
    unbroken = run(decoder(), requests)
    d = decoder(max_rows=8)
    tickets = {d.submit(r): i for i, r in enumerate(requests)}
    parts: dict[int, Completion] = {}
    for _ in range(steps):
        parts |= {tickets[t]: c for t, c in d.step("train") if isinstance(c, Completion)}
    aborted = {tickets[t]: c for t, c in d.abort() if isinstance(c, Completion)}
    assert len(aborted) == 8 - len(parts) if steps == 1 else aborted
    assert d.running("train") == 0
    assert all(c.stop is Stop.ABORT for c in aborted.values())
    for i, c in aborted.items():
        r = requests[i]
        prompt = Encoded([*r.prompt.ids, *c.ids])
        tickets[d.submit(replace(r, prompt=prompt, drawn=len(c.ids)))] = i
    rest = {tickets[t]: c for t, c in finish(d).items()}
    for i, whole in enumerate(unbroken):
        first = aborted.get(i) or Completion([], [], [], Stop.ABORT)
        last = rest.get(i) or parts[i]
        assert first.ids + last.ids == whole.ids
        assert first.logprobs + last.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        assert last.stop is whole.stop


def test_requests_enter_in_their_order_and_then_as_they_came() -> None:
    adapter = counting()
    d = decoder(endless(adapter), max_rows=2)
    for name, order in (("c", (2,)), ("a", (0, 1)), ("d", (2,)), ("b", (1, 0))):
        d.submit(request(name, [3 + "abcd".index(name)], 2, order=order))
    finish(d)
    assert [sorted(read) for read in adapter.read] == [[(3,), (4,)], [(5,), (6,)]]


def test_a_cancelled_request_leaves_without_a_trace() -> None:
    requests = mixed_requests(9, seed=6)
    expected = run(decoder(), requests)
    d = decoder(max_rows=12)
    extra = [d.submit(request(f"x{i}", [3], 24)) for i in range(6)]
    tickets = [d.submit(r) for r in requests]
    done: dict[int, Completion] = {}
    for ticket in extra:
        d.cancel(ticket)
        done |= {t: c for t, c in d.step("train") if isinstance(c, Completion)}
    done |= finish(d)
    assert not set(extra) & set(done) or all(done[t].stop is Stop.EOS for t in set(extra) & set(done))
    for ticket, c in zip(tickets, expected, strict=True):
        assert done[ticket].ids == c.ids
        assert done[ticket].logprobs == pytest.approx(c.logprobs, abs=1e-5)


# --- limits and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request("empty", [], 4), "prompt is empty"),
        (request("long", [3] * 60, 5), "exceed the 64 of the model's positions"),
        (request("wide", [3] * 30, 11), "exceed the 40 of the max_cache_tokens"),
        (request("p", [3], 4, top_p=0.5), "are for evaluations"),
        (request("k", [3], 4, top_k=5), "are for evaluations"),
        (request("cold", [3], 4, temperature=-1.0), "temperature >= 0"),
        (replace(request("drawn", [3], 4), drawn=4), "max_new_tokens is 4"),
    ],
)
def test_what_can_never_be_served_is_refused_and_disturbs_nobody(bad: Request, reason: str) -> None:
    limit = 40 if bad.id == "wide" else None
    d = decoder(tiny_adapter(max_positions=64), max_cache_tokens=limit)
    good = request("good", [3, 4], 5)
    ticket = d.submit(good)
    with pytest.raises(EngineError, match=reason):
        d.submit(bad)
    assert_full(d, [good], [finish(d)[ticket]])


def test_a_request_may_fill_the_models_positions_to_the_last() -> None:
    d = decoder(endless(tiny_adapter(max_positions=64)))
    (c,) = run(d, [request("full", [3] * 60, 4)])
    assert len(c.ids) == 4


def test_max_cache_tokens_bounds_rows_times_the_longest() -> None:
    adapter = counting()
    d = decoder(endless(adapter), max_cache_tokens=60)
    requests = [request(f"{i}", [3 + i], 9, order=(i,)) for i in range(10)]
    assert len(run(d, requests)) == 10
    assert max(rows for rows, _ in adapter.forwards) == 6  # 6 rows x (1 + 9) tokens


def test_a_prompt_that_cannot_be_read_fails_its_own_requests_only() -> None:
    adapter = tiny_adapter(images=True)
    d = decoder(adapter)
    lost = Encoded([adapter.ids["<image>"]], (MediaRef("image", "lost", 0, 1),))
    good = request("good", [3, 4], 6)
    tickets = [d.submit(request("bad", lost)), d.submit(good), d.submit(request("bad2", lost))]
    results: dict[int, Completion | EngineError] = {}
    while d.busy("train"):
        results |= dict(d.step("train"))
    for ticket in (tickets[0], tickets[2]):
        error = results[ticket]
        assert isinstance(error, EngineError)
        assert isinstance(error.__cause__, DataError)
        assert "request 'bad" in str(error)
        assert "lost" in str(error)
    good_result = results[tickets[1]]
    assert isinstance(good_result, Completion)
    assert_full(d, [good], [good_result])


def test_weights_that_give_nan_fail_rows_and_leave_nothing_behind() -> None:
    d = decoder(endless(tiny_adapter()))
    requests = [request(f"{i}", [3 + i, 4], 30) for i in range(4)]
    expected = run(d, requests)
    good = changed_weights(d.model, 0, 0.0)
    bad = [(name, w * torch.nan if "v_proj" in name else w) for name, w in good]
    survivor = d.submit(request("0", [3, 4], 30))
    d.submit(request("gone", [9, 9], 30))
    d.step("train")
    d.swap(Version(0, 1), bad)
    results = dict(d.step("train"))
    assert survivor in results
    assert all(isinstance(r, EngineError) and "not finite" in str(r) for r in results.values())
    d.swap(Version(0, 2), good)
    again = run(d, requests)
    assert [c.ids for c in again] == [c.ids for c in expected]
    assert [c.logprobs for c in again] == [c.logprobs for c in expected]


def test_a_failing_model_fails_the_running_rows_and_the_next_ones_are_served() -> None:
    class Failing(TinyAdapter):
        fails = False

        def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise RuntimeError("out of memory")
            return super().head(model, hidden)

    adapter = Failing(TinyConfig(), tiny_adapter().media)
    d = decoder(adapter)
    first = d.submit(request("a", [3, 4], 30))
    d.step("train")
    adapter.fails = True
    second = d.submit(request("b", [5], 30))
    results = dict(d.step("train"))
    assert set(results) == {first, second}
    assert all(isinstance(r, EngineError) and "out of memory" in str(r) for r in results.values())
    assert d.failures == 1
    adapter.fails = False
    good = request("c", [6, 7], 5)
    assert_full(d, [good], run(d, [good]))
    assert d.failures == 0


# --- weights --------------------------------------------------------------------------------------------------------


def test_swapped_weights_are_copies_that_give_the_new_models_log_probs() -> None:
    d = decoder()
    weights = changed_weights(d.model, 0)
    d.swap(Version(0, 1), weights)
    for _, w in weights:
        w.zero_()
    r = request("a", [3, 4, 5], 8)
    (c,) = run(d, [r])
    assert set(c.versions) == {Version(0, 1)}
    other = tiny_adapter().load("cpu", torch.float32)
    with torch.no_grad():
        for (_, p), (_, w) in zip(other.named_parameters(), changed_weights(other, 0), strict=True):
            p.copy_(w)
    assert c.logprobs == pytest.approx(full_logprobs(d.adapter, other, r.prompt, c.ids), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w[:-1], "1 of the engine's parameters are missing, first 'model.norm.weight'"),
        (lambda w: [*w, ("model.normal.weight", w[-1][1])], "no such tensor; did you mean 'model.norm.weight'"),
        (lambda w: [*w[:-1], (w[-1][0], w[-1][1][:-1])], r"shape \(31,\), the engine's model has \(32,\)"),
        (lambda w: [*w, w[-1]], "published twice"),
        (lambda w: [*w, ("lm_head.weight", w[0][1] + 1)], "ties the two"),
    ],
)
def test_weights_that_are_not_the_models_are_refused_and_the_old_ones_stay(change: Any, reason: str) -> None:
    d = decoder()
    (before,) = run(d, [request("a", [3, 4], 8)])
    with pytest.raises(WeightsError, match=reason):
        d.swap(Version(0, 1), change(changed_weights(d.model, 0)))
    assert d.version == Version(0, 0)
    assert run(d, [request("a", [3, 4], 8)]) == [before]


def test_tied_weights_may_come_under_both_names() -> None:
    d = decoder()
    weights = changed_weights(d.model, 0)
    d.swap(Version(0, 1), [*weights, ("lm_head.weight", weights[0][1].clone())])
    assert d.version == Version(0, 1)


def test_layers_that_keep_no_keys_and_values_are_refused() -> None:
    model = tiny_adapter().load("cpu", torch.float32)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match="'linear_attention'"):
        attention_windows(model)
