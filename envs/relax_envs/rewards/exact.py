"""Reward ``exact``: whether the last reply, or the answer in it, is the task's answer."""

from __future__ import annotations

from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.reply import AnswerPart, abstains, answer_part, without_end_tokens


class Exact(Reward):
    """1.0 if the reply is the answer, or one of them where ``answer`` is a list, else 0.0.

    Answers that are no text count as Python writes them: 3, True.
    Abstains where the task has no answer, and where the play failed.
    """

    class Config(ComponentConfig):
        ignore_case: bool = False
        """Compare without regard to case."""
        strip: bool = True
        """Leave white space, and special tokens that end a turn, out of the comparison at the ends."""
        part: AnswerPart = "reply"
        """What is compared. ``reply``: all of it; ``final``: what comes after the reasoning (``</think>``); ``answer``:
        what stands in the last ``<answer>`` tags of that; ``boxed``: in its last ``\\boxed{}``; ``auto``: in the tags,
        else in the box, else the final part. A reply without that part is wrong."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if abstains(trajectory):
            return None
        answer = trajectory.task.answer
        allowed = {self._plain(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer])}
        found = answer_part(trajectory.last_reply, self.config.part)
        if found is None:
            return 0.0
        forms = [found, without_end_tokens(found)] if self.config.strip else [found]
        return float(any(self._plain(form) in allowed for form in forms))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text
