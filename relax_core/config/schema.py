"""The run file's own fields. Sections with an ``id`` belong to components: the Config it selects validates them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from relax_core.interfaces import Interrupt

MetadataValue = str | int | float | bool
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(BaseModel):
    """A part of the run file: strict, frozen, unknown keys refused."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class ComponentSection(Section):
    """``{id: ..., <fields of the component's Config>}``. What the id selects validates the rest."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", use_attribute_docstrings=True)

    id: str
    """Which component."""

    @property
    def settings(self) -> dict[str, Any]:
        """The raw fields that belong to the component."""
        return dict(self.model_extra or {})


class PlayLimits(Section):
    """What one play may use. A play that reaches ``turns``, ``tokens`` or ``tool_calls`` ends there, and is trained."""

    turns: PositiveInt | None = None
    """Replies of the policy; default: as many as the environment asks for."""
    tokens: PositiveInt = 131_072
    """Of one sample: what was said to the policy and what it replied. More said at once is an error of the play."""
    tool_calls: Annotated[int, Field(ge=0)] | None = None
    """Tools that the policy calls; default: no limit."""
    seconds: Annotated[float, Field(gt=0)] = 600.0
    """Of tools and environment, by the clock; the time in which the policy is sampled does not count. A play that
    takes longer is ended, and is an error."""


class EnvironmentSection(ComponentSection):
    name: Name | None = None
    """How metrics and evaluations call it; default: the id."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the step's groups, relative to the other environments."""
    limits: PlayLimits = PlayLimits()

    @property
    def label(self) -> str:
        return self.name or self.id


class RewardSection(ComponentSection):
    name: Name | None = None
    """How metrics call it; default: the id."""
    weight: float = 1.0
    """Factor in the sum of rewards."""
    environments: tuple[str, ...] | None = None
    """Names of the environments that it scores; default: all."""
    when: dict[str, MetadataValue | tuple[MetadataValue, ...]] = {}
    """Scores only tasks whose metadata have these values, or one of several: ``{data_source: [gsm8k, aime]}``."""
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for the plays of a group, from when scoring begins, waiting included; what is not scored by then
    abstains, and is counted as a failure."""

    @property
    def label(self) -> str:
        return self.name or self.id


class DataSection(Section):
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of an environment's rows that may be bad; more end the run. Bad rows are skipped, counted and named."""
    workers: PositiveInt = 2
    """Threads that read, decode and encode tasks ahead of the rollout."""
    ahead: PositiveInt | None = None
    """Tasks that are made ready before they are needed, at most; default: those of one step."""
    media_bytes: PositiveInt = 1_000_000_000
    """Media that no row needs any more are kept up to this size; tasks are made ready ahead up to half of it."""
    max_prompt_tokens: PositiveInt | None = None
    """A longer prompt is treated as ``long_prompts`` says."""
    long_prompts: Literal["error", "skip", "cut_start", "cut_end"] = "error"
    """``error`` ends the run; ``skip`` leaves the task out and counts it; ``cut_start`` and ``cut_end`` take text away
    from the start or the end of the longest piece of text, never a medium, and count the task."""


