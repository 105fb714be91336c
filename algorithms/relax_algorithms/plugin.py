"""What the algorithms suite offers."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component


def relax_algorithms() -> Mapping[str, Component]:
    return {
        "grpo": Component(
            "relax_algorithms.grpo:Grpo",
            summary="Group-relative advantages, clipped ratio; with its settings also Dr. GRPO and DAPO's loss.",
        ),
    }
