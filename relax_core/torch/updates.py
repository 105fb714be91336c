"""Ends optimizer updates: sums over ranks, divides, clips, moves policy and critic, or skips what must not move."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from relax_core.errors import RelaxError
from relax_core.hookspecs import OptimizerEvent
from relax_core.run import Run
from relax_core.torch.learner import Learner
from relax_core.torch.ranks import CommonError, Ranks
from relax_core.torch.step_state import StepState


class Updates:
    """``learners``: by the beginning of their metrics' names; the policy's is empty. All ranks do the same."""

    def __init__(self, run: Run, learners: Mapping[str, Learner], ranks: Ranks) -> None:
        self.run, self.learners, self.ranks = run, learners, ranks
        self.policy = learners[""]

    def end(self, state: StepState) -> None:
        """End the open update. Raises CommonError where one rank has met an error, and nothing moves."""
        units, losses = state.close()
        total, count = self._summed(state, losses)
        norms = {name: x.optimizer.reduce(units) if units else 0.0 for name, x in self.learners.items()}
        if units and count:
            self._tally(state, "loss", total / units)
            for name, norm in norms.items():
                self._tally(state, f"{name}grad_norm", torch.tensor(norm, dtype=torch.float64))
        state.nonfinite += not all(map(math.isfinite, norms.values()))
        moving = self._moving(state.number, norms)
        if not moving:
            state.skipped += 1
            return
        self._before(OptimizerEvent(state.number, state.seen_updates - 1, norms[""] if self.policy in moving else 0.0))
        for learner in moving:
            learner.optimizer.update(state.number)
        state.updates += 1
        state.moved |= self.policy in moving

    def _summed(self, state: StepState, losses: list[Tensor]) -> tuple[Tensor, int]:
        """The loss of all ranks' micro-batches, and their number; gradients are summed over ranks."""
        total = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64)
        if self.ranks.alone:
            return total, len(losses)
        reached = {name: x.optimizer.reached() for name, x in self.learners.items()}
        flat = [float(found) for part in reached.values() for found in part]
        errors, loss, count, *flags = self.ranks.sum([state.error is not None, float(total), len(losses), *flat])
        self.ranks.agree(state.error, errors > 0)
        for name, learner in self.learners.items():
            own, flags = flags[: len(reached[name])], flags[len(reached[name]) :]
            learner.optimizer.sum_over_ranks([count > 0 and flag > 0 for flag in own])
        return torch.tensor(loss, dtype=torch.float64), int(count)

    def _moving(self, step: int, norms: Mapping[str, float]) -> list[Learner]:
        try:
            return [x for name, x in self.learners.items() if x.may_move(step, norms[name])]
        except RelaxError as error:  # the norms are the same on all ranks, and so is this
            if self.ranks.alone:
                raise
            raise CommonError(error) from error

    def _tally(self, state: StepState, name: str, value: Tensor) -> None:
        if self.ranks.first:
            state.tally.add({name: (value, torch.ones(()))})

    def _before(self, event: OptimizerEvent) -> None:
        """The hook, whose error on one rank is every rank's."""
        error: Exception | None = None
        try:
            self.run.stack.hook.before_optimizer_step(run=self.run, event=event)
        except Exception as raised:
            if self.ranks.alone:
                raise
            error = raised
        if not self.ranks.alone:
            self.ranks.agree(error)
