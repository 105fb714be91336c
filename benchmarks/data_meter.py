"""What a side of the data benchmark did: rows per second after a warm-up, CPU time, and memory while it went."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

MB = 1e6
EVERY = 0.25
"""Seconds between two looks at the memory."""


def arguments(description: str | None) -> argparse.Namespace:
    """Those of one process; data.py gives them."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--files", required=True, help="Parquet files, a pattern")
    p.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer and its chat template")
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--warmup", type=int, default=250, help="rows before the measured ones")
    p.add_argument("--rows", type=int, default=800, help="measured rows")
    p.add_argument("--probe", type=int, metavar="N", help="instead write what the first N rows become, as .npz")
    p.add_argument("--out", type=Path, required=True)
    return p.parse_args()


class Meter:
    """Counts rows as they arrive. ``row`` says whether another one is wanted."""

    def __init__(self, warmup: int, rows: int) -> None:
        self.warmup, self.rows = warmup, rows
        self.count = self.tokens = self.nbytes = 0
        self.samples: list[tuple[int, float]] = []
        """Rows so far, and the memory of this process and its children in MB."""
        self._began = self._ended = (0.0, 0.0)  # wall and CPU seconds

    def row(self, tokens: int, nbytes: int) -> bool:
        self.count += 1
        if self.count > self.warmup:
            self.tokens += tokens
            self.nbytes += nbytes
        if self.count == self.warmup:
            self._began = _seconds()
        if self.count == self.warmup + self.rows:
            self._ended = _seconds()
        return self.count < self.warmup + self.rows

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the memory every now and then during the block."""
        import psutil

        stop, process = threading.Event(), psutil.Process(os.getpid())

        def watch() -> None:
            while not stop.wait(EVERY):
                self.samples.append((self.count, _rss(process)))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()

    def write(self, out: Path, **more: Any) -> None:
        packages = ("relax-rl", "datasets", "transformers", "torch", "pyarrow", "pillow", "soundfile")
        seconds, cpu = (after - before for before, after in zip(self._began, self._ended, strict=True))
        result = {
            "rows": self.rows,
            "seconds": seconds,
            "rows_per_s": self.rows / seconds,
            "cpu_ms_per_row": 1000 * cpu / self.rows,
            "tokens_per_row": self.tokens / self.rows,
            "bytes_per_row": self.nbytes / self.rows,
            "peak_mb": max((mb for _, mb in self.samples), default=0.0),
            "memory": self.samples,
            "versions": {name: metadata.version(name) for name in packages},
        }
        out.write_text(json.dumps(result | more))


def _seconds() -> tuple[float, float]:
    """Wall and CPU time, that of the children included, so far."""
    import psutil

    process = psutil.Process(os.getpid())
    cpu = sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))
    return time.perf_counter(), cpu


def _rss(process: psutil.Process) -> float:
    import psutil

    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return total / MB
