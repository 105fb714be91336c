"""One side of one loss of ``losses.py``, measured in this process: seconds, bytes, and what came out, as JSON.

Legend: B rows, T tokens of a row, M = B T, V vocabulary, K candidates of a token.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from relax_core.interfaces import Algorithm, Batch, Outputs
    from relax_core.plugins import Stack

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = 64


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, required=True, help="write what was measured here")
    p.add_argument("--id", required=True, help="the algorithm")
    p.add_argument("--settings", type=json.loads, default={}, help="its settings, as JSON")
    p.add_argument("--side", choices=[*SIDES], required=True)
    p.add_argument("--device", required=True)
    p.add_argument("--dtype", required=True)
    for name in ("rows", "tokens", "vocab", "hidden", "passes", "threads"):
        p.add_argument(f"--{name}", type=int, required=True)
    return p.parse_args()


def suites() -> Stack:
    """The built-in suites; from this checkout where Relax is not installed."""
    if not entry_points(group="relax.plugins", name="core"):
        sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("algorithms", "modalities", "envs"))]
        named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["relax.plugins"]
        from relax_core.plugins import activate

        return activate((), installed=[EntryPoint(name, value, "relax.plugins") for name, value in named.items()])
    from relax_core.plugins import activate

    return activate(())


def build(stack: Stack, id: str, settings: Mapping[str, Any]) -> Algorithm:
    made: type[Algorithm] = stack.load("algorithms", id)
    return made(made.Config.model_validate(settings))


def column(name: str, a: argparse.Namespace, device: str) -> torch.Tensor:
    """Random values of a column that a stage or the algorithm makes."""
    import torch

    grid = (a.rows, a.tokens)
    if name == "topk_ids":
        start = torch.randint(a.vocab, (*grid, 1), device=device)
        ids_BTK: torch.Tensor = (start + torch.arange(min(CANDIDATES, a.vocab), device=device)) % a.vocab
        return ids_BTK
    if name == "teacher_full_logprobs":
        made = torch.randn(*grid, a.vocab, device=device)
        for row in made:
            row -= row.logsumexp(-1, keepdim=True)
        return made
    if name == "teacher_topk_logprobs":
        return torch.randn(*grid, min(CANDIDATES, a.vocab), device=device) - math.log(a.vocab)
    made = torch.randn(grid, device=device)
    return 0.1 * made - math.log(a.vocab) if name.endswith("logprobs") else made


def batch(algorithm: Algorithm, a: argparse.Namespace, device: str) -> Batch:
    """All tokens sampled; the engine's and the old policy differ from the trained one."""
    import torch

    from relax_core.interfaces import Batch

    named = sorted((algorithm.needs | algorithm.makes) - {"old_logprobs"})
    return Batch(
        step=0,
        tokens_BT=torch.randint(a.vocab, (a.rows, a.tokens), device=device),
        mask_BT=torch.ones(a.rows, a.tokens, dtype=torch.bool, device=device),
        logprobs_BT=column("logprobs", a, device),
        old_logprobs_BT=column("old_logprobs", a, device),
        advantages_BT=column("advantages", a, device),
        weight_B=torch.ones(a.rows, device=device),
        units_B=torch.full((a.rows,), float(a.tokens), device=device),
        sequence_B=torch.arange(a.rows, device=device),
        columns={name: column(name, a, device) for name in named},
    )


Forward = Callable[["torch.nn.Module", "torch.Tensor", "Batch", frozenset[str]], "Outputs"]


def ours(head: torch.nn.Module, hidden_MH: torch.Tensor, given: Batch, asked: frozenset[str]) -> Outputs:
    """By Relax."""
    from relax_core.interfaces import Outputs
    from relax_core.torch.logprobs import Asked, statistics

    grid, vocab = given.tokens_BT.shape, head.out_features
    ids_MK = given.columns["topk_ids"].flatten(0, 1) if "topk_logprobs" in asked else None
    wanted = Asked(entropy="entropy" in asked, full="full_logprobs" in asked)
    made = statistics(head, hidden_MH, given.tokens_BT.flatten(), vocab, wanted, ids_MK)  # type: ignore[arg-type]
    return Outputs(
        made.logprobs_M.view(grid),
        entropy_BT=None if made.entropy_M is None else made.entropy_M.view(grid),
        topk_logprobs_BTK=None if made.topk_logprobs_MK is None else made.topk_logprobs_MK.view(*grid, -1),
        full_logprobs_BTV=None if made.full_logprobs_MV is None else made.full_logprobs_MV.view(*grid, -1),
    )


def naive(head: torch.nn.Module, hidden_MH: torch.Tensor, given: Batch, asked: frozenset[str]) -> Outputs:
    """By one log-softmax over all logits."""
    import torch

    from relax_core.interfaces import Outputs

    all_BTV = head(hidden_MH).log_softmax(-1, dtype=torch.float32).view(*given.tokens_BT.shape, -1)
    return Outputs(
        all_BTV.gather(-1, given.tokens_BT[..., None])[..., 0],
        entropy_BT=-(all_BTV.exp() * all_BTV).sum(-1) if "entropy" in asked else None,
        topk_logprobs_BTK=all_BTV.gather(-1, given.columns["topk_ids"]) if "topk_logprobs" in asked else None,
        full_logprobs_BTV=all_BTV if "full_logprobs" in asked else None,
    )


def write_divergence_plainly() -> None:
    """The divergence from a teacher in one line, by autograd: how Relax makes it is part of what is measured."""
    from relax_algorithms import divergence

    def plain(
        kind: str, student: torch.Tensor, teacher: torch.Tensor, beta: float, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert kind == "reverse", f"the naive side knows the reverse divergence alone, not {kind!r}"
        found = (student.exp() * (student - teacher)).sum(-1)  # every token counts here
        return found, found.detach()

    divergence.with_reverse = plain  # type: ignore[assignment]


SIDES: Mapping[str, Forward] = {"ours": ours, "naive": naive}


def measured(a: argparse.Namespace) -> dict[str, Any]:
    """One side of one case: seconds of each pass, bytes beyond what was there before, and what came out."""
    import torch

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    algorithm, device = build(suites(), a.id, a.settings), a.device
    if a.side == "naive":
        write_divergence_plainly()
    dtype: torch.dtype = getattr(torch, a.dtype)
    head = torch.nn.Linear(a.hidden, a.vocab, bias=False, device=device, dtype=dtype)
    hidden_MH = torch.randn(a.rows * a.tokens, a.hidden, device=device, dtype=dtype, requires_grad=True)
    given = batch(algorithm, a, device)

    def once() -> float:
        head.zero_grad()
        hidden_MH.grad = None
        found = SIDES[a.side](head, hidden_MH, given, algorithm.outputs - {"values"})
        total = algorithm.loss(given, found).total / given.units_B.sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total.item()

    before = memory(device)
    loss, seconds = once(), []
    for _ in range(a.passes):
        start = time.perf_counter()
        once()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    taken = memory(device, peak=True) - before
    gradients = [head.weight.grad, hidden_MH.grad]
    norms = [0.0 if g is None else float(torch.linalg.vector_norm(g, dtype=torch.float32)) for g in gradients]
    return {"seconds": seconds, "bytes": taken, "loss": loss, "norms": norms, "torch": torch.__version__}


def memory(device: str, peak: bool = False) -> int:
    """Bytes that this process holds now, or held at most since the last call: of the GPU, or resident."""
    import torch

    if device == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated())
    if peak:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    import psutil

    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    given = arguments()
    given.json.write_text(json.dumps(measured(given)))
