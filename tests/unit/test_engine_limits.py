"""The decoder's versions, aborts, order, limits and failures, and the weights that it takes over."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from relax_core.errors import DataError, EngineError, WeightsError
from relax_core.interfaces import Completion, Request
from relax_core.testing.decoding import (
    assert_full,
    counting,
    decoder,
    endless,
    finish,
    mixed_requests,
    run,
)
from relax_core.testing.engines import changed_weights, request
from relax_core.testing.tiny import TinyAdapter, TinyConfig, tiny_adapter
from relax_core.torch.kv import attention_windows
from relax_core.torch.plain import full_logprobs
from relax_core.transports import CopyTransport
from relax_core.types import Encoded, MediaRef, Stop, Version
from relax_core.weight_receiver import Receiver

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


def test_a_row_that_breaks_leaves_nothing_in_the_slot_that_it_had() -> None:
    d = decoder(endless(tiny_adapter()))
    requests = [request("a", [3, 4], 40), request("b", [5], 12)]
    expected = run(d, requests)
    unknown = 2  # banned, so the other rows' logits stay finite
    weights = changed_weights(d.model, 0, 0.0)
    dict(weights)["model.embed_tokens.weight"][unknown] = torch.nan
    d.swap(Version(0, 1), weights)
    first = d.submit(requests[0])
    assert d.step("train") == []
    broken = d.submit(request("broken", [3, *[unknown] * 20], 5))
    results = dict(d.step("train"))
    assert set(results) == {broken}
    assert "log-probs are not finite" in str(results[broken])
    second = d.submit(requests[1])  # into the slot of the broken one
    done = finish(d)
    for ticket, c in ((first, expected[0]), (second, expected[1])):
        assert done[ticket].ids == c.ids
        assert done[ticket].logprobs == pytest.approx(c.logprobs, abs=1e-5)
    assert d.cache_bytes == 0


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


def test_received_weights_are_copies_that_give_the_new_models_log_probs() -> None:
    """Neither the trainer's own tensors nor the publisher's buffers are what the decoder draws from."""
    d = decoder()
    weights, transport = changed_weights(d.model, 0), CopyTransport(CopyTransport.Config())
    d.swap(Version(0, 1), Receiver().receive(transport.publish(Version(0, 1), weights)))
    for _, w in weights:
        w.zero_()
    for number in range(2, 5):
        transport.publish(Version(0, number), weights)
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
        (lambda w: w[:-1], "1 of this model's parameters are missing, first 'model.norm.weight'"),
        (lambda w: [*w, ("model.normal.weight", w[-1][1])], "no such tensor; did you mean 'model.norm.weight'"),
        (lambda w: [*w[:-1], (w[-1][0], w[-1][1][:-1])], r"shape \(31,\), this model has \(32,\)"),
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
