"""What the sglang plugin offers: the engine ``sglang``. Imports neither SGLang nor torch."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.hookspecs import impl
from relax_core.interfaces import Component
from relax_plugin_sglang.config import SglangConfig

relax_api = 1


@impl
def relax_engines() -> Mapping[str, Component]:
    return {
        "sglang": Component(
            "relax_plugin_sglang.engine:SglangEngine",
            SglangConfig,
            "An SGLang server in a virtual environment of its own, or elsewhere; tokens in and tokens out.",
        )
    }
