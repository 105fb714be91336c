"""All hooks of Relax, in the order of a run. Nothing else defines a hook.

Two families on one pluggy manager. ``Providers`` are called once per process and say what a distribution offers.
``Callback`` is the life cycle: subclass it and override what you need (no decorator), or put functions of the same
names into a plugin module. Each hook gets the ``run`` and one frozen event, so that an event can grow without breaking
a signature. Hooks that return a value are chained: each gets the former's result, listed first runs first.

Every hook says *where* it fires: controller, rollout, or every trainer rank. A callback's state lives only there; that
of the controller and of the trainer's first rank is saved. Hooks fire per run, step, group, batch or checkpoint, never
per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from relax_core.interfaces import Component

if TYPE_CHECKING:
    from relax_core.interfaces import Batch, Outputs
    from relax_core.run import Run
    from relax_core.types import Group, LearnerName, Sampling, Task, Version

spec = pluggy.HookspecMarker("relax")
impl = pluggy.HookimplMarker("relax")

API_VERSION = 1
"""A plugin module may state ``relax_api = 1``; another number is refused at start."""


class Providers:
    """Called once per process. Each returns ``{id: Component(...)}``; two of one id are an error that names both."""

    @spec
    def relax_modalities(self) -> Mapping[str, Component]:
        """Decoders: classes of ``Modality``."""
        return {}

    @spec
    def relax_environments(self) -> Mapping[str, Component]:
        """Classes of ``Environment``."""
        return {}

    @spec
    def relax_rewards(self) -> Mapping[str, Component]:
        """Classes of ``Reward``."""
        return {}

    @spec
    def relax_algorithms(self) -> Mapping[str, Component]:
        """Classes of ``Algorithm``."""
        return {}

    @spec
    def relax_models(self) -> Mapping[str, Component]:
        """Classes of ``ModelAdapter``."""
        return {}

    @spec
    def relax_engines(self) -> Mapping[str, Component]:
        """Classes of ``Engine``."""
        return {}

    @spec
    def relax_trainers(self) -> Mapping[str, Component]:
        """Classes of ``Trainer``."""
        return {}

    @spec
    def relax_runtimes(self) -> Mapping[str, Component]:
        """Classes of ``Runtime``: where roles live."""
        return {}

    @spec
    def relax_transports(self) -> Mapping[str, Component]:
        """Classes of ``Transport``: how weights travel."""
        return {}

    @spec
    def relax_stages(self) -> Mapping[str, Component]:
        """Classes of ``Stage``; each ``Component`` says which columns it ``makes``.

        One is built when the algorithm needs such a column, with its settings (if it has a Config) and a StageSetup.
        """
        return {}

    @spec
    def relax_callbacks(self) -> Mapping[str, Component]:
        """Classes of ``Callback`` that a run file may list under ``callbacks``."""
        return {}


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepStart:
    step: int


@dataclass(frozen=True, slots=True)
class SamplingFor:
    """The task whose tokens are about to be drawn, and whether for training or for an evaluation."""

    task: Task
    evaluation: str | None


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """A group with its trajectories. Do not change it: return values change things."""

    group: Group


@dataclass(frozen=True, slots=True)
class BatchReady:
    """The groups of a step, scored and credited, in training order (their ids)."""

    step: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForwardEvent:
    """A micro-batch about to run, or just run, through the model of policy or critic."""

    step: int
    batch: Batch
    learner: LearnerName = "policy"


@dataclass(frozen=True, slots=True)
class OptimizerEvent:
    """An optimizer update of policy or critic about to happen: its number in the step, the norm before clipping."""

    step: int
    update: int
    grad_norm: float
    learner: LearnerName = "policy"


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    version: Version
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """Results by evaluation name, each a mapping such as {"accuracy": 0.9, "mean@1": ...}."""

    step: int
    results: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class StepEnd:
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A checkpoint folder being written or read."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class ExceptionEvent:
    error: BaseException


class Callback:
    """The life cycle of a run. Override what you need; a method that looks like a hook and is none is refused."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart (JSON values); saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take ``state_dict``'s value back, before ``on_load_checkpoint`` fires."""

    @spec
    def setup(self, run: Run) -> None:
        """Once, before any role is built. Where: controller."""

    @spec
    def on_load_checkpoint(self, run: Run, event: CheckpointEvent) -> None:
        """When a run resumes, after everything was restored. Where: controller."""

    @spec
    def on_train_start(self, run: Run) -> None:
        """Once, when every role is ready. Where: controller."""

    @spec
    def on_step_start(self, run: Run, event: StepStart) -> None:
        """Before a step's groups are taken from the bus. Where: controller."""

    @spec
    def on_group_start(self, run: Run, event: GroupEvent) -> None:
        """When a group gets its slot and its members begin to play. Where: rollout."""

    @spec
    def sampling_request(self, run: Run, value: Sampling, event: SamplingFor) -> Sampling:
        """Chained: how a task's tokens are drawn; once per play. Where: rollout.

        Of a training play only ``max_new_tokens`` may change: it must sample from the distribution that is trained.
        """
        return value

    @spec
    def shape_rewards(self, run: Run, value: list[float | None], event: GroupEvent) -> list[float | None]:
        """Chained: the members' total rewards, once a group is scored; None stays None. Where: controller."""
        return value

    @spec
    def filter_group(self, run: Run, value: str | None, event: GroupEvent) -> str | None:
        """Chained: why this scored group must not be trained, or None to keep it. Where: controller.

        ``raw_reward`` of the trajectories is the reward before shaping: decide on that one.
        """
        return value

    @spec
    def on_group_scored(self, run: Run, event: GroupEvent) -> None:
        """After scoring, shaping and filtering of one group. Where: controller."""

    @spec
    def on_batch_ready(self, run: Run, event: BatchReady) -> None:
        """When all groups of a step are known, before its last optimizer update ends. Where: controller."""

    @spec
    def before_forward(self, run: Run, value: Batch, event: ForwardEvent) -> Batch:
        """Chained: the micro-batch that the loss will see, the critic's too. Where: every trainer rank."""
        return value

    @spec
    def after_forward(self, run: Run, value: Outputs, event: ForwardEvent) -> Outputs:
        """Chained: the policy's outputs that the loss will see. Where: every trainer rank."""
        return value

    @spec
    def before_optimizer_step(self, run: Run, event: OptimizerEvent) -> None:
        """After clipping, before each update of policy or critic that is not skipped. Where: every trainer rank."""

    @spec
    def on_weights_published(self, run: Run, event: WeightsPublished) -> None:
        """When every engine serves the new version. Where: controller."""

    @spec
    def on_evaluation_end(self, run: Run, event: EvaluationEnd) -> None:
        """When all evaluations due at a step are done. Where: controller."""

    @spec
    def on_step_end(self, run: Run, event: StepEnd) -> None:
        """When a step's metrics are written. Where: controller."""

    @spec
    def on_save_checkpoint(self, run: Run, event: CheckpointEvent) -> None:
        """While a checkpoint is written: files added to ``event.folder`` become part of it. Where: controller."""

    @spec
    def on_exception(self, run: Run, event: ExceptionEvent) -> None:
        """When the run ends by an error or by Ctrl-C. Where: controller."""

    @spec
    def on_train_end(self, run: Run) -> None:
        """Once, after the last step, its evaluation and its checkpoint. Where: controller."""

    @spec
    def teardown(self, run: Run) -> None:
        """Once, at the very end, also after an error. Where: controller."""
