"""What the data benchmark concludes from what it measured, its files, and one small run of all of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from pyarrow import parquet

from benchmarks import data, data_files
from benchmarks.data_meter import Meter


def result(side: str, round: int, speed: float, rate: int = 16_000, workers: int = 1) -> dict[str, Any]:
    return {
        "side": side,
        "round": round,
        "rate": rate,
        "workers": workers,
        "rows_per_s": speed,
        "cpu_ms_per_row": 500 / speed if side == "relax" else 1000 / speed,
        "peak_mb": 500.0,
    }


def test_a_ratio_compares_processes_of_one_round_and_the_median_round_counts() -> None:
    found = [result("relax", i, speed) for i, speed in enumerate((100.0, 120.0, 90.0))]
    found += [result("hugging face", i, speed) for i, speed in enumerate((100.0, 60.0, 100.0))]
    found += [result("relax", 0, 10.0, workers=2), result("hugging face", 0, 11.0, workers=2)]
    one, two = data.judged(found)
    assert (one["ratios"], one["ratio"], one["reached"]) == ([1.0, 2.0, 0.9], 1.0, True)
    assert one["rows_per_s"] == {"relax": 100.0, "hugging face": 100.0}
    assert one["by_cpu"] == 2.0
    assert (two["workers"], two["reached"]) == (2, False)


@pytest.mark.parametrize(("last", "reached"), [(1040.0, True), (1060.0, False)])
def test_memory_is_flat_when_the_last_quarter_takes_no_more_than_the_second(last: float, reached: bool) -> None:
    samples = [(0, 300.0), (20, 2000.0), (30, 1000.0), (45, 900.0), (60, 3000.0), (80, last), (99, 500.0)]
    found = data.flatness(samples, 100)
    assert (found["second_quarter_mb"], found["last_quarter_mb"], found["reached"]) == (1000.0, last, reached)


def test_memory_that_nobody_looked_at_is_not_flat() -> None:
    assert not data.flatness([(0, 300.0)], 100)["reached"]


def test_sides_that_make_different_rows_are_not_compared() -> None:
    row = {"ids-0": np.array([1, 2]), "pixels-0": np.ones((2, 3), np.float32), "mel-0": np.ones((2, 3), np.float32)}
    assert data.differences(row, {**row, "mel-0": row["mel-0"] + 5e-4})["mel"] == pytest.approx(5e-4, rel=0.01)
    for name, other in (
        ("ids-0", np.array([1, 3])),
        ("ids-0", np.array([1, 2, 2])),
        ("pixels-0", row["pixels-0"] + 0.01),
        ("mel-0", row["mel-0"][:, :2]),
    ):
        with pytest.raises(SystemExit, match=f"not comparable: {name}"):
            data.differences(row, {**row, name: other})
    with pytest.raises(SystemExit, match="not comparable"):
        data.differences(row, {"ids-0": row["ids-0"]})


def test_a_meter_counts_what_comes_after_the_warmup(tmp_path: Path) -> None:
    meter = Meter(warmup=2, rows=3)
    with meter.watching():
        assert [meter.row(10, 100) for _ in range(5)] == [True, True, True, True, False]
    meter.write(tmp_path / "out.json", side="relax")
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["rows"], found["tokens_per_row"], found["bytes_per_row"], found["side"]) == (3, 10, 100, "relax")
    assert found["cpu_ms_per_row"] >= 0
    assert found["rows_per_s"] == pytest.approx(3 / found["seconds"])


def test_rows_are_all_different_and_readable(tmp_path: Path) -> None:
    files = data_files.write(tmp_path, 25, 16_000, shards=2, processes=1)
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    assert [row["id"] for row in rows] == [str(i) for i in range(25)]
    for name in ("images", "audios"):
        assert len({row[name][0]["bytes"] for row in rows}) == 25
    assert Image.open(io.BytesIO(rows[7]["images"][0]["bytes"])).size == (448, 448)
    samples, rate = soundfile.read(io.BytesIO(rows[7]["audios"][0]["bytes"]))
    assert (samples.shape, rate) == ((160_000,), 16_000)
    assert rows[7]["prompt"].startswith("<image> <audio> w") and len(rows[7]["prompt"].split()) == 42


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_sides_run_and_make_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = [
        "--rows",
        "60",
        "--measured",
        "20",
        "--warmup",
        "20",
        "--rounds",
        "1",
        "--workers",
        "2",
        "--rates",
        "16000",
    ]
    command = [sys.executable, data.__file__, *sizes, "--json", str(out), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [(bar["rate"], bar["workers"]) for bar in report["speed"]] == [(16_000, 2)]
    assert len({run["tokens_per_row"] for run in report["runs"]}) == 1
    assert report["memory"]["rows"] == 60
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "the files are gone"
