"""TensorBoard event files of a run's metrics, written without torch and made anew from metrics.jsonl on resume."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_core.metrics import TIME


class EventFiles:
    """Scalars by tag in ``folder``. A run that resumes first gives back the lines that still stand.

    Needs the package ``tensorboard``, which is imported when the first line is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def rebuild(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace all event files by one that holds ``lines`` (see ``MetricsLog.read``)."""
        self.close()
        for path in self.folder.glob("events.out.tfevents.*"):
            path.unlink()
        for line in lines:
            self.write(line)
        self.flush()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the scalars of one metrics line, as ``MetricsLog.write`` returned it; nulls and lists have no curve."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        at = line.get(f"{TIME}at") or time.time()
        self._open().add_event(Event(wall_time=at, step=line["step"], summary=Summary(value=values)))

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self.folder), flush_secs=10)
        return self._writer


def scalars(line: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(tag, value) of a metrics line's numbers."""
    skipped = {"step", "kind", f"{TIME}at"}
    return [(tag, float(v)) for tag, v in line.items() if tag not in skipped and isinstance(v, int | float)]