class SamplingSection(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits, in the engine and in the trainer; 0 (greedy) only in evaluations."""
    max_new_tokens: PositiveInt = 256
    """Limit of one reply."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Evaluations only: a training rollout must sample from the distribution that is trained."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Evaluations only; 0: off."""


class EvaluationSection(Section):
    name: Name
    """How metrics call it."""
    environment: str
    """Name of the environment whose ``eval`` split is played."""
    every: PositiveInt | None = None
    """Steps between two evaluations; default: only at the end."""
    at_start: bool = False
    """Whether version 0 is evaluated too."""
    size: PositiveInt | None = None
    """The first so many tasks of the split; default: all."""
    n: PositiveInt = 1
    """Plays per task: mean@n and pass@k for k up to n."""
    sampling: SamplingSection | None = None
    """Default: the run's, but greedy."""
    correct: str | None = None
    """The reward whose value above ``threshold`` means a correct play; default: the first reward."""
    threshold: Annotated[float, Field(ge=0)] = 0.5
    disjoint: bool = True
    """Fail when a training task has the same content as one of these, by hash."""


class CheckpointSection(Section):
    every: PositiveInt = 50
    """Steps between two checkpoints; one is always written at the end."""
    keep: Annotated[int, Field(ge=2)] = 3
    """Newest ones kept; at least two, so that an altered one has a predecessor."""


class BusSection(Section):
    max_rows: PositiveInt = 200_000
    """Rows held at once, those kept for the next checkpoint included; producers wait beyond."""
    max_bytes: PositiveInt = 4_000_000_000
    """Bytes of their columns held at once."""


class JournalSection(Section):
    keep_steps: PositiveInt = 10_000
    """Steps whose batches stay on disk for ``relax replay``."""


class TrajectoriesSection(Section):
    every: PositiveInt = 1
    """Steps between two whose trajectories are written."""
    media: bool = True
    """Whether images, sounds and videos are written beside them, by content hash."""


class RunConfig(Section):
    """A run file."""

    name: Name
    """The run's directory is ``<runs>/<name>``."""
    runs: Path = Path("runs")
    """Where run directories live."""
    plugins: tuple[str, ...] = ()
    """Plugins to activate, in the order in which their hooks run; the built-in suites always are active."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of every draw and of random initial weights."""
    steps: PositiveInt
    """Training steps, one policy version each."""
    groups_per_step: PositiveInt
    """Tasks whose groups are trained in a step."""
    group_size: PositiveInt = 8
    """Plays of each task."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Most policy versions that a trained token may lag behind; 0 is synchronous, on-policy training."""
    order: Literal["started", "finished"] = "started"
    """In which order the trainer takes groups; ``finished`` may evict late ones and favours short answers."""
    max_replays: Annotated[int, Field(ge=0)] = 3
    """How often an evicted group is played again before its task is dropped."""
    max_failed_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the newest plays (of two steps, and of 20 groups at least) that may fail; more end the run. A play fails
    when it raises, takes too long, or says what the model cannot read; it is counted, and not trained."""
    interrupt: Interrupt = "continue"
    """What happens to running requests when new weights arrive."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates a step (mini-batches x epochs)."""
    epochs: PositiveInt = 1
    """Passes over a step's batch; must divide updates_per_step."""
    old: Literal["engine", "recompute"] = "recompute"
    """Where the policy at the start of a step comes from when a ratio is needed."""
    model: ComponentSection
    environments: Annotated[tuple[EnvironmentSection, ...], Field(min_length=1)]
    rewards: Annotated[tuple[RewardSection, ...], Field(min_length=1)]
    algorithm: ComponentSection
    sampling: SamplingSection = SamplingSection()
    modalities: tuple[ComponentSection, ...] = ()
    """Decoders with settings of their own; one replaces the built-in decoder (image, audio, video) of its kind."""
    data: DataSection = DataSection()
    engine: ComponentSection = ComponentSection(id="torch")
    trainer: ComponentSection = ComponentSection(id="torch")
    transport: ComponentSection | None = None
    """How weights travel; default: what the runtime chooses."""
    runtime: ComponentSection = ComponentSection(id="local")
    stages: tuple[ComponentSection, ...] = ()
    """Settings of the stages that make what the algorithm needs (a reference, a teacher, ...); one that is needed and
    not listed runs with its defaults."""
    callbacks: tuple[ComponentSection, ...] = ()
    """In the order in which their hooks run."""
    evaluation: tuple[EvaluationSection, ...] = ()
    checkpoint: CheckpointSection = CheckpointSection()
    bus: BusSection = BusSection()
    journal: JournalSection = JournalSection()
    trajectories: TrajectoriesSection = TrajectoriesSection()
    versions: dict[str, str] = Field(default_factory=dict)
    """Written into the resolved file: active plugin -> distribution and version. Others are refused when it is read."""
