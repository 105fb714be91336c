"""Reward ``deepeyes``: the right answer, the right form, and a bonus for tools where the answer is right.

R = R_accuracy + R_format + [R_accuracy > 0] R_tool                      (DeepEyes, arXiv 2505.14362, section 3)
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Stop, ToolResult, Trajectory
from relax_envs.rewards.format import has_tags
from relax_envs.rewards.reply import abstains, answer_part, without_end_tokens

_CALL, _CALLED = "<tool_call>", "</tool_call>"


class DeepEyesReward(Reward):
    """Components ``accuracy``, ``format`` and ``tool``, each times its weight.

    **Accuracy**: 1 if what stands in the last ``<answer>`` tags is the task's answer, or one of them where that is a
    list; case and white space at the ends do not matter. Where another reward decides (a judge, ``math``), set
    ``accuracy`` and ``tool`` to 0, list that reward beside this one, and let the callback ``deepeyes-bonus`` pay for
    tools.

    **Format**: 1 if every reply thinks in ``<think>`` tags and then makes calls, the last one answers in ``<answer>``
    tags, nothing stands between the tags, and the last reply ended by itself.

    **Tool**: 1 if the answer is right and a tool has shown a picture, a sound or a video before.

    Abstains where the task has no answer, and where the play failed.
    """

    class Config(ComponentConfig):
        accuracy: float = 0.8
        """Weight of a right answer."""
        format: float = 0.2
        """Weight of replies in the right form."""
        tool: float = 1.2
        """Weight of having used a tool for a right answer; without one it counts nothing."""
        think: bool = True
        """Whether the right form has ``<think>`` tags."""

    async def __call__(self, trajectory: Trajectory) -> Mapping[str, float] | None:
        if abstains(trajectory):
            return None
        config, right = self.config, is_right(trajectory)
        return {
            "accuracy": config.accuracy * right,
            "format": config.format * in_form(trajectory, config.think),
            "tool": config.tool * (right and was_shown(trajectory)),
        }


def is_right(trajectory: Trajectory) -> bool:
    """Whether the last reply's ``<answer>`` is the task's answer."""
    found = answer_part(trajectory.last_reply, "answer")
    answer = trajectory.task.answer
    allowed = answer if isinstance(answer, list | tuple) else [answer]
    return found is not None and found.casefold() in {str(one).strip().casefold() for one in allowed}


def in_form(trajectory: Trajectory, think: bool) -> bool:
    """Whether every reply but the last thinks and calls tools, and the last one thinks and answers."""
    if not trajectory.turns or trajectory.turns[-1].stop is not Stop.EOS:
        return False
    *before, last = (without_end_tokens(turn.reply.text) for turn in trajectory.turns)
    thought = ("think",) if think else ()
    return has_tags(last, (*thought, "answer")) and all(_calls(text, thought) for text in before)


def was_shown(trajectory: Trajectory) -> bool:
    """Whether a tool has shown something: its result holds a picture, a sound or a video."""
    parts = (part for turn in trajectory.turns for message in turn.prompt for part in message.parts)
    return any(not hasattr(one, "text") for part in parts if isinstance(part, ToolResult) for one in part.parts)


def _calls(text: str, thought: tuple[str, ...]) -> bool:
    head, call, rest = text.partition(_CALL)
    return bool(call) and rest.endswith(_CALLED) and (has_tags(head, thought) if thought else not head.strip())
