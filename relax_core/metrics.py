"""The metrics log: one JSON object a line in ``metrics.jsonl``, cut back when a run resumes.

Values that depend on the clock or the machine have keys that begin with ``time/`` (seconds, tokens per second, memory):
two runs of one seed at ``max_staleness: 0`` agree in all others.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from relax_core import atomic, serial
from relax_core.errors import CheckpointError

TIME = "time/"
Kind = Literal["train", "eval"]


class MetricsLog:
    """Appends to ``<folder>/metrics.jsonl``. A line is with the system when ``write`` returns, whatever dies then."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._descriptor: int | None = None

    def write(self, step: int, values: Mapping[str, Any], kind: Kind = "train") -> dict[str, Any]:
        """Append a line and return it: ``step``, ``kind``, the values by sorted key, and ``time/at`` (Unix seconds).

        Numbers of any library become JSON numbers, arrays become lists, and NaN and inf become null.
        """
        plain = {key: plain_value(values[key]) for key in sorted(values) if key not in ("step", "kind")}
        line = {"step": int(step), "kind": kind, **plain, f"{TIME}at": round(time.time(), 3)}
        if self._descriptor is None:
            self._descriptor = self._open()
        content = serial.dumps(line) + b"\n"
        while content:
            content = content[os.write(self._descriptor, content) :]
        return line

    def read(self) -> list[dict[str, Any]]:
        """All complete lines. A torn last one, which a killed process may leave, is left out.

        Raises CheckpointError for any other line that is no JSON object.
        """
        return [line for _, line in self._lines()]

    def cut_back(self, step: int) -> None:
        """Keep only lines of at most ``step``, the number of steps behind the checkpoint that the run resumes from.

        With 0 there is no checkpoint and nothing is kept, not even an evaluation of the initial weights.
        """
        self._rewrite(content for content, line in self._lines() if 0 < step >= line["step"])

    def sync(self) -> None:
        """Force the lines to the disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        """(the line's bytes, its content)."""
        content = self.path.read_bytes() if self.path.exists() else b""
        found = []
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                value = json.loads(line)
                value["step"] + 0
            except (ValueError, KeyError, TypeError):
                raise CheckpointError(f"{self.path}, line {number}: it is no JSON object with a step") from None
            found.append((line, value))
        return found

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        self.close()
        content = b"".join(line + b"\n" for line in lines)
        if content or self.path.exists():
            atomic.write_file(self.path, content)

    def _open(self) -> int:
        """Open for appending, after whatever complete lines are there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.ftruncate(descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        return descriptor


def plain_value(value: Any) -> Any:
    """A JSON value: numbers of NumPy, torch and the like by their ``tolist``; null for what is no finite number."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain_value(v) for v in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without what depends on the clock or the machine."""
    return {key: value for key, value in line.items() if not key.startswith(TIME)}
