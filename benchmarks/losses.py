"""Time and peak memory of every loss with its log-probs: Relax beside one log-softmax over all logits.

    python benchmarks/losses.py [--json FILE] [--rows N] [--tokens 4096] [--vocab 32000] [--hidden N]
                                [--device auto|cpu|cuda] [--dtype auto|float32|bfloat16] [--repeats 3] [--only ID]

Both sides begin with the same hidden states, head and columns, and end with gradients of the first two. Every
measurement has a process of its own (losses_work.py); the sides take turns. The exit status says whether both sides
came to the same; whether the bars were reached is in the table and in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WORK = Path(__file__).resolve().with_name("losses_work.py")
SIDES = ("ours", "naive")
MEMORY, TIME = 0.5, 1.0
"""The bars: Relax's share of the naive side, at most."""
GIB = 1 << 30
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "cuda": {"rows": 16, "hidden": 1024, "passes": 3},
    "cpu": {"rows": 2, "hidden": 256, "passes": 1},
}
"""On a CPU the plain side of 16 rows takes 24 GiB, and minutes: time and memory are the same for each row."""
NEEDED: Mapping[str, Mapping[str, Any]] = {"dr-grpo": {"constant": 4096}}
"""Settings without which an algorithm cannot be built."""
FURTHER: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "grpo": [{"entropy": {"start": 0.01, "end": 0.01, "steps": 1}}],
    "opd": [{"over": "topk"}, {"over": "full"}],
}
"""Settings that are measured besides the defaults, because they ask for other outputs."""


@dataclass(frozen=True, slots=True)
class Case:
    """An algorithm with settings, and what it asks for."""

    id: str
    settings: Mapping[str, Any]
    outputs: Sequence[str]

    @property
    def label(self) -> str:
        words = [f"{k}: {v}" if isinstance(v, str) else k for k, v in self.settings.items() if k not in self._needed]
        return f"{self.id} ({', '.join(words)})" if words else self.id

    @property
    def _needed(self) -> Mapping[str, Any]:
        return NEEDED.get(self.id, {})


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every measurement here")
    p.add_argument("--rows", type=int, help="default: 16 on a GPU, 2 on a CPU")
    p.add_argument("--tokens", type=int, default=4096, help="of each row")
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--hidden", type=int, help="size of a hidden state; default: 1,024 on a GPU, 256 on a CPU")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    p.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the head; as trainers")
    p.add_argument("--repeats", type=int, default=3, help="processes of each side")
    p.add_argument("--passes", type=int, help="timed ones of each process, after one; default: 3 on a GPU, 1 on a CPU")
    p.add_argument("--threads", type=int, default=1, help="of a CPU")
    p.add_argument("--memory", type=float, help="GiB that a process may take; default: most of what is free")
    p.add_argument("--only", metavar="ID", help="one algorithm")
    a = p.parse_args(words)
    a.device, a.dtype = placed(a)
    for name, default in DEFAULTS[a.device].items():
        if getattr(a, name) is None:
            setattr(a, name, default)
    if min(a.rows, a.tokens, a.vocab, a.hidden, a.repeats, a.passes, a.threads) < 1:
        p.error("sizes and counts must be 1 or more")
    return a


def cases(only: str | None) -> list[Case]:
    sys.path.insert(0, str(WORK.parent.parent))
    from benchmarks.losses_work import build, suites

    stack = suites()
    known = list(stack.components("algorithms"))
    if only is not None and only not in known:
        raise SystemExit(f"--only: there is no algorithm {only!r}; known are {', '.join(known)}")
    found = []
    for id in known if only is None else [only]:
        for further in ({}, *FURTHER.get(id, ())):
            settings = {**NEEDED.get(id, {}), **further}
            found.append(Case(id, settings, sorted(build(stack, id, settings).outputs)))
    return found


# --- running ----------------------------------------------------------------------------------------------------------


def placed(a: argparse.Namespace) -> tuple[str, str]:
    """Device and dtype: by default those that a trainer takes."""
    import torch

    device = a.device if a.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = a.dtype if a.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    return device, dtype


