"""The journal: what every step trained on and what came of it, one file a step, so that it can be computed again.

``journal/step-00000012.npz`` is the step that turned the weights of version 12 into those of version 13. Any tool that
reads NumPy archives can open it; a SHA-256 of the archive follows behind its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core import atomic
from relax_core.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from relax_core.interfaces import Row
    from relax_core.serial import Decode, Load
    from relax_core.types import Decoded, Group, MediaKind, MediaPart, Trajectory

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class RecordedCut:
    """A micro-batch as it was trained: its row ids in order. ``last``: an optimizer update followed it."""

    rows: tuple[str, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One step. ``groups`` in training order with all their trajectories; ``rows`` in training order, all columns.

    A row's ``trajectory`` and ``group`` columns are members of ``groups``. ``skipped`` counts updates in which nothing
    was left to train. ``metrics`` are the trainer's own (loss, grad_norm, ...). ``checksum`` (SHA-256, hexadecimal) is
    that of the file, once it is written or read.
    """

    step: int
    groups: Sequence[Group]
    rows: Sequence[Row]
    cuts: Sequence[RecordedCut]
    updates: int
    metrics: Mapping[str, float]
    skipped: int = 0
    checksum: str = ""

    def trajectories(self) -> list[Trajectory]:
        """Every trajectory of the step, those that were not trained included."""
        return [t for group in self.groups for t in group.trajectories]


class Journal:
    """The entries of a run's newest ``keep_steps`` steps. One writer at a time.

    ``decode`` gives the content hash of media that are files or bytes (``MediaStore.decode``). Writes are atomic
    against the death of the process; ``sync``, before a checkpoint is sealed, makes them durable.
    """

    def __init__(self, folder: Path, keep_steps: int, decode: Decode | None = None) -> None:
        self.folder, self.keep_steps = folder, keep_steps
        self._decode = decode or _undecoded
        self._steps: list[int] | None = None
        self._unsynced: list[Path] = []

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.npz"

    def steps(self) -> list[int]:
        """The steps that have an entry, in rising order."""
        return sorted(int(p.stem[5:]) for p in self.folder.glob("step-*.npz") if p.stem[5:].isdigit())

    def write(self, entry: JournalEntry) -> JournalEntry:
        """Write the entry of a step, replacing an older one; returns it with its checksum."""
        from relax_core.journal_codec import encode

        if self._steps is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._steps = self.steps()
        content = encode(entry, self._decode)
        digest = hashlib.sha256(content)
        path = self.path(entry.step)
        atomic.write_file(path, content + digest.digest(), sync=False)
        self._unsynced.append(path)
        if entry.step not in self._steps[-1:]:
            self._steps = sorted({*self._steps, entry.step})
        self._prune(self._steps)
        return replace(entry, checksum=digest.hexdigest())

    def read(self, step: int, media: Load | None = None) -> JournalEntry:
        """The entry of a step, bit for bit. Media are loaded by ``media`` when somebody looks at their data.

        Raises CheckpointError when it is missing or was altered.
        """
        from relax_core.journal_codec import decode

        path = self.path(step)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {self.span()}") from None
        body, digest = content[:-DIGEST_BYTES], hashlib.sha256(content[:-DIGEST_BYTES])
        if digest.digest() != content[-DIGEST_BYTES:]:
            raise CheckpointError(f"{path} was truncated or altered: its SHA-256 is another one; {self.span()}")
        try:
            entry = decode(body, media or _unavailable)
        except (DataError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be understood: {error}") from error
        return replace(entry, checksum=digest.hexdigest())

    def cut_back(self, step: int) -> None:
        """Remove the entries of ``step`` and later: a run resumed after ``step`` steps writes them again."""
        for s in self.steps():
            if s >= step:
                self.path(s).unlink(missing_ok=True)
        atomic.remove_partial(self.folder)
        self._steps, self._unsynced = None, []

    def sync(self) -> None:
        """Force what was written since the last call to the disk."""
        for path in self._unsynced:
            if path.exists():
                atomic.sync_path(path)
        if self._unsynced:
            atomic.sync_path(self.folder)
        self._unsynced = []

    def _prune(self, steps: list[int]) -> None:
        while len(steps) > self.keep_steps:
            self.path(steps.pop(0)).unlink(missing_ok=True)

    def span(self) -> str:
        """Which steps have entries, in words."""
        steps = self.steps()
        return f"the journal holds steps {steps[0]} to {steps[-1]}" if steps else "the journal is empty"


def _undecoded(part: MediaPart) -> Decoded:
    raise DataError("this journal was built without a decoder for media that are files or bytes")


def _unavailable(kind: MediaKind, hash: str) -> Decoded:
    raise DataError(f"{kind} {hash}: the journal was read without a source for media")
