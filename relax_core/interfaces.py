"""The narrow seams of Relax: what each kind of component promises. Everything else is behind them.

A component is a class with a nested ``Config`` (or one given from a light module, see ``Component``). The core builds
it from its section of the run file. Shape legend: B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from relax_core.types import (
    Decoded,
    DrawKey,
    Encoded,
    Group,
    MediaKind,
    MediaPart,
    MediaRef,
    Message,
    Sampling,
    Stop,
    Task,
    Trajectory,
    Version,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from relax_core.bus import Claim
    from relax_core.chat import Chat
    from relax_core.config.schema import RunConfig
    from relax_core.media import MediaStore
    from relax_core.weights import WeightUpdate

Columns = Mapping[str, Any]
"""Columns of one row: numpy arrays of length T, numbers, or small objects."""

Interrupt = Literal["continue", "abort", "drain"]


class ComponentConfig(BaseModel):
    """Base of every component's settings: strict, frozen, unknown keys refused. Document a field under the field."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Component:
    """What a provider hook returns for one id.

    ``target`` is ``"package.module:Class"`` and is imported only where the role is built. A class whose module imports
    something heavy gives its ``config`` from a module that does not; a light class nests ``Config`` and leaves it out.
    """

    target: str
    config: type[ComponentConfig] | None = None
    summary: str = ""


