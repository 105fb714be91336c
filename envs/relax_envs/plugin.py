"""What the environments suite provides."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component


def relax_environments() -> Mapping[str, Component]:
    return {
        "single_turn": Component(
            "relax_envs.single_turn:SingleTurn", summary="data sets (JSONL, Parquet, datasets folders): ask once"
        ),
        "agent": Component(
            "relax_envs.agent.command:Agent", summary="an agent program of its own, by an OpenAI-compatible endpoint"
        ),
        "tool_use": Component("relax_envs.tools.use:ToolUse", summary="data sets, with tools that the policy may call"),
        "gymnasium": Component("relax_envs.gym:Gymnasium", summary="environments with Gymnasium's reset and step"),
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
    rewards = "relax_envs.rewards"
    return {
        "exact": Component(f"{rewards}.exact:Exact", summary="the last reply is the answer"),
        "number": Component(f"{rewards}.number:Number", summary="the reply's last number is the answer"),
        "choice": Component(f"{rewards}.choice:Choice", summary="multiple choice, in any of the usual spellings"),
        "math": Component(f"{rewards}.math:Math", summary="the same value in mathematical notation"),
        "gsm8k": Component(f"{rewards}.gsm8k:Gsm8k", summary="the number after the last ####"),
        "f1": Component(f"{rewards}.f1:F1", summary="words that the reply and the answer share"),
        "iou": Component(f"{rewards}.iou:Iou", summary="overlap of boxes in a picture"),
        "code": Component(f"{rewards}.code:Code", summary="the reply's program passes the tests, in a sandbox"),
        "format": Component(f"{rewards}.format:Format", summary="the last reply has a given form"),
        "length": Component(f"{rewards}.length:Length", summary="how long the replies are"),
        "repetition": Component(f"{rewards}.repetition:Repetition", summary="a penalty for repeated words"),
        "metric": Component(f"{rewards}.metric:Metric", summary="a number that the environment noted of the play"),
        "remote": Component(f"{rewards}.remote:Remote", summary="a grader behind an HTTP address"),
        "function": Component(f"{rewards}.function:Function", summary="a function of your own"),
    }
