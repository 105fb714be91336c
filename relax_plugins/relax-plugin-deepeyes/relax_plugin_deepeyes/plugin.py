"""What the deepeyes plugin offers. The entry point ``deepeyes`` of group ``relax.plugins`` names this module."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component

relax_api = 1


def relax_environments() -> Mapping[str, Component]:
    toy = "relax_plugin_deepeyes.toy"
    return {
        "deepeyes": Component(
            "relax_plugin_deepeyes.environment:DeepEyes", summary="data sets, played with tools that look closer"
        ),
        "deepeyes-zoom": Component(f"{toy}.zoom:Zoom", summary="toy image: a colour that only the right crop shows"),
        "deepeyes-listen": Component(
            f"{toy}.listen:Listen", summary="toy audio: a tone that only the right part of a recording has"
        ),
        "deepeyes-watch": Component(f"{toy}.watch:Watch", summary="toy video: a way that only the right part shows"),
    }


def relax_rewards() -> Mapping[str, Component]:
    return {
        "deepeyes": Component(
            "relax_plugin_deepeyes.reward:DeepEyesReward", summary="answer, format, and a bonus for tools that helped"
        )
    }


def relax_callbacks() -> Mapping[str, Component]:
    return {
        "deepeyes-bonus": Component(
            "relax_plugin_deepeyes.bonus:ToolBonus", summary="a bonus for tools where another reward says right"
        )
    }
