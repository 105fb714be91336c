"""Settings of the embedded engine and trainer, apart from their code: reading a run file imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from relax_core.interfaces import ComponentConfig

Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]
"""``cpu``, ``cuda``, one GPU of several by its number as in ``cuda:1``, or ``auto``: a GPU where there is one."""


class EngineConfig(ComponentConfig):
    """The engine that samples with the transformers model itself."""

    device: Device = "auto"
    """Where the engine's copy of the model lives; ``auto``: a GPU where there is one. ``cuda:1``: on that of several;
    the trainer's is the first one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Of its weights and of its cache; ``auto``: bfloat16 on a GPU, float32 on a CPU."""
    max_rows: PositiveInt = 512
    """Requests of one pool (training, evaluation) that are decoded together; more wait."""
    max_cache_tokens: PositiveInt | None = None
    """Bound of one pool's cache: rows x tokens of the longest (its prompt and its limit of new tokens). Requests wait
    beyond it, and one that alone exceeds it is refused; default: only max_rows bounds it."""
    max_prefill_tokens: PositiveInt = 16384
    """Tokens of prompts, padding included, that one forward may read; a longer prompt goes alone."""
    threads: PositiveInt | None = None
    """Torch threads of the engine's process; default: 1 on a CPU (more makes small models slower), else torch's own."""


class CriticConfig(ComponentConfig):
    """How the critic learns, where the algorithm has one; everything else is as the trainer's own settings say."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic's AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which it rises linearly to ``lr``."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the critic's gradient in an update; null: not clipped."""


class TrainerConfig(ComponentConfig):
    """The trainer that runs the transformers model itself, in one process or over several ranks."""

    over_ranks: ClassVar[bool] = True
    """Whether ranks can train together."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up, by the number of the step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which it rises linearly to ``lr``."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What linear and cosine schedules reach at the last step, as a part of ``lr``."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of AdamW's two averages."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient of an update; null: not clipped."""
    max_nonfinite: PositiveInt = 3
    """An update whose gradient is NaN or infinite is skipped; so many in a row end the run."""
    tokens_per_micro_batch: PositiveInt | None = None
    """Computed tokens of one forward and backward, on each rank; default: 4096 on a CPU (more outgrows its caches),
    16384 on a GPU. A row is never cut. The gradient does not depend on it, the memory does."""
    layout: Literal["shared", "packed", "padded"] = "shared"
    """``shared``: each unique prompt is computed once for all rows that begin with it, and nothing is padded.
    ``packed``: every row with its own prompt. ``padded``: one row a line, padded to the longest; models whose rows
    cannot share a sequence get it by themselves. All have the same gradient."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where the trainer's copy of the model lives; ``auto``: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Of forward, backward and published weights; ``auto``: bfloat16 on a GPU, float32 on a CPU. The weights that AdamW
    changes, its averages and the gradient's sum are always float32."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it made: less memory, a third slower."""
    threads: PositiveInt | None = None
    """Torch threads of the trainer's process; default: 1 on a CPU (more slows small models), else torch's own."""
    sharding: Literal["replicate", "fsdp"] = "replicate"
    """Over several ranks: ``replicate``: each has the whole model, and gradients are summed once an update. ``fsdp``:
    each keeps a part of every weight and of AdamW's averages, and gathers a layer when it computes it (FSDP2)."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that do not train, of policy and critic, such as ``*visual*``."""
    critic: CriticConfig = CriticConfig()
    """Of algorithms with a critic, such as ``ppo``: a second copy of the model that learns the value of each state."""

    def unused(self, outputs: frozenset[str]) -> Iterator[str]:
        """See ``Trainer``."""
        changed = [name for name, value in self.critic if value != getattr(CriticConfig(), name)]
        if changed and "values" not in outputs:
            yield (
                f"critic: {', '.join(changed)} differ{'s' if len(changed) == 1 else ''} from the default, but the "
                "algorithm asks for no values, so there is no critic: leave critic out, or take an algorithm with one, "
                "such as ppo"
            )

    def for_critic(self) -> Self:
        """The settings by which the critic learns."""
        own = self.critic
        return self.model_copy(update={"lr": own.lr, "warmup_steps": own.warmup_steps, "clip": own.clip})
