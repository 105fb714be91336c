"""Rows per second from Parquet files with pictures and sound: Relax's feed beside datasets and Hugging Face processors.

    python benchmarks/data.py [--json FILE] [--rows 20000] [--measured 800] [--warmup 300] [--rounds 3]
                              [--workers 1 2] [--rates 16000 44100] [--skip-memory] [--folder DIR]

Both sides make token ids, pixel patches and a log-mel spectrogram of each row, in a shuffled order; that they make the
same is checked first. Every measurement has a process of its own, and the sides take turns. Then Relax streams all rows
once, and its memory must stay flat. README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
SCRIPTS = {"relax": HERE / "data_work.py", "hugging face": HERE / "peers" / "data_hf.py"}
SPEED, FLAT = 1.0, 1.05
"""The bars: at least so many times the peer's rows per second, and at most so much more memory at the end."""
PROBED = 4
"""Rows whose content is compared."""
CLOSE = {"pixels": 1e-5, "mel": 1e-3}
"""Largest allowed differences."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every measurement here")
    p.add_argument("--rows", type=int, default=20_000, help="that are streamed once while memory is watched")
    p.add_argument("--measured", type=int, default=800, help="timed rows of each process")
    p.add_argument("--warmup", type=int, default=300, help="rows before them: until caches and buffers are full")
    p.add_argument("--rounds", type=int, default=3, help="processes of each side")
    p.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="threads of Relax, processes of the peer")
    p.add_argument("--rates", type=int, nargs="+", default=[16_000, 44_100], help="samples per second of the sound")
    p.add_argument("--skip-memory", action="store_true", help="measure speed only")
    p.add_argument("--folder", type=Path, help="for the files (2.2 GB for 20,000 rows); default: the temporary folder")
    a = p.parse_args(words)
    if min(a.rows, a.measured, a.warmup, a.rounds, *a.workers, *a.rates) < 1:
        p.error("sizes and counts must be 1 or more")
    return a


# --- running ----------------------------------------------------------------------------------------------------------


class Bench:
    """Runs the sides over the files of one folder."""

    def __init__(self, folder: Path, a: argparse.Namespace, console: Console) -> None:
        self.folder, self.a, self.console = folder, a, console
        self.tokenizer = folder / "tokenizer"

    def files(self, rate: int, rows: int) -> str:
        """Write them, and say how long that took and how large they are. Returns their pattern."""
        from benchmarks.data_files import write

        began = time.perf_counter()
        made = write(self.folder, rows, rate)
        size, seconds = sum(file.stat().st_size for file in made), time.perf_counter() - began
        self.say(f"wrote {rows} rows with sound of {rate} Hz in {seconds:.0f} s: {size / 1e9:.2f} GB")
        return str(self.folder / f"{rate}-*.parquet")

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False)

    def run(self, side: str, files: str, out: Path, **options: int) -> None:
        """One process. Exits with its last lines when it fails."""
        words = ["--files", files, "--tokenizer", str(self.tokenizer), "--out", str(out)]
        words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPTS[side]), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
        if done.returncode or not out.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise SystemExit(f"{side} ended with {done.returncode}; its last lines:\n{tail}")

    def measure(self, side: str, files: str, workers: int, warmup: int, rows: int) -> dict[str, Any]:
        out = self.folder / "out.json"
        out.unlink(missing_ok=True)
        before = os.getloadavg()[0]
        self.run(side, files, out, workers=workers, warmup=warmup, rows=rows)
        result: dict[str, Any] = json.loads(out.read_text())
        return result | {"side": side, "workers": workers, "load_before": before}

    def same(self, files: str) -> dict[str, float]:
        """The largest differences of a few rows. Exits when the sides do not make the same of them."""
        import numpy as np

        found = []
        for side in SCRIPTS:
            out = self.folder / "probe.npz"
            out.unlink(missing_ok=True)
            self.run(side, files, out, probe=PROBED)
            with np.load(out) as content:
                found.append({name: content[name] for name in content.files})
        return differences(*found)

    def rounds(self, rate: int, files: str) -> Iterator[dict[str, Any]]:
        """Every process of speed, in alternation; each round begins with another side."""
        a = self.a
        for number in range(a.rounds):
            for workers in a.workers:
                for side in list(SCRIPTS)[:: -1 if number % 2 else 1]:
                    result = self.measure(side, files, workers, a.warmup, a.measured)
                    speed = f"{result['rows_per_s']:7.1f} rows/s"
                    self.say(f"round {number + 1}/{a.rounds}  {rate} Hz  {workers} workers  {side:12}  {speed}")
                    yield result | {"rate": rate, "round": number}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """By kind of content. Exits for rows that differ in ids or shapes, or too much in their values."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"not comparable: one side makes {sorted(ours)}, the other {sorted(theirs)}")
    worst = dict.fromkeys(CLOSE, 0.0)
    for name, value in ours.items():
        other, kind = theirs[name], name.partition("-")[0]
        if value.shape != other.shape:
            raise SystemExit(f"not comparable: {name} has shape {value.shape} in one side, {other.shape} in the other")
        largest = float(abs(value.astype("float64") - other).max())
        if largest > CLOSE.get(kind, 0.0):
            raise SystemExit(f"not comparable: {name} differs by {largest:g}")
        if kind in worst:
            worst[kind] = max(worst[kind], largest)
    return worst


