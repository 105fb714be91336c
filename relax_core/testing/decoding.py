"""What tests of the embedded decoder share: decoders of tiny models, runs to the end, and the comparison to make."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from relax_core.interfaces import Completion, Request, Segment
from relax_core.testing.engines import request
from relax_core.testing.tiny import TinyAdapter, TinyConfig, tiny_adapter

if TYPE_CHECKING:
    import torch

    from relax_core.torch.decoder import Decoder


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
    import torch

    from relax_core.torch.decoder import Decoder

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


def assert_full(decoder: Decoder, requests: Sequence[Request], results: Sequence[Completion]) -> None:
    """The reported log-probs are those of one whole forward a row, to 1e-5."""
    from relax_core.torch.plain import full_logprobs

    for r, c in zip(requests, results, strict=True):
        expected = full_logprobs(decoder.adapter, decoder.model, r.prompt, c.ids, r.sampling.temperature)
        worst = max(abs(a - b) for a, b in zip(c.logprobs, expected, strict=True))
        assert worst <= 1e-5, f"request {r.id}: log-probs are {worst} off"
