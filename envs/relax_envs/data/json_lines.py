"""JSON data sets: files of lines, and files that hold one array. Indexed once, a row parsed when it is asked for."""

from __future__ import annotations

import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from relax_core.errors import DataError
from relax_envs.data.source import Rows

_BOM = b"\xef\xbb\xbf"

_NO_TEXT = {
    b"PAR1": "a Parquet file: name it .parquet",
    b"ARRO": "an Arrow file: name it .arrow",
    b"\xff\xff\xff\xff": "an Arrow file: name it .arrow",
    b"\x1f\x8b": "compressed: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it",
    b"PK\x03\x04": "compressed: unpack it",
}
"""How files of other formats begin."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},"]', re.DOTALL)
"""What an array is cut by; a lone quotation mark opens a string that does not end."""


class JsonLines(Rows):
    """The lines of a file that are not blank. A byte order mark and Windows line ends are no part of them.

    Raises DataError when the file is missing or unreadable.
    """

    columns = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("Q")
        self._blanks = array("Q")  # for each blank line: how many rows stand before it
        with _opened(path) as file:
            self._stamp = _stamp(file)
            head = file.read(4)
            for magic, advice in _NO_TEXT.items():
                if head.startswith(magic):
                    raise DataError(f"{path}: not lines of JSON, but {advice}")
            file.seek(0)
            start = 0
            for line in file:
                if _content(line):
                    self._starts.append(start)
                else:
                    self._blanks.append(len(self._starts))
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, index: int) -> tuple[Path, int]:
        return self.path, index + 1 + bisect_right(self._blanks, index)

    def row(self, index: int) -> dict[str, Any]:
        with _unchanged(self.path, self._stamp) as file:
            file.seek(self._starts[index])
            return parse(file.readline(), unique=True)

    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        with _unchanged(self.path, self._stamp) as file:
            for line in file:
                if _content(line):
                    try:
                        yield parse(line)
                    except ValueError:
                        yield None


class JsonArray(Rows):
    """The elements of a file that is one JSON array, over as many lines as it likes.

    Raises DataError when the file is missing or unreadable, when the array does not end, or more follows.
    """

    columns = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._ends, self._lines = array("Q"), array("Q"), array("Q")
        with _opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._stamp = _stamp(file)
            problem = self._index(content)  # raised out here: in there the error would keep hold of the map
        if problem:
            raise DataError(f"{path}: {problem}")
        self.one_a_line = len(set(self._lines)) == len(self)
        """Whether lines tell the elements apart."""
        if len(self) > 1 and len(set(self._lines)) == 1:  # all in one line: their own numbers say more
            self._lines = array("Q", range(1, len(self) + 1))

    def _index(self, content: mmap.mmap) -> str:
        """Note where each element begins and ends: at the commas of the outermost array. Returns what is wrong."""
        start = content.find(b"[") + 1
        depth, counted, line = 1, 0, 1
        for found in _TOKEN.finditer(content, start):
            token = found.group()
            if token == b'"':
                break
            depth += (token in (b"[", b"{")) - (token in (b"]", b"}"))
            if depth == 0 or (depth == 1 and token == b","):
                element = content[start : found.start()]
                begin = found.start() - len(element.lstrip())
                if element.strip() or token == b"," or len(self):
                    line += content[counted:begin].count(b"\n")
                    counted = begin
                    self._starts.append(begin)
                    self._ends.append(found.start())
                    self._lines.append(line)
                start = found.end()
            if depth == 0:
                more = content[start:].strip()
                return "more follows behind its array: write one array, or one object a line" if more else ""
        return "its array does not end: is the file cut off?"

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, index: int) -> tuple[Path, int]:
        return self.path, self._lines[index]

    def row(self, index: int) -> dict[str, Any]:
        with _unchanged(self.path, self._stamp) as file:
            return self._parse(file, index, unique=True)

    def scan(self, columns: Collection[str]) -> Iterator[dict[str, Any] | None]:
        with _unchanged(self.path, self._stamp) as file:
            for index in range(len(self)):
                try:
                    yield self._parse(file, index)
                except ValueError:
                    yield None

    def _parse(self, file: BinaryIO, index: int, unique: bool = False) -> dict[str, Any]:
        file.seek(self._starts[index])
        return parse(file.read(self._ends[index] - self._starts[index]), unique)


def json_rows(path: Path) -> JsonLines | JsonArray:
    """The rows of a ``.json`` file: an array if it begins like one, else lines. Raises DataError as both do."""
    with _opened(path) as file:
        head = b""
        while not head and (block := file.read(4096)):
            head = _content(block)
    return JsonArray(path) if head[:1] == b"[" else JsonLines(path)


# --- reading ------------------------------------------------------------------------------------------------------


def parse(content: bytes, unique: bool = False) -> dict[str, Any]:
    """The object in a line. Raises ValueError with the reason when it holds none; ``unique``: also for a key twice."""
    content = _content(content)
    if not content:
        raise ValueError("not JSON: there is nothing between two commas, or behind the last one")
    try:
        row = json.loads(content.decode(), object_pairs_hook=_unique if unique else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}{_advice(content)}") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    if not isinstance(row, dict):
        advice = ": a JSON array in one line? write one object a line" if isinstance(row, list) else ""
        raise ValueError(f"a JSON {type(row).__name__}, not an object{advice}")
    return row


def _advice(content: bytes) -> str:
    if content in (b"[", b"]", b"[{"):
        return ": a JSON array? name the file .json, or write one object a line"
    if content.endswith(b"},"):
        return ": leave out the comma behind the object"
    if content in (b"{", b"}"):
        return ": an object over several lines? write it in one"
    return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"not JSON: the key {twice!r} is there twice in one object")
    return found


def _content(line: bytes) -> bytes:
    return line.removeprefix(_BOM).strip()


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file (looked in {Path.cwd()}): check the path") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: a readable file is needed") from error


def _stamp(file: BinaryIO) -> tuple[int, int]:
    import os

    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _unchanged(path: Path, stamp: tuple[int, int]) -> BinaryIO:
    """The file, open. Raises OSError when it is not any more what was indexed."""
    file = _opened(path)
    if _stamp(file) != stamp:
        file.close()
        raise OSError("the file has changed since it was opened: start again")
    return file
