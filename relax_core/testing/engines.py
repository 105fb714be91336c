"""What tests of engines share: requests, weights to load, and a picklable builder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_core.interfaces import Completion, Pool, Request
from relax_core.testing.tiny import TinyAdapter, TinyConfig, tiny_adapter
from relax_core.types import DrawKey, Encoded, Sampling, Version

if TYPE_CHECKING:
    import torch

    from relax_core.interfaces import Engine
    from relax_core.media import MediaStore
    from relax_core.torch.decoder import Decoder
    from relax_core.torch.engine import TorchEngine
    from relax_core.weights import WeightUpdate


def request(
    name: str,
    prompt: Sequence[int] | Encoded,
    new: int = 8,
    *,
    temperature: float = 1.0,
    order: tuple[int, ...] = (),
    pool: Pool = "train",
    **sampling: Any,
) -> Request:
    """A request that draws under the key of task ``name``."""
    encoded = prompt if isinstance(prompt, Encoded) else Encoded(list(prompt))
    return Request(name, DrawKey(name, 0, 0, 0), encoded, Sampling(temperature, new, **sampling), order, pool)


def changed_weights(model: torch.nn.Module, seed: int, scale: float = 0.05) -> list[tuple[str, torch.Tensor]]:
    """The model's parameters with noise, under their names, as a trainer would publish them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [
        (name, p.detach() + scale * torch.randn(p.shape, generator=generator)) for name, p in model.named_parameters()
    ]


class Watched(TinyAdapter):
    """Notes how many rows each forward had; fails when told to; never ends a reply before its limit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sizes: list[int] = []
        self.fails = False
        self.banned_token_ids = (*self.banned_token_ids, 1)

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        self.sizes.append(len(inputs["input_ids"]))
        if self.fails:
            raise RuntimeError("broken kernel")
        return super().backbone(model, **inputs)


def engine(deterministic: bool = False, **settings: Any) -> TorchEngine:
    from relax_core.setup import EngineSetup
    from relax_core.torch.config import EngineConfig
    from relax_core.torch.engine import TorchEngine

    adapter = Watched(TinyConfig(), tiny_adapter().media)
    return TorchEngine(EngineConfig(device="cpu", **settings), EngineSetup(adapter, 3, deterministic))


def serving(test: Callable[[TorchEngine], Awaitable[None]], **settings: Any) -> None:
    """Run a test with a started engine, and stop it."""

    async def main() -> None:
        e = engine(**settings)
        await e.start()
        try:
            await test(e)
        finally:
            await e.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def decoder_of(e: TorchEngine) -> Decoder:
    assert e.decoder is not None
    return e.decoder


def watched(e: TorchEngine) -> Watched:
    assert isinstance(e.setup.adapter, Watched)
    return e.setup.adapter


def update(e: TorchEngine, seed: int = 0, number: int = 1) -> WeightUpdate:
    """Changed weights of the engine's model, published as version (0, ``number``)."""
    from relax_core.transports import CopyTransport

    weights = changed_weights(decoder_of(e).model, seed, 0.3)
    return CopyTransport(CopyTransport.Config()).publish(Version(0, number), weights)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def pending(e: TorchEngine, requests: Sequence[Request]) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(e.generate(r)) for r in requests]


@dataclass(frozen=True)
class TinyBuilder:
    """Builds a TorchEngine on a TinyAdapter, here or in another process. Settings are fields of their configs."""

    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    deterministic: bool = False

    def __call__(self) -> tuple[Engine, MediaStore]:
        from relax_core.media import MediaStore
        from relax_core.setup import EngineSetup
        from relax_core.torch.config import EngineConfig
        from relax_core.torch.engine import TorchEngine

        media = MediaStore({}, max_bytes=1 << 20)
        adapter = tiny_adapter(media=media, **self.model)
        config = EngineConfig(device="cpu", **self.engine)
        return TorchEngine(config, EngineSetup(adapter, self.seed, self.deterministic)), media
