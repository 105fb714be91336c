"""One media file with what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_core.errors import DataError
from relax_core.interfaces import Modality
from relax_core.types import Decoded, MediaKind

Write = Callable[[Path], object]
Check = Callable[[Decoded], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One file. ``file``: its name; ``write``: makes it; ``check``: raises AssertionError unless it is decoded rightly.

    ``refused``: words of the error, for a file that must be refused. ``settings``: of the modality that decodes it.
    """

    kind: MediaKind
    file: str
    write: Write
    check: Check | None = None
    refused: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()

    def path(self, folder: Path) -> Path:
        """The file in ``folder``, written now if it is not there."""
        path = folder / f"{self.kind}-{self.file}"
        if not path.exists():
            self.write(path)
        return path

    def run(self, modality: Modality, folder: Path) -> None:
        """Write the file, decode it and raise AssertionError unless what comes is right."""
        path = self.path(folder)
        try:
            decoded = modality.decode(path)
        except DataError as error:
            text = str(error)
            assert self.check is None, f"{self.file} is refused: {text}"
            missing = [word for word in (str(path), self.kind, *self.refused) if word not in text]
            assert not missing, f"{missing} not in: {text}"
            assert "\n" not in text, f"more than one line: {text}"
        else:
            assert self.check is not None, f"{self.file} is read as {decoded.data.shape}, and must be refused"
            self.check(decoded)
