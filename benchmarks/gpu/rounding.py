"""How far log-probs in bfloat16 are from those in float32, of the same random model: no engine can be blamed for it.

    python -m benchmarks.gpu.rounding [--device cpu] [--shapes qwen3-0.6b qwen3-1.7b]

A difference between engine and trainer, which round in other places, is of about this size.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import models, work

DRAWN = 8
"""Ids that are drawn at each place, whose log-probs are compared."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = work.parser(__doc__)
    p.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"])
    p.add_argument("--prompt", type=int, default=192, help="tokens")
    return p.parse_args(words)


def difference(shape: str, device: str, length: int) -> dict[str, float | str]:
    import torch

    model: Any = models.random_model(shape, device)
    ids_1T = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        half_TV = model(ids_1T).logits[0].float().log_softmax(-1)
    with torch.no_grad():
        full_TV = model.float()(ids_1T).logits[0].log_softmax(-1)
        drawn_TK = torch.multinomial(full_TV.exp(), DRAWN, generator=torch.Generator(device).manual_seed(2))
        apart_TK = (half_TV.gather(-1, drawn_TK) - full_TV.gather(-1, drawn_TK)).abs()
    return {"shape": shape, "mean": float(apart_TK.mean()), "largest": float(apart_TK.max())}


async def measure(a: argparse.Namespace) -> None:
    rows = [difference(shape, a.device, a.prompt) for shape in a.shapes]
    work.report(a, "log-probs in bfloat16 and float32, absolute difference", rows, rows)


if __name__ == "__main__":
    work.main(measure, arguments())
