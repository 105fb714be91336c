"""Settings of the engine, in a module without torch: ``relax check`` reads them where there is none."""

from __future__ import annotations

from relax_core.interfaces import ComponentConfig


class PlainConfig(ComponentConfig):
    """Settings of ``template-plain``."""

    device: str = "cpu"
    """Where the model computes, such as ``cuda:0``."""
