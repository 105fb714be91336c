"""The embedded trainer: gradients of micro-batches, summed, divided once, clipped, and given to AdamW."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_core.errors import CheckpointError, ConfigError, RelaxError
from relax_core.hookspecs import ForwardEvent, OptimizerEvent
from relax_core.interfaces import Algorithm, Columns, Cut, Loss, Outputs, Row, StepResult, Trainer
from relax_core.plan import pack
from relax_core.setup import TrainerSetup
from relax_core.torch.batch import make_batch, on_row
from relax_core.torch.config import TrainerConfig
from relax_core.torch.forward import Forward
from relax_core.torch.layout import Piece, cost
from relax_core.torch.optim import Optimizer, learning_rate, named_tensors
from relax_core.torch.tally import Tally

OUTPUTS = frozenset({"logprobs", "entropy"})
_BUDGETS = {"cpu": 4096}
_WEIGHTS, _OPTIMIZER, _COUNTERS = "weights.safetensors", "optimizer.pt", "trainer.json"


class TorchTrainer(Trainer):
    """Trains its own copy of the model, on one device.

    Dropout is off, since engine and trainer must agree on the policy. On a CPU equal cuts give equal bits.
    """

    Config = TrainerConfig
    config: TrainerConfig

    def __init__(self, config: TrainerConfig, setup: TrainerSetup) -> None:
        super().__init__(config)
        self.adapter, self.run = setup.adapter, setup.run
        device = _device(config)
        if device == "cpu" or config.threads:
            torch.set_num_threads(config.threads or 1)
        model = self.adapter.load(device, _dtype(config, device))
        _without_dropout(model, config.gradient_checkpointing)
        self.model = model.requires_grad_(True)
        self.compute = Forward(model, self.adapter, config.layout, self.run.config.sampling.temperature)
        self.optimizer = Optimizer(model, config, self.run.config.steps)
        self._budget = config.tokens_per_micro_batch or _BUDGETS.get(device, 16384)
        self._nonfinite = 0
        self._pieces: dict[str, Piece | None] = {}

    # --- micro-batches ------------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        return self._budget

    def cost(self, rows: Sequence[Row]) -> int:
        return cost([piece for row in rows if (piece := self._piece(row))], self.compute.kind)

    def _piece(self, row: Row) -> Piece | None:
        """What layouts need of a row, found once a step; None for a row without sampled tokens."""
        if row.id not in self._pieces:
            self._pieces[row.id] = Piece.of(row) if row.columns["mask"].any() else None
        return self._pieces[row.id]

    def _computed(self, rows: Sequence[Row]) -> tuple[list[Row], list[Piece]]:
        """The rows with sampled tokens, and their pieces."""
        found = [(row, piece) for row in rows if (piece := self._piece(row))]
        return [row for row, _ in found], [piece for _, piece in found]

    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """``logprobs`` and ``entropy``, in micro-batches cut as the plan of a step with one update cuts them."""
        _check_outputs(outputs, "forward")
        found: dict[str, dict[str, object]] = {}
        groups = [list(members) for _, members in groupby(rows, key=lambda row: row.group)]
        for part in pack(groups, self):
            sampled, pieces = self._computed(part)
            if not sampled:
                continue
            with torch.no_grad(), self.compute.run(pieces, outputs) as made:
                grids = {"logprobs": made.outputs.logprobs_BT, "entropy": made.outputs.entropy_BT}
                for name in sorted(outputs):
                    grid_BT = grids[name]
                    assert grid_BT is not None
                    for row, piece, window_T in zip(sampled, pieces, grid_BT.cpu().numpy(), strict=True):
                        found.setdefault(row.id, {})[name] = on_row(window_T, piece)
            await asyncio.sleep(0)
        self._pieces.clear()
        return [found.get(row.id) or _zeros(row, outputs) for row in rows]

    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        """See ``Trainer.step``; steps count from 0. Yields to the event loop after every micro-batch.

        An update is skipped, with weights and optimizer as they were, when nothing of it is trained, or when its
        gradient is exactly zero or not finite. Raises RelaxError after ``max_nonfinite`` of the last kind in a row.
        """
        _check_outputs(algorithm.outputs, f"algorithm {type(algorithm).__name__}")
        state = _Step(step, algorithm)
        self.optimizer.clear()
        self._pieces.clear()
        async for cut in plan:
            state.cuts.append(([row.id for row in cut.rows], cut.last))
            self._accumulate(state, cut.rows)
            if cut.last:
                self._update(state)
            await asyncio.sleep(0)
        if state.open:
            raise RelaxError(f"trainer: the plan of step {step} ended within an update; end it with a cut of last=True")
        return StepResult(self._metrics(state), state.updates, state.skipped, state.cuts)

    def _accumulate(self, state: _Step, rows: Sequence[Row]) -> None:
        """Add the gradient of a micro-batch's summed loss."""
        state.open = True
        state.units += math.fsum(float(row.columns["units"]) for row in rows)
        rows, pieces = self._computed([row for row in rows if row.columns["weight"] != 0])
        if not rows:
            return
        stack, algorithm = self.run.stack, state.algorithm
        batch = make_batch(state.number, rows, pieces, self.compute.device)
        batch = stack.pipe("before_forward", self.run, batch, ForwardEvent(state.number, batch))
        with self.compute.run(pieces, algorithm.outputs) as made:
            outputs = stack.pipe("after_forward", self.run, made.outputs, ForwardEvent(state.number, batch))
            loss = algorithm.loss(batch, outputs)
            if loss.total.requires_grad:
                loss.total.backward()  # type: ignore[no-untyped-call]
        state.losses.append(loss.total.detach())
        state.note(rows, loss, outputs)
        state.computed += made.layout.tokens
        old_BT = outputs.logprobs_BT.detach() if state.seen_updates == 0 else batch.old_logprobs_BT
        if old_BT is not None and state.first_time(rows):
            state.tally.mismatch(rows, batch, old_BT)

    def _update(self, state: _Step) -> None:
        """End an optimizer update: divide, clip, step; or skip it."""
        units, losses = state.close()
        norm = self.optimizer.reduce(units) if units else 0.0
        if units and losses:
            once = torch.ones(())
            total = torch.stack(losses).double().sum()
            state.tally.add(
                {"loss": (total / units, once), "grad_norm": (torch.tensor(norm, dtype=torch.float64), once)}
            )
        if not math.isfinite(norm):
            self._skip_nonfinite(state, norm)
        elif norm == 0:
            state.skipped += 1
            self.optimizer.clear()
        else:
            self._nonfinite = 0
            event = OptimizerEvent(state.number, state.seen_updates - 1, norm)
            self.run.stack.hook.before_optimizer_step(run=self.run, event=event)
            self.optimizer.update(state.number)
            state.updates += 1

    def _skip_nonfinite(self, state: _Step, norm: float) -> None:
        state.skipped += 1
        state.nonfinite += 1
        self._nonfinite += 1
        self.optimizer.clear()
        if self._nonfinite >= self.config.max_nonfinite:
            raise RelaxError(
                f"trainer.max_nonfinite: the gradient norm of {self._nonfinite} updates in a row was {norm} (step "
                f"{state.number}); {self.config.max_nonfinite - 1} are allowed: lower trainer.lr, or look at that step"
            )

    def _metrics(self, state: _Step) -> dict[str, float]:
        return state.tally.means() | {
            "lr": learning_rate(self.config, state.number, self.run.config.steps),
            "computed_tokens": state.computed,
            "nonfinite": state.nonfinite,
        }

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from named_tensors(self.model)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {**dict(named_tensors(self.model)), **self.optimizer.masters()}
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / _WEIGHTS)
        torch.save(self.optimizer.state(), folder / _OPTIMIZER)
        (folder / _COUNTERS).write_text(json.dumps({"nonfinite": self._nonfinite}))

    def load(self, folder: Path) -> None:
        try:
            tensors = load_file(folder / _WEIGHTS)
            optimizer = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
            counters = json.loads((folder / _COUNTERS).read_text())
        except Exception as error:  # rubbish raises whatever it meets first
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"trainer: {folder} cannot be read: {said}") from error
        own = {**dict(named_tensors(self.model)), **self.optimizer.masters()}
        for name in sorted(own.keys() ^ tensors.keys()):
            where = "the checkpoint" if name in own else "the model"
            raise CheckpointError(
                f"trainer: {folder / _WEIGHTS}: {name!r} is missing in {where}; it is of another model"
            )
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                found, wanted = tuple(tensors[name].shape), tuple(tensor.shape)
                raise CheckpointError(f"trainer: {folder / _WEIGHTS}: {name!r} has shape {found}, the model {wanted}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self.optimizer.spread()
        self.optimizer.restore(optimizer)
        self._nonfinite = counters["nonfinite"]


@dataclass(slots=True)
class _Step:
    """What one training step has come to so far."""

    number: int
    algorithm: Algorithm
    tally: Tally = field(default_factory=Tally)
    cuts: list[tuple[list[str], bool]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    """Of the micro-batches of the update that is open."""
    units: float = 0.0
    open: bool = False
    seen_updates: int = 0
    updates: int = 0
    skipped: int = 0
    nonfinite: int = 0
    computed: int = 0
    compared: set[str] = field(default_factory=set)

    def close(self) -> tuple[float, list[Tensor]]:
        """End the open update; its units and its micro-batches' losses."""
        units, losses = self.units, self.losses
        self.units, self.losses, self.open = 0.0, [], False
        self.seen_updates += 1
        return units, losses

    def note(self, rows: Sequence[Row], loss: Loss, outputs: Outputs) -> None:
        self.tally.add(loss.metrics)
        if outputs.entropy_BT is not None and "entropy" not in loss.metrics:
            count = torch.tensor(sum(int(row.columns["mask"].sum()) for row in rows))
            self.tally.add({"entropy": (outputs.entropy_BT.detach().sum(), count)})

    def first_time(self, rows: Sequence[Row]) -> bool:
        """Whether these rows are trained for the first time in this step (epochs repeat them)."""
        ids = {row.id for row in rows}
        new = not ids & self.compared
        self.compared |= ids
        return new


def _device(config: TrainerConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(config: TrainerConfig, device: str) -> torch.dtype:
    name = ("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _without_dropout(model: torch.nn.Module, checkpointing: bool) -> None:
    """Evaluation mode; or, for gradient checkpointing, training mode with every probability at 0."""
    model.eval()
    if not checkpointing:
        return
    # The newer name first: the older one warns where both exist.
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(f"trainer.gradient_checkpointing: {type(model).__name__} does not offer it; leave it out")
    enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = name.endswith("dropout") or (
                name == "p" and isinstance(module, torch.nn.modules.dropout._DropoutNd)
            )
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_outputs(outputs: frozenset[str], who: str) -> None:
    if unknown := sorted(outputs - OUTPUTS):
        known = ", ".join(sorted(OUTPUTS))
        raise ConfigError(f"{who}: asks for the output {unknown[0]!r}; the trainer 'torch' computes {known}")


def _zeros(row: Row, outputs: frozenset[str]) -> Columns:
    import numpy as np

    return {name: np.zeros(len(row.columns["tokens"]), np.float32) for name in outputs}
