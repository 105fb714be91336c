"""Omni caches: token by token, across new media, and a prompt shared by its group with gradient.

Shape legend: B rows, W width, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3OmniMoeThinkerForConditionalGeneration

from relax_core.interfaces import Segment
from relax_core.testing.forwards import assert_equal_gradients, gradients, logits, segment
from relax_core.types import Encoded, MediaRef
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.testing import mixed_rows, tiny_omni

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def adapter() -> OmniAdapter:
    return tiny_omni()


@pytest.fixture(scope="module")
def rows(adapter: OmniAdapter) -> list[Encoded]:
    return mixed_rows(adapter)


@pytest.fixture
def model(adapter: OmniAdapter) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    return adapter.load("cpu", torch.float32)


def continued(row: Encoded, sampled: Sequence[int]) -> Segment:
    """The row with sampled tokens behind it."""
    assert row.positions is not None
    steps = np.arange(1, len(sampled) + 1, dtype=np.int32) + row.positions.max()
    positions = np.concatenate([row.positions, np.broadcast_to(steps, (3, len(sampled)))], axis=1)
    return Segment([*row.ids, *sampled], row.media, positions)


def tail(whole: Segment, start: int) -> Segment:
    """What comes from ``start`` on, as a segment of its own."""
    assert whole.positions is not None
    media = [MediaRef(r.kind, r.key, r.start - start, r.length) for r in whole.media if r.start >= start]
    return Segment(whole.ids[start:], media, whole.positions[:, start:])


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_greedy_decoding_with_a_cache_equals_full_forwards(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded], name: str
) -> None:
    banned = list(adapter.banned_token_ids)
    for row in rows:
        cache, whole, done = DynamicCache(), segment(row), 0
        for _ in range(4):
            with torch.no_grad():
                step = logits(adapter, model, [tail(whole, done)], **{name: cache}, use_cache=True)[0, -1]
                full = logits(adapter, model, [whole])[0, -1]
            torch.testing.assert_close(step, full, atol=1e-5, rtol=0)
            step[banned] = full[banned] = -1e9
            assert int(step.argmax()) == int(full.argmax())
            done = len(whole.ids)
            whole = continued(Encoded(list(whole.ids), tuple(whole.media), whole.positions), [int(full.argmax())])


def test_a_cache_goes_on_across_new_media(
    adapter: OmniAdapter, model: Qwen3OmniMoeThinkerForConditionalGeneration, rows: list[Encoded]
) -> None:
    """The mixed row, cut between its media: each piece behind the cache of those before it."""
    row = rows[-1]
    whole = segment(row)
    cuts = [0, *(ref.start - 1 for ref in row.media), len(row.ids)]
    cache, got = DynamicCache(), []
    with torch.no_grad():
        for start, end in pairwise(cuts):
            piece = tail(Segment(row.ids[:end], [r for r in row.media if r.start < end], row.positions[:, :end]), start)  # type: ignore[index]
            if piece.ids:
                got.append(logits(adapter, model, [piece], cache=cache, use_cache=True)[0])
        torch.testing.assert_close(torch.cat(got), logits(adapter, model, [whole])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("which", range(5))
def test_shared_prompts_give_the_gradient_of_separate_rows(
    adapter: OmniAdapter,
    model: Qwen3OmniMoeThinkerForConditionalGeneration,
    rows: list[Encoded],
    which: int,
) -> None:
    """A group's prompt runs once, its cache repeated with gradient, and the replies attend to it (4-D mask)."""
    row, replies = rows[which], [[30, 12, 1], [14, 1], [20, 21, 22]]
    group = [continued(row, reply) for reply in replies]
    width, prompt = max(map(len, replies)), len(row.ids)
    generator = torch.Generator().manual_seed(0)
    weights_BWV = torch.randn(len(group), width, adapter.vocab_size, generator=generator)
    real_BW = torch.tensor([[i < len(r) for i in range(width)] for r in replies])

    def backward(predictions_BWV: torch.Tensor) -> dict[str, torch.Tensor]:
        (predictions_BWV * weights_BWV * real_BW[..., None]).sum().backward()  # type: ignore[no-untyped-call]
        return gradients(model)

    apart = logits(adapter, model, group)[:, prompt - 1 : prompt - 1 + width]
    want = backward(apart)
    cache = DynamicCache()
    first = logits(adapter, model, [segment(row)], cache=cache, use_cache=True)[:, -1:]
    cache.batch_repeat_interleave(len(group))
    ends = [tail(s, prompt) for s in group]
    causal = torch.ones(width, prompt + width, dtype=torch.bool).tril(prompt)
    mask = causal & torch.cat([torch.ones(len(group), prompt, dtype=torch.bool), real_BW], 1)[:, None, None]
    rest = logits(adapter, model, ends, cache=cache, use_cache=True, attention_mask=mask)
    shared = torch.cat([first.expand(len(group), -1, -1), rest[:, :-1]], 1)
    torch.testing.assert_close(shared[real_BW], apart[real_BW], atol=1e-5, rtol=0)
    assert_equal_gradients(backward(shared), want)
