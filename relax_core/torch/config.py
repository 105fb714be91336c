"""Settings of the embedded engine and trainer, apart from their code so that reading a run file imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from relax_core.interfaces import ComponentConfig


class EngineConfig(ComponentConfig):
    """The engine that samples with the transformers model itself."""

    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where the engine's copy of the model lives; ``auto``: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Of its weights and of its cache; ``auto``: bfloat16 on a GPU, float32 on a CPU."""
    max_rows: PositiveInt = 512
    """Requests of one pool (training, evaluation) that are decoded together; more wait."""
    max_cache_tokens: PositiveInt | None = None
    """Bound of the cache of one pool: rows x tokens of the longest (its prompt and its limit of new tokens). Requests wait
    beyond it, and one that alone exceeds it is refused; default: only max_rows bounds it."""
    max_prefill_tokens: PositiveInt = 16384
    """Tokens of prompts, padding included, that one forward may read; a longer prompt goes alone."""
    threads: PositiveInt | None = None
    """Torch threads of the engine's process; default: 1 on a CPU (more makes small models slower), torch's own on a GPU."""
