"""The decoder against the full forward without cache, and rows that come and go."""

import random

import numpy as np
import pytest

from relax_core.interfaces import POOLS, Completion
from relax_core.testing.decoding import (
    CountingAdapter,
    assert_full,
    counting,
    decoder,
    endless,
    finish,
    mixed_requests,
    run,
)
from relax_core.testing.engines import changed_weights, request
from relax_core.testing.tiny import TinyConfig, tiny_adapter
from relax_core.torch.plain import full_logprobs
from relax_core.types import Encoded, MediaRef, Stop, Version

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
