"""What learns in the trainer, policy or critic: whether an update moves it, and the files from which it goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from relax_core.errors import CheckpointError, RelaxError
from relax_core.torch.config import TrainerConfig
from relax_core.torch.fsdp import Shards, cut_as, part_of, whole
from relax_core.torch.host_memory import HostMemory, Put, held, move, onto, settle
from relax_core.torch.optim import Optimizer, learning_rate, named_tensors
from relax_core.torch.ranks import ALONE, Ranks

_WEIGHTS, _OPTIMIZER, _COUNTERS = "weights.safetensors", "optimizer.pt", "trainer.json"


class Learner:
    """A module with an optimizer of its own. ``setting``: where the run file says how it learns.

    Over several ranks all methods are called on each of them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: TrainerConfig,
        steps: int,
        setting: str,
        ranks: Ranks = ALONE,
        shards: Shards | None = None,
    ) -> None:
        self.module, self.config, self.steps, self.setting = module, config, steps, setting
        self.ranks, self.shards = ranks, shards
        self.optimizer = Optimizer(module, config, steps, ranks, shards)
        self._nonfinite = 0
        self._host = HostMemory()

    def may_move(self, step: int, norm: float) -> bool:
        """Whether a gradient of this norm moves the weights. One that does not is forgotten: zero, absent, not finite.

        Raises RelaxError after ``max_nonfinite`` of the last kind in a row.
        """
        if norm != 0 and math.isfinite(norm):
            self._nonfinite = 0
            return True
        self.optimizer.clear()
        if norm != 0:
            self._nonfinite += 1
            self._end_when_hopeless(step, norm)
        return False

    def _end_when_hopeless(self, step: int, norm: float) -> None:
        most = self.config.max_nonfinite
        if self._nonfinite >= most:
            raise RelaxError(
                f"trainer.max_nonfinite: the gradient norm of {self._nonfinite} updates in a row was {norm} (step "
                f"{step}); {most - 1} are allowed: lower {self.setting}.lr, or look at that step"
            )

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate(self.config, step, self.steps)

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by their Hugging Face names, as forwards compute with them. Collective where divided."""
        for name, tensor in named_tensors(self.module):
            yield name, self._computed(tensor)

    def _computed(self, tensor: Tensor) -> Tensor:
        if self.shards is None or not isinstance(tensor, DTensor):
            return tensor
        return whole(tensor).to(self.shards.dtype)

    def frozen_names(self) -> frozenset[str]:
        """Names of ``weights`` that no update changes."""
        trained = {id(p) for p in self.module.parameters() if p.requires_grad}
        own = self.module.state_dict(keep_vars=True)
        return frozenset(name for name, _ in named_tensors(self.module) if id(own[name]) not in trained)

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Everything a bit-exact continuation needs; the same for any number of ranks. Rank 0 writes."""
        tensors = {**dict(self.weights()), **self.optimizer.masters()}
        optimizer = self.optimizer.state()
        error: Exception | None = None
        try:
            if self.ranks.first:
                folder.mkdir(parents=True, exist_ok=True)
                save_file({name: t.contiguous() for name, t in tensors.items()}, folder / _WEIGHTS)
                torch.save(optimizer, folder / _OPTIMIZER)
                (folder / _COUNTERS).write_text(json.dumps({"nonfinite": self._nonfinite}))
        except OSError as failed:
            error = failed
        self.ranks.agree(error)

    def load(self, folder: Path) -> None:
        """Continue from what ``save`` wrote. Raises CheckpointError when it cannot be read or is of another model.

        Rank 0 reads, and gives the others what they need.
        """
        found: _Files = ({}, {}, {})
        error: Exception | None = None
        try:
            if self.ranks.first:
                found = self._read(folder)
        except CheckpointError as failed:
            error = failed
        self.ranks.agree(error)
        tensors, state, counters = found
        with torch.no_grad():
            for name, (like, own) in self._own().items():
                own.copy_(cut_as(like, self._given(tensors.get(name), like.shape, torch.float32).to(own)))
        self.optimizer.spread()
        self.optimizer.forget()
        shapes = {name: {key: tuple(t.shape) for key, t in values.items()} for name, values in state.items()}
        for name, keys in self.ranks.broadcast(shapes).items():
            mine = state.get(name, {})
            self.optimizer.take(name, {k: self._given(mine.get(k), shape, torch.float32) for k, shape in keys.items()})
        self._nonfinite = self.ranks.broadcast(counters)["nonfinite"]

    def _given(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Rank 0's tensor, on every rank, in main memory."""
        if self.ranks.alone and tensor is not None:
            return tensor
        full = torch.empty(tuple(shape), dtype=dtype) if tensor is None else tensor.to(dtype).contiguous()
        return self.ranks.spread_(full)

    def _own(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What is saved, by name: the tensor, and where this rank keeps its part of it; of learned ones in float32."""
        found = {name: (tensor, part_of(tensor)) for name, tensor in named_tensors(self.module)}
        return {**found, **self.optimizer.parts()}

    def _read(self, folder: Path) -> _Files:
        try:
            tensors = load_file(folder / _WEIGHTS)
            optimizer = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
            counters = json.loads((folder / _COUNTERS).read_text())
            state = self.optimizer.by_name(optimizer)
        except Exception as error:  # rubbish raises whatever it meets first
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"trainer: {folder} cannot be read: {said}") from error
        _check_same({name: like for name, (like, _) in self._own().items()}, tensors, folder / _WEIGHTS)
        return tensors, state, counters

    # --- memory -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Everything to main memory, with the same bits; the gradient is forgotten."""
        self.optimizer.clear()
        self._move(self._host.room(tensor for _, tensor in self.tensors()))

    def enter(self, device: str) -> None:
        """Undo ``leave``; its memory is kept for the next time."""
        self._move(onto(device))

    def _move(self, put: Put) -> None:
        if self.shards is not None:
            self.shards.move(put)
        else:
            move(self.module, put)
        self.optimizer.move(put)
        settle()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that it keeps on this rank: ``weights``, ``masters``, ``gradients``, ``optimizer``."""
        for tensor in held(self.module):
            yield "weights", part_of(tensor)
        yield from self.optimizer.tensors()


_Files = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, int]]


def _check_same(own: dict[str, Tensor], found: dict[str, Tensor], file: Path) -> None:
    for name in sorted(own.keys() ^ found.keys()):
        where = "the checkpoint" if name in own else "the model"
        raise CheckpointError(f"trainer: {file}: {name!r} is missing in {where}; it is of another model")
    for name, tensor in own.items():
        if tensor.shape != found[name].shape:
            shapes = f"{tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
            raise CheckpointError(f"trainer: {file}: {name!r} has shape {shapes}")
