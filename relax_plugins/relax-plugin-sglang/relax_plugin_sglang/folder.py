"""The model folder with which a server starts: given, the run's own, or written for a random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.errors import EngineError

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_plugin_sglang.config import SglangConfig

_THINKER, _WHOLE = "qwen3_omni_moe_thinker", "qwen3_omni_moe"


def model_folder(config: SglangConfig, adapter: ModelAdapter, scratch: Path) -> Path:
    """``scratch``: an empty folder for what has to be written."""
    given: Path | None = config.model or getattr(adapter.config, "path", None)
    if given is None:
        import torch

        given = scratch / "model"
        adapter.save(adapter.load("cpu", getattr(torch, config.dtype)), given)
    elif not (given / "config.json").is_file():
        setting = "engine.model" if config.model else "model.path"
        raise EngineError(f"{setting}: {given} has no config.json; a server needs a whole model folder")
    return whole_folder(given.resolve(), scratch / "whole")


def whole_folder(folder: Path, beside: Path) -> Path:
    """``folder``; for a Qwen3-Omni's thinker by itself ``beside``, with the config of a whole one, which the server
    knows, and links to all else. (``processes/relax_media`` knows the thinker's names.)"""
    thinker = model_config(folder)
    if thinker.get("model_type") != _THINKER:
        return folder
    beside.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (beside / file.name).symlink_to(file)
    text = thinker["text_config"]
    for key in {"rope_parameters", "rope_scaling"} & {name for name, value in text.items() if value}:
        text[key] = {**text[key], "mrope_interleaved": True}  # transformers always does it; the server asks
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": _WHOLE,
        "enable_audio_output": False,
        "tie_word_embeddings": thinker.get("tie_word_embeddings", False),
        "thinker_config": thinker,
    }
    (beside / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return beside


def model_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def routing(folder: Path) -> tuple[int, int]:
    """(layers, experts of a token) of a mixture of experts. Raises EngineError for a model that is none."""
    config = model_config(folder)
    model = config.get("thinker_config") or config
    text: dict[str, Any] = model.get("text_config") or model
    layers, experts = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if not (isinstance(layers, int) and isinstance(experts, int)):
        kind = config.get("model_type")
        raise EngineError(f"engine.routed_experts: a {kind} model has no experts; leave it out")
    return layers, experts
