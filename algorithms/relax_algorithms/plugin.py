"""What the algorithms suite offers."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component


def relax_algorithms() -> Mapping[str, Component]:
    return {
        "grpo": Component(
            "relax_algorithms.grpo:Grpo",
            summary="Group-relative advantages, clipped ratio: no critic, few settings.",
        ),
        "dr-grpo": Component(
            "relax_algorithms.dr_grpo:DrGrpo",
            summary="GRPO without dividing by deviation and length: long and easy answers are not favoured.",
        ),
        "dapo": Component(
            "relax_algorithms.dapo:Dapo",
            summary="GRPO with a higher upper clip; its dynamic sampling and overlong rewards are callbacks.",
        ),
        "gspo": Component(
            "relax_algorithms.gspo:Gspo",
            summary="Group-relative advantages, one ratio and one clip for a whole sequence.",
        ),
        "sapo": Component(
            "relax_algorithms.sapo:Sapo",
            summary="Group-relative advantages, a soft gate on the ratio instead of a clip.",
        ),
        "cispo": Component(
            "relax_algorithms.cispo:Cispo",
            summary="Group-relative advantages, a bounded weight instead of a clip: no token loses its gradient.",
        ),
        "rloo": Component(
            "relax_algorithms.rloo:Rloo",
            summary="Rewards compared with the mean of the other plays, clipped or plain policy gradient.",
        ),
        "ppo": Component(
            "relax_algorithms.ppo:Ppo",
            summary="A critic, generalised advantages token by token, clipped ratio and values, critic warm-up.",
        ),
        "reinforce++": Component(
            "relax_algorithms.reinforce_pp:ReinforcePlusPlus",
            summary="No critic: returns of single tokens, whitened over the step; with a baseline per task or without.",
        ),
        "opd": Component(
            "relax_algorithms.opd:Opd",
            summary="On-policy distillation from a teacher: sampled tokens, its top k, or all; alone or with a reward.",
        ),
    }


def relax_callbacks() -> Mapping[str, Component]:
    return {
        "dynamic-sampling": Component(
            "relax_algorithms.callbacks.dynamic_sampling:DynamicSampling",
            summary="Trains only groups whose plays differ in reward, and plays others instead.",
        ),
        "overlong": Component(
            "relax_algorithms.callbacks.overlong:Overlong",
            summary="A penalty for plays that come near a length limit.",
        ),
        "mask-truncated": Component(
            "relax_algorithms.callbacks.mask_truncated:MaskTruncated",
            summary="Leaves plays out that a limit of tokens, turns or time cut off.",
        ),
    }
