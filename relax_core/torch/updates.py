"""Ends optimizer updates: sums over ranks, divides, clips, moves the weights, or skips what must not move."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relax_core.errors import RelaxError
from relax_core.hookspecs import OptimizerEvent
from relax_core.run import Run
from relax_core.torch.learner import Learner
from relax_core.torch.ranks import CommonError, Ranks
from relax_core.torch.step_state import StepState
from relax_core.types import LearnerName


class Updates:
    """Of one learner. All ranks do the same."""

    def __init__(self, run: Run, name: LearnerName, learner: Learner, ranks: Ranks) -> None:
        self.run, self.name, self.learner, self.ranks = run, name, learner, ranks

    def end(self, state: StepState) -> None:
        """End the open update. Raises CommonError where one rank has met an error, and nothing moves."""
        units, losses = state.close()
        total, count = self._summed(state, losses)
        norm = self.learner.optimizer.reduce(units) if units else 0.0
        if units and count and self.ranks.first:
            found = {"loss": total / units, "grad_norm": torch.tensor(norm, dtype=torch.float64)}
            state.tally.add({name: (value, torch.ones(())) for name, value in found.items()})
        state.nonfinite += not math.isfinite(norm)
        moves = self._moves(state.number, norm)
        if moves:
            self._before(OptimizerEvent(state.number, len(state.moved), norm, self.name))
            self.learner.optimizer.update(state.number)
        state.moved.append(moves)

    def _summed(self, state: StepState, losses: list[Tensor]) -> tuple[Tensor, int]:
        """The loss of all ranks' micro-batches, and their number; gradients are summed over ranks."""
        total = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64)
        if self.ranks.alone:
            return total, len(losses)
        optimizer = self.learner.optimizer
        reached = [float(found) for found in optimizer.reached()]
        errors, loss, count, *flags = self.ranks.sum([state.error is not None, float(total), len(losses), *reached])
        self.ranks.agree(state.error, errors > 0)
        optimizer.sum_over_ranks([count > 0 and flag > 0 for flag in flags])
        return torch.tensor(loss, dtype=torch.float64), int(count)

    def _moves(self, step: int, norm: float) -> bool:
        try:
            return self.learner.may_move(step, norm)
        except RelaxError as error:  # the norm is the same on all ranks, and so is this
            if self.ranks.alone:
                raise
            raise CommonError(error) from error

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
