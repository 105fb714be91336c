"""The ranks of a trainer at work together: rank 0 shares out rows and says what is next, the others follow.

Without other ranks every act is this process's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.errors import RelaxError
from relax_core.interfaces import Algorithm, Columns, Cut, Row, StepResult
from relax_core.torch.follower import Begin, Compute, Do, End, Follower, Order, Refused, Share
from relax_core.torch.ranks import CommonError, LostRanksError, portable
from relax_core.torch.shares import Feed, InlineFeed, shares
from relax_core.torch.step_state import StepState, units_of

if TYPE_CHECKING:
    from relax_core.torch.trainer import TorchTrainer


class Team:
    """One rank's view. ``feed`` may be replaced, on all ranks, before the first step."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self.trainer, self.ranks = trainer, trainer.ranks
        self.feed: Feed = InlineFeed(trainer.adapter)
        self._follower = Follower(self.ranks, self)
        self._state: StepState | None = None

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    async def step(self, step: int, plan: AsyncIterator[Cut] | None, algorithm: Algorithm) -> StepResult:
        """See ``TorchTrainer.step``."""
        if not self.ranks.first:
            await self._follower.step(step, algorithm)
            return StepResult({}, (), ())
        if plan is None:
            raise RelaxError("trainer: rank 0 was given no plan; only other ranks step without one")
        self._tell(Begin(step))
        state = self.trainer.begin_state(step, algorithm)
        try:
            async for cut in plan:
                self._train(state, cut)
                await asyncio.sleep(0)
            if state.open:
                raise RelaxError(f"trainer: the plan of step {step} ended within an update; end it with last=True")
        except CommonError as common:
            raise common.error from None
        except LostRanksError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._tell(End(" ".join(f"{type(error).__name__}: {error}".split())))
            raise
        self._tell(End())
        return self.trainer.result(state)

    def _train(self, state: StepState, cut: Cut) -> None:
        accumulator = self.trainer.accumulator
        given = shares(cut.rows, accumulator.pieces, self.ranks.size)
        forwards = max(accumulator.count(rows) for rows in given)
        tickets = self.feed.send(given)
        state.cuts.append(([row.id for row in cut.rows], cut.last))
        state.open = True
        state.units += units_of(cut.rows)
        units = state.units if cut.last else None
        self._tell(*(Share(ticket, forwards, units) for ticket in tickets))
        accumulator.add_share(state, given[0], forwards)
        if cut.last:
            self.trainer.updates.end(state)

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """See ``TorchTrainer.forward``. One act, without giving way to others in between."""
        if not self.ranks.first:
            await self._follower.until("forward")
            return []
        pieces = self.trainer.trainee.pieces
        try:
            given = shares(rows, pieces, self.ranks.size)
            forwards = max(sum(1 for _ in pieces.micro_batches(own)) for own in given)
            tickets = self.feed.send(given)
        except Exception as error:
            self._tell(Refused("forward", str(portable(error, 0))))
            raise
        finally:
            pieces.clear()
        self._tell(*(Compute(ticket, outputs, forwards) for ticket in tickets))
        with unwrapped():
            found = self._collected(given[0], outputs, forwards)
        columns: dict[str, Columns] = {}
        for part, made in zip(given, found, strict=True):
            columns |= {row.id: own for row, own in zip(part, made, strict=True)}
        return [columns[row.id] for row in rows]

    def do(self, what: str, folder: Path | None = None) -> None:
        """``save``, ``load`` or ``release`` on every rank."""
        if not self.ranks.first:
            self._follower.at_once(what)
            return
        with unwrapped():
            self._tell(order := Do(what, folder))
            self.act(order)

    async def do_async(self, what: str) -> None:
        """``sleep`` or ``wake`` on every rank."""
        if self.ranks.first:
            self.do(what)
        else:
            await self._follower.until(what)

    def announce(self, what: str) -> None:
        """Say, or hear, that what each rank is about to do is next."""
        if self.ranks.first:
            self._tell(Do(what))
        else:
            self._follower.expect(what)

    async def follow(self, algorithm: Algorithm) -> None:
        """See ``TorchTrainer.follow``."""
        if self.ranks.first:
            raise RelaxError("trainer: rank 0 was told to follow; it is the one that others follow")
        await self._follower.follow(algorithm)

    def _tell(self, *orders: Order) -> None:
        """One order for all ranks, or one for each."""
        if not self.ranks.alone:
            self.ranks.hand_out(orders if len(orders) > 1 else orders * self.ranks.size)

    # --- what other ranks are told to do ------------------------------------------------------------------------------

    def begin(self, step: int, algorithm: Algorithm) -> None:
        self._state = self.trainer.begin_state(step, algorithm)

    def train_share(self, order: Share) -> None:
        state = self._state
        assert state is not None
        with self._received(order.ticket) as (rows, error):
            state.error = state.error or error
            self.trainer.accumulator.add_share(state, rows, order.forwards)
        if order.units is not None:
            state.units = order.units
            self.trainer.updates.end(state)

    def end(self) -> None:
        assert self._state is not None
        self.trainer.result(self._state)

    def compute_share(self, order: Compute) -> None:
        with self._received(order.ticket) as (rows, error):
            self._collected(rows, order.outputs, order.forwards, error)

    @contextmanager
    def _received(self, ticket: Any) -> Iterator[tuple[Sequence[Row], Exception | None]]:
        """This rank's rows; none, and the reason, where they cannot be had."""
        with ExitStack() as stack:
            rows: Sequence[Row] = ()
            error: Exception | None = None
            try:
                rows = stack.enter_context(self.feed.receive(ticket))
            except Exception as failed:
                error = failed
            yield rows, error

    def _collected(
        self, rows: Sequence[Row], outputs: frozenset[str], forwards: int, error: Exception | None = None
    ) -> list[list[Columns]]:
        """Every rank's columns, on rank 0. Raises CommonError there and where something went wrong."""
        made: list[Columns] = []
        try:
            with self.trainer.compute.evenly(forwards):
                made = self.trainer.trainee.forward_now([] if error is not None else rows, outputs)
        except Exception as failed:
            error = error or failed
        own = None if error is None else portable(error, self.ranks.rank)
        found = self.ranks.collect((made, own))
        wrong = error or next((e for _, e in found if e is not None), None)
        if wrong is not None:
            raise CommonError(wrong)
        return [columns for columns, _ in found]

    def act(self, order: Do) -> None:
        trainer = self.trainer
        if order.what == "weights":
            for _ in trainer.learner.weights():
                pass
        elif order.what == "sleep":
            trainer.sleep_here()
        elif order.what == "wake":
            trainer.wake_here()
        elif order.folder is not None:
            (trainer.save_here if order.what == "save" else trainer.load_here)(order.folder)


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the error of a CommonError itself."""
    try:
        yield
    except CommonError as common:
        raise common.error from None
