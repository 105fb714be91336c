"""What the environments suite provides."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component


def relax_environments() -> Mapping[str, Component]:
    return {
        "single_turn": Component("relax_envs.single_turn:SingleTurn", summary="a JSONL data set: ask once"),
        "reasoning-gym": Component(
            "relax_envs.reasoning_gym:ReasoningGym", summary="tasks of the reasoning-gym package"
        ),
        "nth-word": Component("relax_envs.toy.words:NthWord", summary="toy text: the n-th of three words"),
        "last-word": Component("relax_envs.toy.words:LastWord", summary="toy text: the last of four words"),
        "colour": Component("relax_envs.toy.colour:Colour", summary="toy image: the colour of a shape"),
        "tone": Component("relax_envs.toy.tone:Tone", summary="toy audio: a high or a low tone"),
        "motion": Component("relax_envs.toy.motion:Motion", summary="toy video: which way a square moves"),
    }


def relax_rewards() -> Mapping[str, Component]:
    return {
        "exact": Component("relax_envs.rewards.exact:Exact", summary="the last reply is the answer"),
        "number": Component("relax_envs.rewards.number:Number", summary="the reply's last number is the answer"),
        "format": Component("relax_envs.rewards.format:Format", summary="the last reply has a given form"),
    }
