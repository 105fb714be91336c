"""What a user of Relax writes most: environments, rewards and decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from relax_core.interfaces.component import Configurable
from relax_core.types import Decoded, Group, MediaKind, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.chat import Chat
    from relax_core.setup import RewardSetup


RewardValue = float | Mapping[str, float | None] | None
"""What a reward says of a play."""


class Environment(Configurable, ABC):
    """Tasks, and how one is played. The author writes control flow over messages and never sees a token."""

    @abstractmethod
    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        """The tasks of a split, in a fixed order (a lazy sequence is fine). Ids are unique in the environment.

        Asking for one that cannot be made raises DataError (file, line, reason): such a bad row is skipped and counted.
        Threads ask at once. ``relax_core.tasks`` says what such a sequence may do besides: mix several, shuffle in its
        own way, know of bad rows beforehand.
        """

    async def play(self, task: Task, chat: Chat) -> None:
        """Attempt the task once. The default asks once and is done."""
        await chat(*task.messages)

    async def close(self) -> None:
        """Give back servers, processes and the like; called once, at the end of a run."""


class Reward(Configurable, ABC):
    """Scores trajectories. None abstains; an exception, NaN, inf or an answer after the section's ``timeout`` abstains
    too, and is counted. A mapping names components: their sum is the reward, each is in the trajectory's metrics."""

    by_group: bool | None = None
    """Whether it needs the plays of a group together; default: whether it has a ``score_group`` of its own."""

    @classmethod
    def asks_policy(cls, config: Any) -> bool:
        """Whether, with these settings, it asks the run's own engine: then it scores while that engine serves."""
        return False

    async def begin(self, setup: RewardSetup) -> None:
        """Take, or start, what it needs to ask an engine; called once in each process that scores for a run, before
        anything is scored there."""

    @abstractmethod
    async def __call__(self, trajectory: Trajectory) -> RewardValue:
        """The reward of one trajectory."""

    async def score_group(self, group: Group) -> Sequence[RewardValue | BaseException]:
        """The rewards of a group's trajectories, in order; override it to compare them with each other."""
        import asyncio

        return await asyncio.gather(*(self(t) for t in group.trajectories), return_exceptions=True)

    async def close(self) -> None:
        """Give back connections, processes and the like; called once, at the end of a run."""


class Modality(Configurable, ABC):
    """Decodes one kind of medium, and writes decoded content back losslessly for the trajectory files."""

    kind: ClassVar[MediaKind]

    def recognizes(self, source: Path | bytes) -> bool:
        """Whether content looks like this kind by its beginning, for commands that are given files of any kind."""
        return True

    @abstractmethod
    def decode(self, source: Path | bytes) -> Decoded:
        """Raises DataError with the file's name and the reason for what cannot be read. Threads call it at once."""

    @abstractmethod
    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        """File suffix and bytes that a browser can show; ``restore`` gives equal content back."""

    @abstractmethod
    def restore(self, content: bytes) -> Decoded: ...
