"""Checkpoint folders: written whole or not at all, verified file by file before one is used.

``step-00000100/`` holds the state after 100 steps and a manifest with the size and SHA-256 of every file. Names that
begin with a dot are work in progress: ``.writing-…`` is incomplete, ``.removing-…`` is not wanted any more, and
``.replaced-…`` is the former folder of a step while the new one takes its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relax_core import atomic
from relax_core.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


class Checkpoints:
    """The checkpoints of a run. ``keep``: newest ones kept; at least two, so that an altered one has a predecessor.

    One writer at a time. ``readonly`` is for looking into a run that may be at work: nothing is cleaned up.
    """

    def __init__(self, folder: Path, keep: int, readonly: bool = False) -> None:
        self.folder, self.keep = folder, keep
        self._damaged: set[int] = set()
        if not readonly:
            folder.mkdir(parents=True, exist_ok=True)
            self._clean()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, damaged or not, in rising order."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # --- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """Gives an empty folder to fill; when the block ends well, it becomes the checkpoint of ``step``.

        Older ones beyond ``keep`` are removed only once the new one is on the disk under its name. When the block
        raises, nothing remains of it.
        """
        work = self._hidden("writing", step)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
            self._seal(work, step)
            self._publish(work, step)
        except BaseException:
            self._clean()
            raise
        self._damaged.discard(step)
        self._prune(step)

    def _seal(self, work: Path, step: int) -> None:
        """Put everything on the disk, then the manifest that vouches for it."""
        if (work / MANIFEST).exists():
            raise CheckpointError(f"{MANIFEST} in a checkpoint's top folder is taken: give that file another name")
        atomic.sync_tree(work)
        (work / MANIFEST).write_bytes(_manifest(step, _contents(work)))
        atomic.sync_path(work / MANIFEST)
        atomic.sync_path(work)

    def _publish(self, work: Path, step: int) -> None:
        target, replaced = self.path(step), self._hidden("replaced", step)
        if target.exists():
            os.rename(target, replaced)
        os.rename(work, target)
        atomic.sync_path(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Keep the newest ``keep`` that are not known to be damaged; later steps are not this run's concern."""
        past = [s for s in self.steps() if s <= newest]
        sound = [s for s in past if s not in self._damaged and not self._quick_fault(s)]
        oldest_kept = min(sound[-self.keep :], default=newest)
        for step in past:
            if step < oldest_kept:
                self._remove(step)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: a run that goes on from ``step`` will write them again.

        Raises CheckpointError rather than remove the only good one.
        """
        later = [s for s in self.steps() if s > step]
        if self.before(step) is None and (good := [s for s in later if not self._fault(s)]):
            raise CheckpointError(
                f"{self.folder}: no checkpoint up to step {step} is good, and that of step {good[-1]} is: it stays. "
                "Move the folder away if the run must start without it"
            )
        for s in later:
            self._remove(s)

    def _remove(self, step: int) -> None:
        """A half-removed folder must never look like a checkpoint, so it loses its name first."""
        hidden = self._hidden("removing", step)
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(self.path(step), hidden)
        shutil.rmtree(hidden, ignore_errors=True)
        self._damaged.discard(step)

    def _clean(self) -> None:
        """Undo what an interrupted process left."""
        for path in self.folder.glob(".replaced-*"):
            target = self.folder / path.name.removeprefix(".replaced-")
            if not target.exists():
                os.rename(path, target)
        for kind in ("writing", "removing", "replaced"):
            for path in self.folder.glob(f".{kind}-*"):
                shutil.rmtree(path, ignore_errors=True)

    def _hidden(self, kind: str, step: int) -> Path:
        return self.folder / f".{kind}-{self.path(step).name}"

    # --- reading ------------------------------------------------------------------------------------------------------

    def newest(self, report: Callable[[str], None] | None = None) -> tuple[int, Path] | None:
        """The newest complete checkpoint whose every file is as written, or None.

        Each newer one that is not gives ``report`` one line: what is wrong with which file, what is used instead.
        """
        return self._newest(self.steps(), report)

    def before(self, step: int, report: Callable[[str], None] | None = None) -> tuple[int, Path] | None:
        """As ``newest``, among those of at most ``step``."""
        return self._newest([s for s in self.steps() if s <= step], report)

    def _newest(self, steps: list[int], report: Callable[[str], None] | None) -> tuple[int, Path] | None:
        faults: list[str] = []
        found = None
        for step in reversed(steps):
            fault = self._fault(step)
            if fault is None:
                found = step
                break
            faults.append(f"checkpoint {self.path(step)}: {fault}")
        instead = "no older one is left" if found is None else f"{self.path(found).name} is used instead"
        for fault in faults if report else ():
            assert report is not None
            report(f"{fault}; {instead}")
        return None if found is None else (found, self.path(found))

    def _fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint, or None; a bad answer is remembered for ``_prune``."""
        fault = find_fault(self.path(step), step)
        if fault:
            self._damaged.add(step)
        return fault

    def _quick_fault(self, step: int) -> str | None:
        return find_fault(self.path(step), step, contents=False)


def find_fault(folder: Path, step: int, contents: bool = True) -> str | None:
    """The first thing wrong with a checkpoint folder, in words, or None. ``contents`` False compares only sizes."""
    try:
        files = _read_manifest(folder, step)
    except CheckpointError as error:
        return str(error)
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                kind = "truncated" if found < size else "too long"
                return f"{name} is {kind}: {found:,} of {size:,} bytes"
            if contents and atomic.sha256(path) != digest:
                return f"{name} was altered: its SHA-256 is not that of the manifest"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file below a folder, by relative name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): (p.stat().st_size, atomic.sha256(p)) for p in paths}


def _manifest(step: int, files: Mapping[str, tuple[int, str]]) -> bytes:
    """The one text that says this: the same facts always give the same bytes."""
    facts = {"format": FORMAT, "step": step, "files": {n: {"size": s, "sha256": d} for n, (s, d) in files.items()}}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**facts, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _read_manifest(folder: Path, step: int) -> dict[str, tuple[int, str]]:
    """The files that a manifest lists. Raises CheckpointError; a single changed bit is found, wherever it is."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from error
    try:
        facts: dict[str, Any] = json.loads(content)
        files = {str(name): (int(f["size"]), str(f["sha256"])) for name, f in facts["files"].items()}
        found = int(facts["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{MANIFEST} was altered or truncated, or another version wrote it") from None
    if content != _manifest(found, files):
        raise CheckpointError(f"{MANIFEST} was altered, or another version wrote it")
    if found != step:
        raise CheckpointError(f"{MANIFEST} belongs to step {found}")
    return files
