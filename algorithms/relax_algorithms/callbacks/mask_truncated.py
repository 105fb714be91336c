"""Leaves plays out that a limit cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.hookspecs import Callback, GroupEvent

if TYPE_CHECKING:
    from relax_core.run import Run


class MaskTruncated(Callback):
    """A play that a limit ended (tokens, turns, tool calls) gets no reward (overlong filtering, arXiv:2503.14476).

    Its answer may only have been late: a reward of 0 would be noise. Without a reward it is as if it had not been
    played: it is not trained, counts in no denominator, and has no part in its group's mean and deviation. Masking its
    loss alone would still let it shift the advantages of the others. A group of which every play was cut off is
    filtered and another takes its place. Those left out have ``masked`` 1 among their metrics.
    """

    def shape_rewards(self, run: Run, value: list[float | None], event: GroupEvent) -> list[float | None]:
        shaped: list[float | None] = []
        for reward, trajectory in zip(value, event.group.trajectories, strict=True):
            is_masked = reward is not None and trajectory.stop.cut
            trajectory.metrics["masked"] = float(is_masked)
            shaped.append(None if is_masked else reward)
        return shaped