class Configurable:
    """Built from its own ``Config``; ``check`` may refuse what only the whole run file shows to be wrong."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        """One line for each setting that cannot work in ``run``: what was found, what is allowed, what to do."""
        return ()


# --- what a user of Relax writes -----------------------------------------------------------------------------------


class Environment(Configurable, ABC):
    """Tasks, and how one is played. The author writes control flow over messages and never sees a token."""

    @abstractmethod
    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        """The tasks of a split, in a fixed order (a lazy sequence is fine). Ids are unique in the environment."""

    @property
    def bad_rows(self) -> Sequence[str]:
        """One line for each row of data that was left out; complete once ``tasks`` was called."""
        return ()

    def verify(self, decode: Callable[[MediaPart], object]) -> None:
        """Decode every medium of every task, and move tasks with an unreadable one to ``bad_rows``.

        ``decode`` raises DataError for such a medium. The default trusts its media.
        """

    async def play(self, task: Task, chat: Chat) -> None:
        """Attempt the task once. The default asks once and is done."""
        await chat(*task.messages)


class Reward(Configurable, ABC):
    """Scores trajectories. None abstains; an exception, NaN or inf abstains too and is counted."""

    @abstractmethod
    async def __call__(self, trajectory: Trajectory) -> float | None:
        """The reward of one trajectory."""

    async def score_group(self, group: Group) -> list[float | BaseException | None]:
        """The rewards of a group's trajectories, in order; override it to compare them with each other."""
        import asyncio

        return await asyncio.gather(*(self(t) for t in group.trajectories), return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Row:
    """A row as a stage sees it: the columns that it needs."""

    id: str
    group: str
    columns: Columns


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory of a group with its rows; ``reward`` None: it abstained and its rows are not trained."""

    reward: float | None
    rewards: Mapping[str, float | None]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scored trajectories of one task, as an algorithm sees them. Failed plays (no rows) are left out."""

    id: str
    task: Task
    members: Sequence[Member]


class Streaming(StrEnum):
    """How a loss is normalised, and so whether training may begin before the step's rollout is complete."""

    KNOWN = "known"
    """Counts are fixed by the plan."""
    SCALE = "scale"
    """Sum now, divide once before clipping."""
    BATCH = "batch"
    """Needs the whole step first (whitening over the step, ...)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as a loss sees it: each row's window from its first sampled token, left-aligned, width T.

    ``mask_BT`` (bool) marks trained tokens. ``columns`` holds every other per-token column a stage made, by name
    (``ref_logprobs``, ``values``, ...), as float (B, T). Values under mask 0 mean nothing and may be NaN.
    """

    step: int
    tokens_BT: torch.Tensor
    mask_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    """Of the engine that sampled (mu)."""
    old_logprobs_BT: torch.Tensor | None
    """Of the policy at the start of the step; None: it is the policy being trained (one update a step)."""
    advantages_BT: torch.Tensor
    weight_B: torch.Tensor
    """Multiplies a row's token losses under the chosen aggregation."""
    units_B: torch.Tensor
    """What the row adds to the aggregation's global count."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the trainer computed for a batch, with gradient; None unless the algorithm's ``outputs`` names it."""

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """``total``: the weighted sum over the batch's tokens; the trainer divides by the update's global unit count.

    ``metrics``: name -> (sum, count) as detached scalars, averaged over the step.
    """

    total: torch.Tensor
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Algorithm(Configurable, ABC):
    """How rewards become advantages and these a loss. It owns no loop and knows no trainer."""

    needs: frozenset[str] = frozenset()
    """Columns it needs beyond the sampled ones and the reward: old_logprobs, ref_logprobs, values ..."""
    outputs: frozenset[str] = frozenset({"logprobs"})
    """What the trainer must compute per token: logprobs, entropy, values ..."""
    streaming: Streaming = Streaming.SCALE

    @abstractmethod
    def advantages(self, groups: Sequence[ScoredGroup]) -> Mapping[str, Columns]:
        """By row id: ``advantages`` (float32 (T,), 0 where mask is 0), ``weight`` and ``units`` (floats).

        Rows of members whose reward is None get weight and units 0 and advantages 0: they are not trained.
        """

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> Mapping[str, tuple[float, float]]:
        """What to report about scored groups: name -> (sum, count), averaged over the step."""
        return {}

    @abstractmethod
    def loss(self, batch: Batch, outputs: Outputs) -> Loss: ...


# --- models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """A token sequence to run through the model: from position 0 of a row, with its media."""

    ids: Sequence[int]
    media: Sequence[MediaRef] = ()
    positions: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Extended:
    """The past stands; ``new`` holds only the tokens between two samplings (media start at the row's start)."""

    new: Encoded


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The template changes what was already sampled: a new sample must start."""

    reason: str


class ModelAdapter(Configurable, ABC):
    """Between messages and a model. One instance a process; it holds the tokenizer, never the weights."""

    kinds: frozenset[MediaKind] = frozenset()
    """Media that the model reads."""
    shares_prefix: bool = True
    """Whether a prompt's cache may be shared by its group in training with the exact same gradient."""
    stop_ids: frozenset[int]
    banned_token_ids: tuple[int, ...]
    """Never sampled; masked in the engine and in the trainer alike."""
    pad_id: int
    vocab_size: int

    def __init__(self, config: Any, media: MediaStore, seed: int = 0) -> None:
        """``seed``: the run's, of random initial weights."""
        super().__init__(config)
        self.media, self.seed = media, seed

    @abstractmethod
    def encode(self, history: Sequence[Message]) -> Encoded:
        """The whole history with the assistant's header at the end, ready to sample from."""

    @abstractmethod
    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended | Rewritten:
        """What comes between the last sampled token of ``past`` and the next sampling.

        ``history`` is what was said up to and including the last reply; ``past`` its tokens as sampled.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, without special tokens."""

    @abstractmethod
    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        """Keyword arguments of ``backbone`` for right-padded rows (B, width): input_ids, position_ids, media features.

        The caller adds attention mask and cache.
        """

    @abstractmethod
    def load(self, device: str, dtype: torch.dtype) -> torch.nn.Module:
        """A fresh copy of the initial model; equal bits at every call."""

    @abstractmethod
    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        """Last hidden states (B, width, hidden), after the final norm."""

    @abstractmethod
    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of hidden states (..., hidden)."""

    @abstractmethod
    def save(self, model: torch.nn.Module, folder: Path) -> None:
        """Write a Hugging Face folder."""


class Modality(Configurable, ABC):
    """Decodes one kind of medium, and writes decoded content back losslessly for the trajectory files."""

    kind: ClassVar[MediaKind]

    @abstractmethod
    def decode(self, source: Path | bytes) -> Decoded:
        """Raises DataError with the file's name and the reason for what cannot be read."""

    @abstractmethod
    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        """File suffix and bytes that a browser can show; ``restore`` gives equal content back."""

    @abstractmethod
    def restore(self, content: bytes) -> Decoded: ...


# --- sampling ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """Sample one turn. ``drawn`` counts the tokens of this turn that were sampled before (a continued prefix)."""

    id: str
    key: DrawKey
    prompt: Encoded
    sampling: Sampling
    order: tuple[int, ...] = ()
    """Requests that wait are admitted in this order."""
    pool: Literal["train", "eval"] = "train"
    """Batches never mix pools: evaluation cannot change a training row's bits."""
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Lists have one entry per newly sampled token. ``extras`` holds per-token columns of an engine's own."""

    ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    stop: Stop
    extras: Columns = field(default_factory=dict)


class Engine(Configurable, ABC):
    """Samples tokens."""

    exact_versions: bool = False
    """Whether versions are exact per token, or lower bounds."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion: ...

    @abstractmethod
    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        """Verify and take over published weights. Raises WeightsError; then the old ones stay.

        ``continue``: running requests go on with the new weights. ``abort``: they come back with Stop.ABORT.
        ``drain``: they finish first, and new ones wait.
        """

    def enter(self, pool: Literal["train", "eval"]) -> None:
        """Someone who may submit requests is at work: a deterministic engine waits for it before it decodes."""

    def leave(self, pool: Literal["train", "eval"]) -> None:
        """The counterpart of ``enter``."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...

    @abstractmethod
    async def health(self) -> Mapping[str, float]:
        """Gauges such as running and waiting requests; raises EngineError when the engine is dead."""


# --- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """A micro-batch of the step's plan; ``last`` ends an optimizer update (the cut itself may be empty)."""

    rows: Sequence[Row]
    last: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """``skipped`` counts updates with nothing left to train; ``cuts``: row ids of each micro-batch, and ``last``."""

    metrics: Mapping[str, float]
    updates: int
    skipped: int
    cuts: Sequence[tuple[Sequence[str], bool]]


class Trainer(Configurable, ABC):
    """Computes gradients. It does not know the algorithm beyond its loss."""

    @property
    @abstractmethod
    def budget(self) -> int:
        """Tokens of a micro-batch, at most, as ``cost`` counts them."""

    @abstractmethod
    def cost(self, rows: Sequence[Row]) -> int:
        """Tokens that a micro-batch of these rows computes, padding included."""

    @abstractmethod
    async def forward(self, rows: Sequence[Row], outputs: frozenset[str]) -> list[Columns]:
        """Per row the named outputs without gradient, float32 (T,), 0 where mask is 0."""

    @abstractmethod
    async def step(self, step: int, plan: AsyncIterator[Cut], algorithm: Algorithm) -> StepResult:
        """One training step: accumulate every cut's gradient, update at each ``last``."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor); the tensors are the trainer's own and must be copied."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Everything a bit-exact continuation needs."""

    @abstractmethod
    def load(self, folder: Path) -> None: ...


class Transport(Configurable, ABC):
    """Moves published weights from the trainer to engines: always a copy, never an alias."""

    @abstractmethod
    def publish(self, version: Version, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Copy the weights, with a manifest; the update is picklable and names where they are."""

    @abstractmethod
    def subscribe(self) -> Callable[[WeightUpdate], Iterator[tuple[str, torch.Tensor]]]:
        """The receiving side (picklable): gives the tensors of an update, each verified against the manifest."""

    def close(self) -> None:
        """Free what ``publish`` allocated."""


# --- running -------------------------------------------------------------------------------------------------------


class Stage(ABC):
    """A worker that needs some columns of rows and makes others. A plain object; the runtime decides where it lives."""

    name: str
    needs: frozenset[str]
    by: Literal["row", "group"] = "row"
    count: int = 1
    """Rows or groups it takes at once, at most; exactly so many if ``exact``."""
    exact: bool = False
    order: Literal["any", "started", "finished"] = "any"
    workers: int = 1
    """How many claims it works on at once."""

    @abstractmethod
    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        """New columns by row id."""
