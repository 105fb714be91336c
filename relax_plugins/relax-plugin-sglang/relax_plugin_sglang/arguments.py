"""How a server is started: its arguments and its environment, from the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_plugin_sglang.config import SglangConfig, Value

_CPU: dict[str, Value] = {
    "attention-backend": "torch_native",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,
    "max-total-tokens": 16384,
    "mem-fraction-static": 0.1,
}
"""What a server on a CPU without AMX needs; the cache is small, for the sizes that a CPU is good for."""

_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Variables of our own interpreter, which would mislead the server's."""

_MEDIA = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "relax_media.model",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "relax_media.processor",
}
"""What lets a server read the features that we send: packages beside our launcher, which it finds there."""


def server_arguments(config: SglangConfig, model: Path, device: str, port: int) -> list[str]:
    """A command line, all but the key. ``config.arguments`` win over what only suits most.

    ``device``: ``cpu``, ``cuda``, or ``cuda:1`` for the first of the server's GPUs.
    """
    suited: dict[str, Value] = {
        "sampling-backend": "pytorch",  # the other one cannot draw by seeds, and compiles for it
        "grammar-backend": "none",
        "log-level": "warning",
    }
    suited |= _CPU if device == "cpu" else {}
    own: dict[str, Value] = {
        "model-path": str(model),
        "dtype": config.dtype,
        "host": config.host,
        "port": port,
        "skip-tokenizer-init": True,
        "enable-return-routed-experts": config.routed_experts,
        "enable-memory-saver": config.memory_saver,
        "enable-metrics": config.metrics,
        "enable-deterministic-inference": config.deterministic,
    }
    kind, _, number = device.partition(":")
    own |= {"device": kind} | ({"base-gpu-id": int(number)} if number else {})
    given = {name.lstrip("-_").replace("_", "-"): value for name, value in config.arguments.items()}
    return [word for name, value in (suited | given | own).items() for word in _words(name, value)]


def _words(name: str, value: Value) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def server_environment(
    config: SglangConfig, device: str, folder: Path, base: Mapping[str, str] = os.environ, *, media: bool = False
) -> dict[str, str]:
    """``folder``: for the server's temporary files, removed after it. ``media``: whether it must read them."""
    kept = {name: value for name, value in base.items() if name not in _FOREIGN}
    cpu = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(config.threads or 1),
        "CUDA_VISIBLE_DEVICES": "",
    }
    own = {"TMPDIR": str(folder)} | (cpu if device == "cpu" else {}) | (_MEDIA if media else {})
    return kept | own | config.environment
