"""Reward ``f1``: how much of the answer's words the reply has, and how few others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.reply import AnswerPart, abstains, answer_part, unreadable
from relax_envs.rewards.words import compared_words


class F1(Reward):
    """The harmonic mean of precision and recall of the reply's words, from 0 to 1, as in SQuAD (arXiv:1606.05250).

    Case, punctuation, English articles and differences of width do not matter; points and signs of numbers do. A word
    counts as often as it occurs on both sides. Chinese, Japanese, Thai and other scripts without spaces are compared
    by characters. Of several answers (a list) the best counts. An empty answer asks for an empty reply: 1 for that,
    else 0; an empty reply to another answer is 0. Abstains where the task has no answer, and where the play failed.
    """

    class Config(ComponentConfig):
        part: AnswerPart = "auto"
        """What is compared, as in ``exact``. ``auto``: the content of the last ``<answer>`` tags, else of the last
        ``\\boxed{}``, else what comes after the reasoning."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if abstains(trajectory):
            return None
        answer = trajectory.task.answer
        golds = answer if isinstance(answer, list | tuple) else [answer]
        if not golds or not all(isinstance(gold, str | int | float) for gold in golds):
            raise unreadable(trajectory, answer, "text or a number, or a list of them that is not empty")
        found = compared_words(answer_part(trajectory.last_reply, self.config.part) or "")
        return max(f1(found, compared_words(str(gold))) for gold in golds)


def f1(found: Sequence[str], gold: Sequence[str]) -> float:
    """2 x common / (words of both), counting repeated ones; 1 where both are empty."""
    if not found and not gold:
        return 1.0
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold))
