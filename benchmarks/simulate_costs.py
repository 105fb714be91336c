"""What the simulated engine and trainer cost: measured with the embedded ones, and how lengths and latencies fall.

python benchmarks/simulate_costs.py              # measures and prints them as JSON; RECORDED holds such numbers
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MODEL: dict[str, Any] = {"hidden": 64, "layers": 2, "max_positions": 4096}
"""A random Qwen3, on one thread of a CPU."""
BATCHES, NEW = (1, 2, 4, 8, 16, 32, 64), 64
"""Rows that are decoded together, and the tokens of each."""
PROMPTS = (64, 512, 2048)
"""Tokens of prompts, for the cost of reading one."""
TRAINED = (8, 16, 32)
"""Rows of a micro-batch: each 32 + 64 tokens."""

MEDIAN, AT_LIMIT = 0.15, 0.05
"""Response lengths: the median as a part of the limit, and the share that reaches the limit."""
TOOL_MEDIAN_S, TOOL_P99_S = 0.05, 1.0
"""Seconds of a tool's answer."""


@dataclass(frozen=True)
class Costs:
    """Seconds. A decoding step of n rows takes ``step_s + row_s * n``; a micro-batch of t tokens on a rank takes
    ``cut_s + train_s * t``."""

    step_s: float
    row_s: float
    prefill_s: float
    """For each token of a prompt."""
    cut_s: float
    train_s: float
    publish_s: float
    """To copy the trainer's weights."""
    load_s: float
    """For an engine to take them over, during which it does not decode."""


RECORDED = Costs(1.86e-3, 8.2e-6, 1.46e-5, 1.03e-2, 1.41e-5, 1.2e-3, 1.27e-3)
"""What ``measure`` found on one core of an Intel Xeon."""
HOW = {
    "engine": "TorchEngine, tiny Qwen3, float32, one thread: least of 3 timings of so many requests of 64 tokens each, "
    "decoded together; step_s and row_s are the line of least squares through seconds a decoding step",
    "prefill": "requests of one new token; the line through seconds by tokens of the prompt",
    "trainer": "TorchTrainer, GRPO, one update of one micro-batch of 8, 16 and 32 rows of 96 tokens: the line through "
    "seconds by tokens; cut_s holds the optimizer's update too",
    "weights": "CopyTransport, and the engine's load_weights; least of 3",
}


# --- distributions ----------------------------------------------------------------------------------------------------


def response_length(u: float, limit: int) -> int:
    """The length at quantile ``u``: log-normal, its median ``MEDIAN`` of the limit, ``AT_LIMIT`` of them cut there."""
    normal = statistics.NormalDist()
    sigma = math.log(1 / MEDIAN) / normal.inv_cdf(1 - AT_LIMIT)
    z = normal.inv_cdf(min(max(u, 1e-9), 1 - 1e-9))
    return max(1, min(limit, round(MEDIAN * limit * math.exp(sigma * z))))


def tool_seconds(u: float) -> float:
    """A tool's latency at quantile ``u``: log-normal with median ``TOOL_MEDIAN_S`` and 99th percentile."""
    normal = statistics.NormalDist()
    sigma = math.log(TOOL_P99_S / TOOL_MEDIAN_S) / normal.inv_cdf(0.99)
    return TOOL_MEDIAN_S * math.exp(sigma * normal.inv_cdf(min(max(u, 1e-9), 1 - 1e-9)))


# --- measuring --------------------------------------------------------------------------------------------------------


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of least squares, neither below 0."""
    slope, intercept = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return max(0.0, intercept), max(0.0, slope)


def least(call: Callable[[], float], times: int = 3) -> float:
    call()  # warm-up
    return min(call() for _ in range(times))


def measure() -> tuple[Costs, dict[str, Any]]:
    """The costs on this machine, with the timings behind them. Takes about 20 s."""
    import torch

    torch.set_num_threads(1)
    raw: dict[str, Any] = {}
    with asyncio.Runner() as runner:
        step_s, row_s, prefill_s, publish_s, load_s = _engine(runner, raw)
    cut_s, train_s = _trainer(raw)
    return Costs(step_s, row_s, prefill_s, cut_s, train_s, publish_s, load_s), raw


def _engine(runner: asyncio.Runner, raw: dict[str, Any]) -> tuple[float, float, float, float, float]:
    from relax_core.media import MediaStore
    from relax_core.setup import EngineSetup
    from relax_core.testing.engines import Watched, changed_weights, decoder_of, pending, request
    from relax_core.testing.tiny import TinyConfig
    from relax_core.torch.config import EngineConfig
    from relax_core.torch.engine import TorchEngine
    from relax_core.transports import CopyTransport
    from relax_core.types import Version

    adapter = Watched(TinyConfig(**MODEL), MediaStore({}, max_bytes=1 << 20))
    engine = TorchEngine(EngineConfig(device="cpu"), EngineSetup(adapter, 3, False))

    async def sample(rows: int, tokens: int, new: int) -> float:
        requests = [request(f"t{i}", [5 + (i + j) % 8 for j in range(tokens)], new) for i in range(rows)]
        began = time.perf_counter()
        await asyncio.gather(*pending(engine, requests))
        return time.perf_counter() - began

    async def weights(loading: bool) -> float:
        tensors = changed_weights(decoder_of(engine).model, seed=0)
        began = time.perf_counter()
        found = CopyTransport(CopyTransport.Config()).publish(Version(0, 1), tensors)
        made = time.perf_counter()
        await engine.load_weights(found)
        return time.perf_counter() - made if loading else made - began

    runner.run(engine.start())
    try:
        decode = [(n, least(lambda n=n: runner.run(sample(n, 8, NEW))) / NEW) for n in BATCHES]  # type: ignore[misc]
        prefill = [(n, least(lambda n=n: runner.run(sample(1, n, 1)))) for n in PROMPTS]  # type: ignore[misc]
        publish_s, load_s = (least(lambda load=load: runner.run(weights(load))) for load in (False, True))  # type: ignore[misc]
    finally:
        runner.run(engine.stop())
    raw |= {"decode_s_by_rows": decode, "prefill_s_by_tokens": prefill}
    return (*line(decode), line(prefill)[1], publish_s, load_s)


def _trainer(raw: dict[str, Any]) -> tuple[float, float]:
    from relax_algorithms.grpo import Grpo
    from relax_core.testing.tiny import tiny_adapter
    from relax_core.testing.training import row, tiny_trainer, train

    trainer, algorithm = tiny_trainer(tiny_adapter(**MODEL)), Grpo(Grpo.Config())

    def step(count: int) -> float:
        rows = [
            row(f"g/{i}/0", [5 + (i + j) % 8 for j in range(32)], [6 + j % 9 for j in range(NEW)], advantage=1.0)
            for i in range(count)
        ]
        began = time.perf_counter()
        train(trainer, 0, [rows], algorithm)
        return time.perf_counter() - began

    seconds = [(n * (32 + NEW), least(lambda n=n: step(n))) for n in TRAINED]  # type: ignore[misc]
    raw["train_s_by_tokens"] = seconds
    return line(seconds)


def main() -> None:
    costs, raw = measure()
    print(json.dumps({"costs": asdict(costs), "how": HOW, "raw": raw}, indent=1))


if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
