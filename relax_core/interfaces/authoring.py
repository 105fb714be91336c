"""What a user of Relax writes most: environments, rewards and decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from relax_core.interfaces.component import Configurable
from relax_core.types import Decoded, Group, MediaKind, MediaPart, Task, Trajectory

if TYPE_CHECKING:
    from relax_core.chat import Chat


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
