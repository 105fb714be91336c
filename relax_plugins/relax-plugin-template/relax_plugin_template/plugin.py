"""What this distribution offers. The entry point ``template`` of group ``relax.plugins`` names this module."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component

from relax_plugin_template.engine_config import PlainConfig

relax_api = 1


def relax_environments() -> Mapping[str, Component]:
    return {
        "template-echo": Component(
            "relax_plugin_template.environment:Echo",
            summary="repeat the word that was said",
        ),
    }


def relax_rewards() -> Mapping[str, Component]:
    return {
        "template-near": Component(
            "relax_plugin_template.reward:Near",
            summary="share of letters that are right",
        ),
    }


def relax_algorithms() -> Mapping[str, Component]:
    return {
        "template-reinforce": Component(
            "relax_plugin_template.algorithm:Reinforce",
            summary="REINFORCE with the group's mean as baseline",
        ),
    }


def relax_modalities() -> Mapping[str, Component]:
    return {
        "template-ppm": Component(
            "relax_plugin_template.modality:PortablePixmap",
            summary="uncompressed PPM pictures",
        ),
    }


def relax_engines() -> Mapping[str, Component]:
    return {
        "template-plain": Component(
            "relax_plugin_template.engine:PlainEngine",
            PlainConfig,
            summary="the whole row for each token",
        ),
    }


def relax_callbacks() -> Mapping[str, Component]:
    return {
        "template-best": Component(
            "relax_plugin_template.callback:Best",
            summary="remembers the best step",
        ),
    }
