"""What this distribution offers."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component

relax_api = 1


def relax_rewards() -> Mapping[str, Component]:
    return {
        "genrm": Component(
            "relax_plugin_genrm.reward:GenRM", summary="what a language model says of a play, or of plays compared"
        )
    }