# --- comparing --------------------------------------------------------------------------------------------------------


def judged(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each rate and number of workers: the median speeds, and the ratio that counts."""
    result = []
    for rate, workers in dict.fromkeys((r["rate"], r["workers"]) for r in found):
        runs = {
            side: {r["round"]: r for r in found if (r["rate"], r["workers"], r["side"]) == (rate, workers, side)}
            for side in SCRIPTS
        }
        ours, theirs = runs["relax"], runs["hugging face"]
        ratios = [ours[i]["rows_per_s"] / theirs[i]["rows_per_s"] for i in ours if i in theirs]
        by_cpu = [theirs[i]["cpu_ms_per_row"] / ours[i]["cpu_ms_per_row"] for i in ours if i in theirs]
        ratio = statistics.median(ratios)
        medians = {
            name: {side: statistics.median(r[name] for r in runs[side].values()) for side in SCRIPTS}
            for name in ("rows_per_s", "cpu_ms_per_row", "peak_mb")
        }
        result.append(
            {"rate": rate, "workers": workers, "ratio": ratio, "ratios": ratios, "reached": ratio >= SPEED}
            | {"by_cpu": statistics.median(by_cpu), **medians}
        )
    return result


def flatness(samples: Sequence[tuple[int, float]], rows: int) -> dict[str, Any]:
    """The most memory in the second and in the last quarter of the rows, and whether it stayed flat."""

    def most(first: float, last: float) -> float:
        return max((mb for count, mb in samples if first * rows <= count <= last * rows), default=0.0)

    second, last = most(0.25, 0.5), most(0.75, 1.0)
    growth = last / second if second else float("inf")
    return {"second_quarter_mb": second, "last_quarter_mb": last, "growth": growth, "reached": growth <= FLAT}


def table(bars: Sequence[Mapping[str, Any]], title: str) -> Table:
    caption = (
        f"ratio: Relax / Hugging Face, median of the rounds (least to most), the bar is {SPEED:g}; by CPU: in CPU time"
    )
    result = Table(title=title, caption=caption)
    for heading in ("sound", "workers", "Relax rows/s", "HF rows/s", "ratio", "by CPU", "Relax MB", "HF MB", "bar"):
        result.add_column(heading, justify="right", no_wrap=True)
    for bar in bars:
        ours, theirs = (f"{bar['rows_per_s'][side]:.1f}" for side in SCRIPTS)
        memory = [f"{bar['peak_mb'][side]:,.0f}" for side in SCRIPTS]
        ratio = f"{bar['ratio']:.2f} ({min(bar['ratios']):.2f} to {max(bar['ratios']):.2f})"
        verdict = "reached" if bar["reached"] else "missed"
        cpu = f"{bar['by_cpu']:.2f}"
        result.add_row(f"{bar['rate']} Hz", str(bar["workers"]), ours, theirs, ratio, cpu, *memory, verdict)
    return result


def compared(bench: Bench) -> dict[str, Any]:
    """Everything that is measured. The largest files come last: only one set lies in the folder at a time."""
    a = bench.a
    report: dict[str, Any] = {"differences": {}, "runs": []}
    first, *others = a.rates
    for rate in (*others, first):
        whole = rate == first and not a.skip_memory
        files = bench.files(rate, max(a.rows if whole else 0, a.measured + a.warmup))
        report["differences"][rate] = bench.same(files)
        worst = ", ".join(f"{kind} {value:.1g}" for kind, value in report["differences"][rate].items())
        bench.say(f"both sides make the same of the first {PROBED} rows; the largest differences: {worst}")
        report["runs"] += bench.rounds(rate, files)
        if whole:
            workers = max(a.workers)
            result = bench.measure("relax", files, workers, 1, a.rows - 1)
            report["memory"] = flatness(result["memory"], a.rows) | {"run": result, "rows": a.rows}
        for file in bench.folder.glob("*.parquet"):
            file.unlink()
    return report | {"speed": judged(report["runs"])}


def main() -> None:
    a = arguments()
    sys.path.insert(0, str(HERE.parent))
    from benchmarks.data_files import WORDS
    from benchmarks.embedded import machine
    from relax_plugin_omni.config import TinyOmni
    from relax_plugin_omni.tiny import tiny_tokenizer

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        bench = Bench(Path(folder), a, console)
        tiny_tokenizer(TinyOmni(words=WORDS)).save_pretrained(bench.tokenizer)
        report = compared(bench)
    if a.json:
        settings = {name: value for name, value in vars(a).items() if name not in ("json", "folder")}
        a.json.write_text(json.dumps({"started": started, "machine": machine(), "settings": settings, **report}))
    console.print(table(report["speed"], f"Rows of a 448x448 JPEG and 10 s of sound; {a.measured} rows a process"))
    if memory := report.get("memory"):
        verdict = "reached" if memory["reached"] else "missed"
        bench.say(
            f"{verdict}: over {a.rows} rows memory went from {memory['second_quarter_mb']:,.0f} MB (most of the second "
            f"quarter) to {memory['last_quarter_mb']:,.0f} MB (last quarter); allowed: {FLAT:g} times"
        )


if __name__ == "__main__":
    main()
