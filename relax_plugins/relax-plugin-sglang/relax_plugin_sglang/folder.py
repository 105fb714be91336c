"""The model folder with which a server starts: given, the run's own, or written for a random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.errors import EngineError

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_plugin_sglang.config import SglangConfig


def model_folder(config: SglangConfig, adapter: ModelAdapter, scratch: Path) -> Path:
    """``scratch``: an empty folder for what has to be written."""
    given: Path | None = config.model or getattr(adapter.config, "path", None)
    if given is None:
        import torch

        adapter.save(adapter.load("cpu", getattr(torch, config.dtype)), scratch)
        return scratch
    if not (given / "config.json").is_file():
        setting = "engine.model" if config.model else "model.path"
        raise EngineError(f"{setting}: {given} has no config.json; a server needs a whole model folder")
    return given.resolve()


def routing(folder: Path) -> tuple[int, int]:
    """(layers, experts of a token) of a mixture of experts. Raises EngineError for a model that is none."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config") or config
    layers, experts = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if not (isinstance(layers, int) and isinstance(experts, int)):
        kind = config.get("model_type")
        raise EngineError(f"engine.routed_experts: a {kind} model has no experts; leave it out")
    return layers, experts
