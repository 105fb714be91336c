"""The nouns of a run, one type per phase: Task -> Trajectory (turns) -> Sample (a row on the bus) -> Batch.

Arrays are numpy so that rows cross process borders cheaply; tensors exist only in engines and trainers.
Shape legend: T tokens of one sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "video"]
LearnerName = Literal["policy", "critic"]
"""What a trainer trains."""


# --- messages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoded:
    """A medium after its one decoding. Equal content has an equal ``hash``.

    ``data``: image uint8 (H, W, 3); audio float32 (samples,) mono; video uint8 (frames, H, W, 3).
    ``rate``: samples per second for audio, frames per second for video, None for an image.
    ``times``: of a video, when each frame is shown: seconds from the clip's first frame on; None where not known.
    """

    kind: MediaKind
    data: NDArray[Any] = field(compare=False)
    rate: float | None = None
    hash: str = ""
    times: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            object.__setattr__(self, "rate", float(self.rate))  # 16000 and 16000.0 must not differ in their hash
        if not self.hash:
            digest = hashlib.sha256(f"{self.kind} {self.data.dtype} {self.data.shape} {self.rate}".encode())
            if self.times is not None:
                digest.update(repr(self.times).encode())
            digest.update(self.data.tobytes())
            object.__setattr__(self, "hash", digest.hexdigest()[:32])


Source = Path | bytes | Decoded
"""Where a medium comes from: a file, its encoded bytes, or already decoded content."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    source: Source


@dataclass(frozen=True, slots=True)
class Audio:
    source: Source


@dataclass(frozen=True, slots=True)
class Video:
    source: Source


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one tool call; its own parts may hold any medium."""

    parts: tuple[Text | Image | Audio | Video, ...]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Declares a tool to the policy, in a system message; the chat template writes it.

    ``parameters``: the JSON schema of an object, what the tool takes.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallError:
    """A tool call that cannot be run. ``text`` is for the model: one line, which repeats nothing of what it wrote."""

    text: str


Part = Text | Image | Audio | Video | ToolCall | ToolResult | ToolSpec
MediaPart = Image | Audio | Video
MEDIA_KINDS: dict[type, MediaKind] = {Image: "image", Audio: "audio", Video: "video"}


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, joined without a separator."""
        return "".join(p.text for p in self.parts if isinstance(p, Text))

    def media(self) -> list[MediaPart]:
        """The media of this message in reading order, those inside tool results included."""
        found: list[MediaPart] = []
        for part in self.parts:
            inner = part.parts if isinstance(part, ToolResult) else (part,)
            found += [p for p in inner if isinstance(p, Image | Audio | Video)]
        return found


def message(role: Role, *content: str | Part) -> Message:
    """A message from text and parts: ``message("user", Image(path), "Which colour?")``."""
    return Message(role, tuple(Text(c) if isinstance(c, str) else c for c in content))


def system(*content: str | Part) -> Message:
    return message("system", *content)


def user(*content: str | Part) -> Message:
    return message("user", *content)


# --- tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to attempt. ``id`` is unique in a run and names the task's random draws."""

    id: str
    messages: tuple[Message, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""

    @property
    def modality(self) -> str:
        """``text``, or the media kinds of the messages joined by ``+``."""
        kinds = sorted({MEDIA_KINDS[type(p)] for m in self.messages for p in m.media()})
        return "+".join(kinds) or "text"


# --- randomness, versions, sampling ---------------------------------------------------------------------------------


class Version(NamedTuple):
    """A policy version: ``number`` steps stand behind the weights; a trainer restart opens a new ``lineage``."""

    lineage: int
    number: int


class DrawKey(NamedTuple):
    """What a random draw of a play depends on, besides the run's seed and the position (see keys.py)."""

    task: str
    attempt: int
    member: int
    turn: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 is greedy. top_p and top_k are for evaluation only."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0


class Stop(StrEnum):
    """Why sampling, or a whole play, ended."""

    EOS = "eos"
    """The policy ended its last reply itself."""
    LENGTH = "length"
    """The last reply was cut off at ``max_new_tokens``."""
    ABORT = "abort"
    """The engine gave the prefix back, to be continued under newer weights."""
    TURNS = "turns"
    """The play wanted more turns than it may have."""
    TOKENS = "tokens"
    """There is no room for more tokens."""
    TOOL_CALLS = "tool_calls"
    """The policy called more tools than it may."""
    TIME = "time"
    """Tools and environment took too long: such a play has an error, too."""
    DONE = "done"
    """The environment asked the policy nothing."""
    ERROR = "error"

    @property
    def cut(self) -> bool:
        """Whether a limit ended it."""
        return self in (Stop.LENGTH, Stop.TURNS, Stop.TOKENS, Stop.TOOL_CALLS, Stop.TIME)


# --- media as the model sees it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A medium inside a token sequence: its placeholders are ``ids[start : start + length]``.

    ``key`` finds the model's input features (a mapping of arrays) in the run's media store.
    """

    kind: MediaKind
    key: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a history or of an extension of it, as a model adapter makes them.

    ``positions``: int32 (3, T) for models with three-axis rotary positions, else None (then 0..T-1).
    ``media``: starts count from the beginning of the whole sequence.
    """

    ids: list[int]
    media: tuple[MediaRef, ...] = ()
    positions: NDArray[np.int32] | None = None


# --- plays ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """A token sequence ready to train: one row on the bus. All lists have length T.

    ``mask`` 1 marks tokens that the policy sampled; ``logprobs`` and ``versions`` (policy version numbers) hold
    0.0 and -1 elsewhere. Log-probs are those of the tempered, banned distribution that was sampled from.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    media: tuple[MediaRef, ...] = ()
    positions: NDArray[np.int32] | None = None

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the environment said, and what the policy answered."""

    prompt: tuple[Message, ...]
    reply: Message
    stop: Stop
    tokens: int
    """Sampled tokens of the reply."""
    after: int = -1
    """Which turn of the play it goes on from; -1: it begins a conversation. Plays may branch."""


@dataclass(frozen=True, slots=True)
class PlayError:
    """An error of a play, as data: where it arose, its type and its text."""

    where: str
    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.type}: {self.text}"


@dataclass(slots=True)
class Trajectory:
    """What one play of a task produced."""

    task: Task
    attempt: int
    member: int
    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stop: Stop = Stop.DONE
    error: PlayError | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By reward name; None: the reward abstained."""
    reward: float | None = None
    """The weighted sum; None when all abstained: such a trajectory is not trained."""
    raw_reward: float | None = None
    """``reward`` before ``shape_rewards`` hooks changed it; filters decide on this one."""
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    """What the play ended with, where the environment says that this is not the last reply."""

    @property
    def last_reply(self) -> str:
        """The play's ``answer``, if it has one, or the text of the last reply, or the empty string."""
        return self.answer if self.answer is not None else self.turns[-1].reply.text if self.turns else ""

    @property
    def reply_tokens(self) -> int:
        return sum(t.tokens for t in self.turns)

    @property
    def version(self) -> int | None:
        """The oldest policy version number among the sampled tokens."""
        found = [v for s in self.samples for v, m in zip(s.versions, s.mask, strict=True) if m]
        return min(found, default=None)


@dataclass(slots=True)
class Group:
    """The trajectories of one task. ``serial`` counts groups in the order in which they started."""

    id: str
    serial: int
    task: Task
    attempt: int
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def version(self) -> int | None:
        """The oldest policy version number among the group's trained tokens."""
        return min((v for t in self.trajectories if (v := t.version) is not None), default=None)
