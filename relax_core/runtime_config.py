"""Settings of the local runtime, apart from its code so that reading a run file imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from relax_core.interfaces import ComponentConfig


class LocalConfig(ComponentConfig):
    overlap: Literal["turns", "process"] = "turns"
    """``turns``: engine and trainer take turns in one process (exact, debuggable). ``process``: the engine has its own
    process, and samples while the trainer computes (for speed)."""
    placement: Literal["resident", "colocate"] = "resident"
    """``resident``: engine and trainer keep their memory. ``colocate``: they take turns on the device; the trainer
    waits for the whole step's rollout, and the one that waits frees its memory for the other."""
