"""Files of JSON lines: indexed once, each line parsed when it is asked for."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_core.errors import DataError

_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """The lines of a file that are not blank. A byte order mark and Windows line ends are no part of them.

    Raises DataError when the file is missing, unreadable or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("Q")
        self.numbers = array("Q")
        """The number of each line in the file, from 1."""
        for start, number in self._scan():
            self._starts.append(start)
            self.numbers.append(number)
        if not self.numbers:
            raise DataError(f"{path}: the data set is empty: write one JSON object a line")

    def _scan(self) -> Iterator[tuple[int, int]]:
        try:
            with self.path.open("rb") as file:
                start = 0
                for number, line in enumerate(file, 1):
                    if _content(line):
                        yield start, number
                    start += len(line)
        except FileNotFoundError as error:
            raise DataError(f"{self.path}: no such file (looked in {Path.cwd()}): check the path") from error
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}: a readable file is needed") from error

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The object in a line. Raises ValueError with the reason when the line holds none."""
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return _parse(file.readline())

    def rows(self) -> Iterator[dict[str, Any] | ValueError]:
        """Every line's object, or why it is none, in one pass over the file."""
        with self.path.open("rb") as file:
            for line in file:
                if _content(line):
                    try:
                        yield _parse(line)
                    except ValueError as error:
                        yield error


def _content(line: bytes) -> bytes:
    return line.removeprefix(_BOM).strip()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(_content(line).decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    if not isinstance(row, dict):
        advice = ": a JSON array in one line? write one object a line" if isinstance(row, list) else ""
        raise ValueError(f"a JSON {type(row).__name__}, not an object{advice}")
    return row
