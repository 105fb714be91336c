"""What this distribution offers. The entry point ``algorithms-extra`` of group ``relax.plugins`` names this module."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component

relax_api = 1


def relax_algorithms() -> Mapping[str, Component]:
    return {
        "maxrl": Component(
            "relax_plugin_algorithms_extra.maxrl:Maxrl",
            summary="Advantages divided by the group's mean reward: hard tasks count more.",
        ),
        "gdpo": Component(
            "relax_plugin_algorithms_extra.gdpo:Gdpo",
            summary="Several rewards, each normalised for itself in its group before they are added.",
        ),
        "m2po": Component(
            "relax_plugin_algorithms_extra.m2po:M2po",
            summary="For stale data: masks outliers until the second moment of the log-ratios is small.",
        ),
        "dppo": Component(
            "relax_plugin_algorithms_extra.dppo:Dppo",
            summary="A trust region by the difference of probabilities instead of their ratio.",
        ),
        "gmpo": Component(
            "relax_plugin_algorithms_extra.gmpo:Gmpo",
            summary="The geometric mean of a play's token ratios, which outliers move little.",
        ),
    }
