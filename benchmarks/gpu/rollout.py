"""Relax's rollout path beside bare requests to the same SGLang server: tokens a second, and our CPU seconds.

    python -m benchmarks.gpu.rollout [--shape qwen3-0.6b] [--requests 256] [--new 512] [--rounds 5] [--json FILE]

``relax``: plays of an environment, each with its chat, through the engine ``sglang``: the run's bans, log-probs,
versions, one HTTP request a turn. ``batch``: the same prompts in one bare request to /generate, with log-probs and no
bans, which is the least that any client does. ``single``: one bare request for each prompt, all at once. They take
turns on one server, after a round of each that is not counted; prompts never come again. The bar: relax is 0.9 of batch
or more.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from benchmarks.gpu import work

if TYPE_CHECKING:
    from relax_plugin_sglang.engine import SglangEngine

BAR = 0.9


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = work.parser(__doc__)
    p.add_argument("--shape", default="qwen3-0.6b")
    p.add_argument("--requests", type=int, default=256)
    p.add_argument("--prompt", type=int, default=128, help="letters of a prompt")
    p.add_argument("--new", type=int, default=512, help="tokens to sample for each")
    p.add_argument("--rounds", type=int, default=5)
    return p.parse_args(words)


async def measure(a: argparse.Namespace) -> None:
    from relax_core.bus import Bus
    from relax_core.run import build_environments

    run, adapter, engine = work.opened(work.run_file(a, a.shape, work.engine(a), name=f"rollout-{a.shape}"))
    environments = build_environments(run)
    label, environment = next(iter(environments.items()))
    began = time.perf_counter()
    await engine.start()
    started = time.perf_counter() - began
    player = _player(run, engine, adapter, environments, Bus(1000, 1 << 30))
    tasks = iter(environment.tasks("train"))
    found: list[dict[str, Any]] = []
    try:
        client = cast("SglangEngine", engine).alive().client
        sides: dict[str, Callable[[list[Any]], Awaitable[int]]] = {
            "relax": lambda some: plays(player, some, label, a.new),
            "batch": lambda some: batch(client, prompts_of(adapter, some), a.new),
            "single": lambda some: single(client, prompts_of(adapter, some), a.new),
        }
        for number in range(1 + a.rounds):
            for side, ask in sides.items():
                some = [next(tasks) for _ in range(a.requests)]
                cpu, began = time.process_time(), time.perf_counter()
                tokens = await ask(some)
                seconds = time.perf_counter() - began
                cpu = time.process_time() - cpu
                found.append({"side": side, "round": number, "tokens": tokens, "seconds": seconds, "cpu": cpu})
                print(found[-1], flush=True)  # should it be stopped
    finally:
        await engine.stop()
    rows = summary([one for one in found if one["round"]])
    title = f"{a.shape}: {a.requests} requests of {a.prompt} + {a.new} tokens; server start {started:.0f} s"
    work.report(a, title, rows, {"start_s": started, "rounds": found})


def _player(*parts: Any) -> Any:
    from relax_core.players import Player

    return Player(*parts)


async def plays(player: Any, tasks: Sequence[Any], label: str, new: int) -> int:
    """Through environment, chat and engine, as a run's rollout does it."""
    from dataclasses import replace

    from relax_core.chat import Seat
    from relax_core.types import Sampling

    sampling = Sampling(max_new_tokens=new)
    trajectories = await asyncio.gather(
        *(
            player.single(replace(task, environment=label), Seat(0, task.id, 0, 0, (i,)), sampling, None, {})
            for i, task in enumerate(tasks)
        )
    )
    for trajectory in trajectories:
        if trajectory.error:
            raise SystemExit(f"a play failed: {trajectory.error}")
    return sum(trajectory.reply_tokens for trajectory in trajectories)


def prompts_of(adapter: Any, tasks: Sequence[Any]) -> list[list[int]]:
    return [adapter.encode(task.messages).ids for task in tasks]


def _body(ids: Any, new: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


async def batch(client: Any, prompts: list[list[int]], new: int) -> int:
    answers = await client.generate(_body(prompts, new))
    return sum(len(answer["output_ids"]) for answer in answers)


async def single(client: Any, prompts: list[list[int]], new: int) -> int:
    answers = await asyncio.gather(*(client.generate(_body(ids, new)) for ids in prompts))
    return sum(len(answer["output_ids"]) for answer in answers)


def summary(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians; ``of batch``: tokens a second, of the same round."""
    speed = {(one["side"], one["round"]): one["tokens"] / one["seconds"] for one in found}
    rounds = sorted({one["round"] for one in found})
    rows = []
    for side in dict.fromkeys(one["side"] for one in found):
        some = [one for one in found if one["side"] == side]
        ratios = [speed[side, number] / speed["batch", number] for number in rounds]
        rows.append(
            {
                "side": side,
                "tokens/s": work.median([speed[side, number] for number in rounds]),
                "seconds": work.median([one["seconds"] for one in some]),
                "client CPU s": work.median([one["cpu"] for one in some]),
                "of batch": work.median(ratios),
                "least": min(ratios),
                "bar": f"{BAR} {'reached' if work.median(ratios) >= BAR else 'missed'}" if side == "relax" else None,
            }
        )
    return rows


if __name__ == "__main__":
    work.main(measure, arguments())
