"""Settings of the stages that run a frozen model, apart from their code: reading a run file imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from relax_core.config.schema import ComponentSection
from relax_core.interfaces import ComponentConfig

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig


class ModelStageConfig(ComponentConfig):
    """What stages with a model have in common."""

    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where the stage's copy of the model lives; ``auto``: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Of its weights; ``auto``: bfloat16 on a GPU, float32 on a CPU."""
    layout: Literal["shared", "packed", "padded"] = "shared"
    """How rows lie in a forward; see the trainer's setting. The results do not depend on it."""
    tokens_per_micro_batch: PositiveInt | None = None
    """Computed tokens of one forward; default: 4096 on a CPU, 16384 on a GPU."""


class ReferenceConfig(ModelStageConfig):
    """The model that a KL penalty holds the policy near."""

    model: ComponentSection | None = None
    """A section like the run file's ``model``, with the same tokens (the vocabulary may be padded to another size);
    default: the run's own model, with its initial weights."""
    refresh: PositiveInt | None = None
    """Steps after which the reference becomes the policy as it then is, again and again; it must then have the policy's
    shape. Default: never."""

    def notes(self, run: RunConfig) -> Iterator[str]:
        """See ``Stage``."""
        if self.refresh is not None and self.refresh >= run.steps:
            yield (
                f"refresh is {self.refresh} and steps is {run.steps}: no step sees a refreshed reference; it stays "
                "what it is at the start"
            )


class TeacherConfig(ModelStageConfig):
    """The model that distillation learns from."""

    model: ComponentSection
    """A section like the run file's ``model``, with the same tokens; the vocabulary may be padded to another size."""
    top_k: PositiveInt = 64
    """Most probable tokens that are kept at each place, where the algorithm compares these; at most as many as the
    policy may sample."""
