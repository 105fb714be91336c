"""Trajectory files: what was played, for people and viewers, with every medium once under its content hash.

``trajectories/step-00000012.jsonl`` holds one trajectory a line: the task, the turns as messages, the samples token by
token (log-probs rounded: the journal has the exact ones) and the rewards. ``trajectories/media/<hash>.<suffix>`` are
files that a browser can show and from which the very same decoded content comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core import atomic, serial
from relax_core.errors import CheckpointError, DataError
from relax_core.types import MEDIA_KINDS, Decoded, MediaKind, MediaPart, Message, Sample

if TYPE_CHECKING:
    from relax_core.interfaces import Modality
    from relax_core.serial import Decode
    from relax_core.types import Group

DECIMALS = 5
"""Of log-probs in the JSON lines."""


class TrajectoryFiles:
    """The trajectory files of every ``every``-th step, and the media of every step unless ``media`` is False.

    ``decode`` gives the decoded content of media that are files or bytes (``MediaStore.decode``, which decodes each
    only once); without it the modalities do it anew.
    """

    def __init__(
        self,
        folder: Path,
        modalities: Mapping[MediaKind, Modality] | Mapping[str, Modality],
        every: int = 1,
        media: bool = True,
        decode: Decode | None = None,
    ) -> None:
        self.folder, self.every, self.with_media = folder, every, media
        self.modalities: Mapping[str, Modality] = {str(kind): modality for kind, modality in modalities.items()}
        self._decode = decode or self._decode_anew
        self._written: dict[str, Path] | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.jsonl"

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Write the groups' trajectories, in order, if it is the turn of ``step``; media always: replays need them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.with_media:
            self._write_media(groups)
        if step % self.every:
            return
        lines = [line for group in groups for line in self._lines(step, group)]
        atomic.write_file(self.path(step), b"".join(lines), sync=False)

    def keep(self, part: MediaPart) -> Path:
        """Write a medium, unless it is there already; its file. Raises DataError when it cannot be decoded."""
        if self._written is None:
            self._media_folder.mkdir(parents=True, exist_ok=True)
            found = (p for p in self._media_folder.iterdir() if not p.name.startswith("."))
            self._written = {p.stem: p for p in found if p.stat().st_size}
        decoded = part.source if isinstance(part.source, Decoded) else self._decode(part)
        if decoded.hash not in self._written:
            suffix, content = self._modality(decoded.kind).dump(decoded)
            path = self._media_folder / f"{decoded.hash}.{suffix.lstrip('.')}"
            atomic.write_file(path, content, sync=False)
            self._written[decoded.hash] = path
        return self._written[decoded.hash]

    def cut_back(self, step: int) -> None:
        """Remove the files of ``step`` and later; media stay, since the resumed run plays the same tasks."""
        for path in self.folder.glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdigit() and int(number) >= step:
                path.unlink(missing_ok=True)
        atomic.remove_partial(self.folder)
        atomic.remove_partial(self._media_folder)

    def media(self, kind: MediaKind, hash: str) -> Decoded:
        """The decoded content behind a hash.

        Raises CheckpointError when it was not written, or when what is there now has another hash.
        """
        path = next(iter(self._media_folder.glob(f"{hash}.*")), None)
        if path is None:
            raise CheckpointError(
                f"{self._media_folder}: there is no {kind} {hash}; media are written only while trajectories.media "
                "is true"
            )
        try:
            found = self._modality(kind).restore(path.read_bytes())
        except DataError as error:
            raise CheckpointError(f"{path} cannot be read any more: {error}") from error
        if found.hash != hash:
            raise CheckpointError(f"{path} was altered: its content now has the hash {found.hash}")
        return found

    # --- lines --------------------------------------------------------------------------------------------------------

    def _lines(self, step: int, group: Group) -> Iterator[bytes]:
        head = {"step": step, "group": group.id, "serial": group.serial}
        start = serial.dumps({**head, "task": serial.task_to_json(group.task, self._decode)})[:-1] + b","
        for trajectory in group.trajectories:
            rest = serial.trajectory_to_json(trajectory, self._decode)
            rest["samples"] = [_sample_to_json(sample) for sample in trajectory.samples]
            yield start + serial.dumps(rest)[1:] + b"\n"

    # --- media --------------------------------------------------------------------------------------------------------

    @property
    def _media_folder(self) -> Path:
        return self.folder / "media"

    def _modality(self, kind: MediaKind) -> Modality:
        if kind not in self.modalities:
            raise DataError(f"no modality of this run reads {kind}; there are: {', '.join(self.modalities) or 'none'}")
        return self.modalities[kind]

    def _decode_anew(self, part: MediaPart) -> Decoded:
        source = part.source
        return source if isinstance(source, Decoded) else self._modality(MEDIA_KINDS[type(part)]).decode(source)

    def _write_media(self, groups: Sequence[Group]) -> None:
        """All but those that cannot be read or written back losslessly."""
        for part in (part for message in _messages(groups) for part in message.media()):
            with suppress(DataError):
                self.keep(part)


def _messages(groups: Sequence[Group]) -> Iterator[Message]:
    """Every message of the groups, the tasks' own once a group."""
    for group in groups:
        yield from group.task.messages
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                if not serial.repeats(turn, group.task):
                    yield from turn.prompt
                yield turn.reply


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    logprobs = [round(v, DECIMALS) for v in sample.logprobs]
    return {
        "ids": sample.ids,
        "mask": sample.mask,
        "logprobs": logprobs if all(map(math.isfinite, logprobs)) else serial.pack(logprobs),
        "versions": sample.versions,
        "media": serial.refs_to_json(sample.media),
    }
