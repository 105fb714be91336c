"""The stage ``reference``: log-probs of the sampled tokens under a model that the policy is held near."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from relax_core.errors import CheckpointError, ConfigError, RelaxError
from relax_core.torch.model_stage import ModelStage
from relax_core.torch.optim import named_tensors
from relax_core.torch.stage_config import ReferenceConfig
from relax_core.torch.swap import take_weights
from relax_core.weight_receiver import Receiver

if TYPE_CHECKING:
    import torch

    from relax_core.setup import StageSetup
    from relax_core.weights import Manifest, WeightUpdate

_WEIGHTS = "weights.safetensors"


class Reference(ModelStage):
    """Makes ``ref_logprobs``: float32 (T,), 0 where nothing was sampled; of the same tempered distribution, without the
    banned tokens, that the policy is sampled from. With the policy's weights it is the trainer's own log-prob.

    With ``refresh: k`` it takes the policy's published weights at versions k, 2 k, ...: rows that are played by one of
    these, or wait for their log-probs then, are compared with it. At max_staleness 0 none waits, and which rows see
    which reference does not depend on timing.
    """

    name = "reference"
    sources = {"ref_logprobs": ("logprobs", "logprobs")}

    def __init__(self, config: ReferenceConfig, setup: StageSetup) -> None:
        super().__init__(config, setup)
        self.refresh = config.refresh
        self.receiver = Receiver()
        self.refreshed = False
        self._fits = False

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take the weights of a version that ``refresh`` divides; verified first, all or none.

        Raises ConfigError at the first version, so at the start of the run, if they are not of this model's shape.
        """
        if self.refresh is None:
            return
        if not self._fits and (line := misfit(self.model, update.manifest)):
            raise ConfigError(
                f"{self.where}.refresh: found {self.refresh}, but the policy's weights do not fit this stage's model: "
                f"{line}; leave refresh out, or take a model of the policy's shape"
            )
        self._fits = True
        number = update.manifest.version.number
        if number == 0 or number % self.refresh:
            return
        weights = await asyncio.to_thread(self.receiver.receive, update)
        async with self.weights_lock:
            take_weights(self.model, weights, self.receiver.kept(update))
        self.receiver.took(update, adopted=False)
        self.refreshed = True

    def save(self, folder: Path) -> None:
        """Its weights, once they are not those of ``model`` any more."""
        if self.refreshed:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: t.contiguous() for name, t in named_tensors(self.model)}, folder / _WEIGHTS)

    def load(self, folder: Path) -> None:
        """Raises CheckpointError for weights that cannot be read, or are of another model."""
        path = folder / _WEIGHTS
        if not path.exists():
            return
        try:
            take_weights(self.model, list(load_file(path).items()))
        except RelaxError as error:
            raise CheckpointError(f"{self.where}: {path} is of another model: {error}") from error
        except Exception as error:  # rubbish raises whatever it meets first
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise CheckpointError(f"{self.where}: {path} cannot be read: {said}") from error
        self.receiver.close()  # whatever base it held, these are other weights
        self.refreshed = True


def misfit(model: torch.nn.Module, manifest: Manifest) -> str | None:
    """The first published tensor that the model cannot take, or None. Of tied parameters one name is enough."""
    own = model.state_dict(keep_vars=True)
    for info in manifest.tensors:
        if info.name not in own:
            return f"it has no {info.name}"
        if tuple(own[info.name].shape) != info.shape:
            return f"{info.name} has the shape {info.shape} there and {tuple(own[info.name].shape)} here"
    given = {id(own[info.name]) for info in manifest.tensors}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in given]
    return f"they lack {missing[0]}" if missing else None
