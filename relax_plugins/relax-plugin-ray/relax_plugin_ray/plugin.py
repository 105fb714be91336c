"""What the ray plugin offers: the runtime ``ray``. Imports neither ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.hookspecs import impl
from relax_core.interfaces import Component
from relax_plugin_ray.config import RayConfig

relax_api = 1


@impl
def relax_runtimes() -> Mapping[str, Component]:
    return {
        "ray": Component(
            "relax_plugin_ray.runtime:RayRuntime",
            RayConfig,
            "A cluster: every role an actor, or a group of actors, in its own placement group.",
        )
    }