def room(a: argparse.Namespace, device: str) -> int:
    """Bytes that a measurement may take."""
    if a.memory is not None:
        return int(a.memory * GIB)
    if device == "cuda":
        import torch

        return int(0.95 * torch.cuda.mem_get_info()[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.exists() and (allowed := limit.read_text().strip()).isdigit():
        free = min(free, int(allowed) - int(used.read_text()))
    return int(0.9 * free)


def estimate(case: Case, side: str, a: argparse.Namespace, device: str) -> int:
    """About the bytes that a measurement takes, from the tensors of M x V that it must hold at once."""
    import torch

    from relax_core.torch.logprobs import limits_of

    everything: int = 4 * a.rows * a.tokens * a.vocab
    limits = limits_of(torch.device(device))
    around: int = 12 * a.hidden * (a.rows * a.tokens + a.vocab) + GIB // 2
    if "full_logprobs" in case.outputs:  # with the teacher's column, and what the loss makes
        return around + (4 if side == "ours" else 7) * everything
    if side == "naive":
        return around + (5 if "entropy" in case.outputs else 3) * everything
    return around + min(everything, limits.kept + 4 * limits.chunk) + 16 * limits.block


def measure(case: Case, side: str, a: argparse.Namespace, device: str, dtype: str) -> dict[str, Any]:
    """One process. Exits with its last lines when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(WORK), "--json", str(out), "--id", case.id, "--side", side]
        command += ["--settings", json.dumps(case.settings), "--device", device, "--dtype", dtype]
        for name in ("rows", "tokens", "vocab", "hidden", "passes", "threads"):
            command += [f"--{name}", str(getattr(a, name))]
        environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "MKL_NUM_THREADS": str(a.threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            killed = " (killed: out of memory?)" if done.returncode < 0 else ""
            raise SystemExit(f"{case.label}, {side}, ended with {done.returncode}{killed}; its last lines:\n{tail}")
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def compared(case: Case, a: argparse.Namespace, device: str, dtype: str, console: Console) -> dict[str, Any]:
    """Both sides of a case in turns, and how they compare. A side that cannot fit is left out, with the reason."""
    result: dict[str, Any] = {**asdict(case), "label": case.label, "runs": {}, "skipped": {}}
    free = room(a, device)
    for side in SIDES:
        if (needed := estimate(case, side, a, device)) > free:
            reason = f"needs about {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free: lower --rows"
            result["skipped"][side] = reason
            console.print(f"{case.label}: {side} is left out: {reason}", highlight=False)
        else:
            result["runs"][side] = []
    for number in range(a.repeats):
        for side in list(result["runs"])[:: -1 if number % 2 else 1]:
            found = measure(case, side, a, device, dtype)
            result["runs"][side].append(found)
            console.print(
                f"{case.label:24} {number + 1}/{a.repeats}  {side:5}  {statistics.median(found['seconds']):8.3f} s  "
                f"{found['bytes'] / GIB:6.2f} GiB",
                highlight=False,
            )
    if not result["skipped"]:
        result |= judged(result["runs"], 1e-4 if dtype == "float32" else 1e-2)
    return result


def judged(runs: Mapping[str, Sequence[Mapping[str, Any]]], tolerance: float) -> dict[str, Any]:
    """Relax's share of the naive side's time and memory, and whether both came to the same."""
    pairs = list(zip(runs["ours"], runs["naive"], strict=True))
    times = [statistics.median(o["seconds"]) / statistics.median(n["seconds"]) for o, n in pairs]
    shares = [o["bytes"] / n["bytes"] for o, n in pairs]
    same = all(
        math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance * 1e-2)
        for o, n in pairs
        for x, y in zip((o["loss"], *o["norms"]), (n["loss"], *n["norms"]), strict=True)
    )
    time_ratio, memory_ratio = statistics.median(times), statistics.median(shares)
    return {
        "time_ratio": time_ratio,
        "time_ratios": times,
        "memory_ratio": memory_ratio,
        "same": same,
        "reached": same and time_ratio <= TIME and memory_ratio <= MEMORY,
    }


def table(found: Sequence[Mapping[str, Any]], title: str) -> Table:
    caption = f"ratios: ours / naive, medians of the repeats (least to most); bars: time {TIME:g}, memory {MEMORY:g}"
    result = Table(title=title, caption=caption)
    result.add_column("loss")
    for heading in ("ours s", "naive s", "ratio", "ours GiB", "naive GiB", "ratio", "bars"):
        result.add_column(heading, justify="right", no_wrap=True)
    for case in found:
        seconds, taken = {}, {}
        for side in SIDES:
            runs = case["runs"].get(side)
            seconds[side] = f"{statistics.median(s for r in runs for s in r['seconds']):.3f}" if runs else "left out"
            taken[side] = f"{statistics.median(r['bytes'] for r in runs) / GIB:.2f}" if runs else "left out"
        times, verdict = case.get("time_ratios"), ""
        if times:
            verdict = "reached" if case["reached"] else "missed" if case["same"] else "DIFFERENT"
        result.add_row(
            case["label"],
            seconds["ours"],
            seconds["naive"],
            f"{case['time_ratio']:.2f} ({min(times):.2f} to {max(times):.2f})" if times else "",
            taken["ours"],
            taken["naive"],
            f"{case['memory_ratio']:.2f}" if times else "",
            verdict,
        )
    return result


def machine(device: str) -> dict[str, Any]:
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    a = arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    wanted = cases(a.only)
    device, dtype = a.device, a.dtype
    started, loads = time.strftime("%Y-%m-%dT%H:%M:%S%z"), [os.getloadavg()[0]]
    found = [compared(case, a, device, dtype, console) for case in wanted]
    loads.append(os.getloadavg()[0])
    if a.json:
        settings = {k: v for k, v in vars(a).items() if k != "json"}
        report = {"started": started, "machine": machine(device), "load": loads, "settings": settings, "cases": found}
        a.json.write_text(json.dumps(report, indent=1))
    sizes = f"{a.rows} x {a.tokens:,} tokens, vocabulary {a.vocab:,}, hidden {a.hidden:,}, {dtype} on {device}"
    console.print(table(found, f"Each loss with its log-probs, forward and backward: {sizes}"))
    if different := [case["label"] for case in found if case.get("same") is False]:
        raise SystemExit(f"not comparable: both sides come to different losses or gradients: {', '.join(different)}")


if __name__ == "__main__":
    main()
