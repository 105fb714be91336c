"""Engine and trainer on one GPU: seconds and memory of each hand-over, with SGLang and with the embedded engine.

    python -m benchmarks.gpu.handover [--shape qwen3-0.6b] [--rounds 4] [--json FILE]

A round is what a run with ``placement: colocate`` does between two steps. To the engine: publish, the trainer sleeps,
the engine wakes and takes the weights. Then some requests are served. To the trainer: the engine sleeps, the trainer
wakes. Then it takes a step. Memory is the GPU's, of all processes, with what only lies in a cache given back. The first
round is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from benchmarks.gpu import work


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = work.parser(__doc__)
    p.add_argument("--shape", default="qwen3-0.6b")
    p.add_argument("--engines", nargs="+", choices=["sglang", "torch"], default=["sglang", "torch"])
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("--requests", type=int, default=16)
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--new", type=int, default=32)
    return p.parse_args(words)


async def measure(a: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    everything: dict[str, Any] = {}
    for kind in a.engines:
        everything[kind] = found = await rounds(a, kind)
        for name in dict.fromkeys(name for one in found for name in one):
            rows.append({"engine": kind, "what": name, "median": work.median([one[name] for one in found])})
    table = [
        {"what": what} | {row["engine"]: row["median"] for row in rows if row["what"] == what}
        for what in dict.fromkeys(row["what"] for row in rows)
    ]
    work.report(a, f"{a.shape}: hand-over on one device (s: seconds, GiB: taken)", table, everything)


async def rounds(a: argparse.Namespace, kind: str) -> list[dict[str, float]]:
    from relax_core.actor_critic import build_trainer
    from relax_core.run import build_algorithm
    from relax_core.transports import CopyTransport
    from relax_core.types import Version

    memory: dict[str, Any] = {"memory_saver": True} if kind == "sglang" and a.device != "cpu" else {}
    run, adapter, engine = work.opened(
        work.run_file(a, a.shape, work.engine(a, kind=kind, **memory), name=f"handover-{kind}")
    )
    algorithm = build_algorithm(run)
    device = "cpu" if a.device == "cpu" else "cuda:0"
    transport = CopyTransport(CopyTransport.Config())
    found: list[dict[str, float]] = []
    await engine.start()
    try:
        await engine.sleep()
        trainer: Any = build_trainer(run, adapter, algorithm.outputs, True)
        for number in range(1 + a.rounds):
            one: dict[str, float] = {}
            await _timed(one, "step s", trainer.step(number, _cut(adapter, a.prompt), algorithm), device)
            _memory(one, "trainer's turn GiB", device)
            began = time.perf_counter()
            update = transport.publish(Version(0, number + 1), trainer.weights(), trainer.frozen_names())
            work.settle(device)
            one["publish s"] = time.perf_counter() - began
            await _timed(one, "trainer sleeps s", trainer.sleep(), device)
            _memory(one, "both asleep GiB", device)
            await _timed(one, "engine wakes s", engine.wake(), device)
            await _timed(one, "engine takes weights s", engine.load_weights(update), device)
            _memory(one, "engine's turn GiB", device)
            await _timed(one, "requests s", _requests(engine, a), device)
            await _timed(one, "engine sleeps s", engine.sleep(), device)
            await _timed(one, "trainer wakes s", trainer.wake(), device)
            to_engine = ("publish s", "trainer sleeps s", "engine wakes s", "engine takes weights s")
            one["to the engine s"] = sum(one[name] for name in to_engine)
            one["to the trainer s"] = one["engine sleeps s"] + one["trainer wakes s"]
            found.append(one)
            print(kind, {name: round(value, 4) for name, value in one.items()}, flush=True)  # should it be stopped
    finally:
        await engine.stop()
        transport.close()
    return found[1:]


async def _timed(found: dict[str, float], name: str, call: Awaitable[Any], device: str) -> None:
    began = time.perf_counter()
    await call
    work.settle(device)
    found[name] = time.perf_counter() - began


def _memory(found: dict[str, float], name: str, device: str) -> None:
    if device != "cpu":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
    if (used := work.used_gib(device)) is not None:
        found[name] = used


async def _cut(adapter: Any, length: int) -> AsyncIterator[Any]:
    from relax_core.interfaces import Cut
    from relax_core.testing.training import row

    prompt = adapter.tokenizer.encode("a" * length)
    rows = [row(f"g/{i}", prompt, prompt, advantage=1.0 - i % 2 * 2) for i in range(8)]
    yield Cut(rows, last=True)


async def _requests(engine: Any, a: argparse.Namespace) -> None:
    from relax_core.interfaces import Request
    from relax_core.types import DrawKey, Encoded, Sampling

    prompt = Encoded(list(range(60, 60 + min(a.prompt, 64))))
    sampling = Sampling(max_new_tokens=a.new)
    await asyncio.gather(
        *(engine.generate(Request(str(i), DrawKey(str(i), 0, 0, 0), prompt, sampling, (i,))) for i in range(a.requests))
    )


if __name__ == "__main__":
    work.main(measure, arguments())
