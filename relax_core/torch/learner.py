"""What learns in the trainer, policy or critic: whether an update moves it, and the files from which it goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_core.errors import CheckpointError, RelaxError
from relax_core.torch.config import TrainerConfig
from relax_core.torch.optim import Optimizer, learning_rate, named_tensors

_WEIGHTS, _OPTIMIZER, _COUNTERS = "weights.safetensors", "optimizer.pt", "trainer.json"


class Learner:
    """A module with an optimizer of its own. ``setting``: where the run file says how it learns."""

    def __init__(self, module: torch.nn.Module, config: TrainerConfig, steps: int, setting: str) -> None:
        self.module, self.config, self.steps, self.setting = module, config, steps, setting
        self.optimizer = Optimizer(module, config, steps)
        self._nonfinite = 0

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

    def save(self, folder: Path) -> None:
        """Everything a bit-exact continuation needs."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.contiguous() for name, t in self._tensors().items()}, folder / _WEIGHTS)
        torch.save(self.optimizer.state(), folder / _OPTIMIZER)
        (folder / _COUNTERS).write_text(json.dumps({"nonfinite": self._nonfinite}))

    def load(self, folder: Path) -> None:
        """Continue from what ``save`` wrote. Raises CheckpointError when it cannot be read or is of another model."""
        try:
            tensors = load_file(folder / _WEIGHTS)
            optimizer = torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True)
            counters = json.loads((folder / _COUNTERS).read_text())
        except Exception as error:  # rubbish raises whatever it meets first
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"trainer: {folder} cannot be read: {said}") from error
        own = self._tensors()
        _check_same(own, tensors, folder / _WEIGHTS)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self.optimizer.spread()
        self.optimizer.restore(optimizer)
        self._nonfinite = counters["nonfinite"]

    def _tensors(self) -> dict[str, Tensor]:
        """The module's tensors by name, those that are learned in float32."""
        return {**dict(named_tensors(self.module)), **self.optimizer.masters()}


def _check_same(own: dict[str, Tensor], found: dict[str, Tensor], file: Path) -> None:
    for name in sorted(own.keys() ^ found.keys()):
        where = "the checkpoint" if name in own else "the model"
        raise CheckpointError(f"trainer: {file}: {name!r} is missing in {where}; it is of another model")
    for name, tensor in own.items():
        if tensor.shape != found[name].shape:
            shapes = f"{tuple(found[name].shape)}, the model {tuple(tensor.shape)}"
            raise CheckpointError(f"trainer: {file}: {name!r} has shape {shapes}")
