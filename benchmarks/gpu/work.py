"""What the programs of this folder share: run files over random models, prompts of letters, reports.

They run from a checkout, also where Relax is not installed. SGLang is in this interpreter's own path on a GPU machine;
elsewhere ``--sglang-python`` names the environment that has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import string
import sys
import time
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import models

if TYPE_CHECKING:
    from relax_core.interfaces import Engine, ModelAdapter
    from relax_core.run import Run

ROOT = Path(__file__).resolve().parents[2]
PARTS = (".", "algorithms", "envs", "modalities", "relax_plugins/relax-plugin-sglang")
GPU: dict[str, Any] = {
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "disable_flashinfer_autotune": True,
    "mem_fraction_static": 0.4,
    "cuda_graph_max_bs": 256,
    "max_running_requests": 256,
}
"""Arguments of a server on a Hopper GPU that need no further kernels."""


def offer(folder: Path) -> None:
    """Let every process find Relax, and its plugin of SGLang, as if they were installed."""
    if entry_points(group="relax.plugins", name="sglang"):
        return
    paths = [str(folder), *(str(ROOT / part) for part in PARTS)]
    for part in (PARTS[0], PARTS[-1]):
        project = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-0.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.0\n")
        found = project["entry-points"]["relax.plugins"]
        lines = [f"{name} = {module}" for name, module in found.items()]
        (info / "entry_points.txt").write_text("\n".join(["[relax.plugins]", *lines, ""]))
    sys.path[:0] = paths
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *before])


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--folder", type=Path, default=Path("/tmp/relax-gpu"), help="models, runs and logs")
    p.add_argument("--json", type=Path, help="write every measurement here")
    p.add_argument("--sglang-python", default=sys.executable, help="Python of an environment with SGLang")
    return p


def engine(a: argparse.Namespace, device: str = "", kind: str = "sglang", **settings: Any) -> dict[str, Any]:
    """The section of a run file. ``device``: such as ``cuda:1``; default: the program's own."""
    device = device or a.device
    if kind != "sglang":
        return {"id": kind, "device": device}
    section: dict[str, Any] = {"id": "sglang", "python": a.sglang_python, "device": device, **settings}
    if a.device == "cpu":
        return section
    path = os.environ.get("PYTHONPATH", "") if a.sglang_python == sys.executable else ""
    return section | {"arguments": GPU, "environment": {"PYTHONPATH": path}}


def prompts(file: Path, count: int, length: int) -> Path:
    """Rows for ``single_turn``: ``length`` letters, all different."""
    draw = random.Random(0)
    words = ("".join(draw.choices(string.ascii_letters, k=length)) for _ in range(count))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    return file


def chance(response: str) -> float:
    """A reward that random text cannot learn, and that differs within a group."""
    return float(zlib.crc32(response.encode()) % 2)


def run_file(a: argparse.Namespace, shape: str, section: Mapping[str, Any], **changes: Any) -> Path:
    """Text of letters, a random model of this shape, GRPO. ``a.prompt`` and ``a.new`` are tokens."""
    name = str(changes.pop("name", "gpu"))
    model = models.write(a.folder / "models" / shape, shape, a.device)
    data = prompts(a.folder / f"prompts-{a.prompt}.jsonl", 8192, a.prompt)
    base: dict[str, Any] = {
        "name": name,
        "runs": str(a.folder / "runs"),
        "plugins": ["sglang"] if section["id"] == "sglang" else [],
        "steps": 1,
        "groups_per_step": 4,
        "group_size": 4,
        "model": {"id": "text", "path": str(model)},
        "environments": [{"id": "single_turn", "data": str(data), "need_answer": False}],
        "rewards": [{"id": "function", "call": "benchmarks.gpu.work:chance"}],
        "algorithm": {"id": "grpo"},
        "sampling": {"temperature": 1.0, "max_new_tokens": a.new},
        "trainer": {"id": "torch", "device": a.device},
        "engine": dict(section),
    }
    file = Path(a.folder) / f"{name}.yaml"
    file.write_text(yaml.safe_dump(base | changes, sort_keys=False))
    return file


def opened(file: Path) -> tuple[Run, ModelAdapter, Engine]:
    """The run of a file, with an adapter and an engine of its own that is not started."""
    from relax_core.config.resolve import load
    from relax_core.engine_role import engine_setup
    from relax_core.run import Run, build_adapter

    config, stack = load(file)
    run = Run(config, config.runs / config.name, stack)
    adapter, _ = build_adapter(run)
    engine: Engine = stack.build("engines", config.engine, engine_setup(run, adapter), where="engine")
    return run, adapter, engine


def report(a: argparse.Namespace, title: str, rows: Sequence[Mapping[str, Any]], everything: Any) -> None:
    """A table on the screen, and all measurements as JSON."""
    if a.json:
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps({"title": title, "summary": list(rows), "all": everything, "machine": machine()}))
    table = Table(title=title)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(shown(row.get(name)) for name in names))
    Console(width=160, force_terminal=False).print(table)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1e4
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def machine() -> dict[str, Any]:
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    return {"gpus": gpus, "date": time.strftime("%Y-%m-%d"), **versions}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def settle(device: str) -> None:
    """Until the GPU has done what it was told."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def used_gib(device: str) -> float | None:
    """Memory of the GPU that is taken, by every process."""
    if device == "cpu":
        return None
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def main(work: Any, a: argparse.Namespace) -> None:
    """Run an asynchronous program in its folder."""
    a.folder.mkdir(parents=True, exist_ok=True)
    offer(a.folder / "site")
    asyncio.run(work(a))
