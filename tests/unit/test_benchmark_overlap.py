"""What the overlap benchmark draws and concludes, and that its runs do the work that they are given."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap, overlap_bars, overlap_plugin, overlap_work

SCRIPTS = Path(overlap.__file__).parent
DRAWS = [(i + 0.5) / 20_000 for i in range(20_000)]


def measured(staleness: int, step: float, wait: float, busy: float = 0.5, **changed: Any) -> dict[str, Any]:
    """A run of two steps."""
    metrics = {"length/trained": 96.0, "length/played": 95.0, "reward": 0.1, "lag/max": staleness}
    return {
        "framework": "relax",
        "work": "lengths",
        "placement": "separate",
        "staleness": staleness,
        "rest_s": None,
        "round": 0,
        "warmup": 0,
        "step_s": [step, step],
        "wait_s": [wait, wait],
        "compute_s": [step - wait - 0.05] * 2,
        "engines": [{"busy_share": busy}],
        "metrics": [metrics, metrics],
        "summary": {"lag_tokens": {"0": 30, str(staleness or 1): 10}},
        "cpu_s_per_step": 1.0,
    } | changed


def test_lengths_and_latencies_have_the_stated_quantiles() -> None:
    lengths = [overlap_plugin.length(u, 1000) for u in DRAWS]
    assert statistics.median(lengths) == pytest.approx(150, abs=1)
    assert sum(n == 1000 for n in lengths) / len(lengths) == pytest.approx(0.05, abs=0.002)
    assert min(lengths) >= 1 and overlap_plugin.length(0.0, 4) == 1
    sleeps = sorted(map(overlap_plugin.latency, DRAWS))
    assert statistics.median(sleeps) == pytest.approx(0.05, rel=0.01)
    assert sleeps[int(0.99 * len(sleeps))] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("total, turns, found", [(7, 3, [2, 2, 3]), (2, 3, [1, 1]), (384, 1, [384])])
def test_the_turns_of_a_play_share_its_tokens(total: int, turns: int, found: list[int]) -> None:
    assert overlap_plugin.parts(total, turns) == found


@pytest.mark.parametrize(
    "busy, generate, best",
    [(0.6, 0.6, 0.9), (1.0, 1.0, 1.0)],  # the trainer is the slower one; the engine is
)
def test_the_ideal_is_the_slower_phase_measured_where_it_does_not_wait(
    busy: float, generate: float, best: float
) -> None:
    runs = [
        measured(2, 1.0, 0.9, busy, rest_s=0.9),
        measured(0, 2.0, 1.1),  # trains for 0.9 s
        measured(2, 1.25, 0.05),
        measured(4, 1.0, 0.0),  # not the one that is judged
    ]
    found = overlap_bars.ideal(runs, "lengths", 2)
    assert found is not None
    assert (found["generate_s"], found["train_s"], found["ideal_s"]) == pytest.approx((generate, 0.9, best))
    assert found["reached"] == pytest.approx(best / 1.25)
    assert overlap_bars.ideal(runs[1:], "lengths", 2) is None


@pytest.mark.parametrize("step, ok", [(0.99, True), (1.02, False)])
def test_the_median_round_must_reach_the_bar(step: float, ok: bool) -> None:
    def of_round(number: int, step: float) -> list[dict[str, Any]]:
        runs = [measured(2, 1.0, 0.9, 0.6, rest_s=0.9), measured(0, 2.0, 1.1), measured(2, step, 0.0)]
        return [run | {"round": number} for run in runs]

    found = [*of_round(0, 5.0), *of_round(1, step), *of_round(2, 0.9)]
    (bar,) = overlap_bars.judged(found, overlap.STALENESS)
    assert (bar["work"], bar["staleness"], bar["ok"], len(bar["rounds"])) == ("lengths", 2, ok, 3)


def test_a_ratio_compares_mean_steps_of_one_round() -> None:
    runs = [measured(0, 3.0, 2.0, placement="colocate"), measured(2, 1.5, 0.0), measured(0, 2.0, 1.0)]
    found = {(r["setting"], r["peer"]): r["ratio"] for r in overlap.ratios(runs)}
    assert found == {("separate@2", "colocate"): 2.0, ("separate@2", "separate@0"): pytest.approx(4 / 3)}


def test_settings_that_trained_other_replies_are_not_compared() -> None:
    runs = [measured(0, 1.0, 0.0), measured(2, 1.0, 0.0)]
    assert overlap_bars.unlike(runs) == []
    runs[1]["metrics"] = [runs[1]["metrics"][0] | {"length/trained": 90.0}, runs[1]["metrics"][1]]
    assert len(overlap_bars.unlike(runs)) == 1


def test_a_row_shows_idle_engines_and_the_lag_of_tokens() -> None:
    row = overlap_bars.row([measured(2, 1.2, 0.3, 0.75)])
    assert (row["setting"], row["steps_per_hour"], row["engine_idle"]) == ("separate@2", 3000, 0.25)
    assert row["lag_tokens"] == {"0": 0.75, "2": 0.25}


def test_an_engines_counters_count_between_the_ends_of_the_measured_steps() -> None:
    def note(at: float, busy: float) -> dict[str, Any]:
        return {"at": at, "pid": 1, "busy_s": busy, "cpu_s": busy, "drawn": int(10 * busy), "decodes": int(busy)}

    notes = [note(0.5, 0.2), note(1.01, 1.0), note(2.0, 1.5), note(3.01, 3.0), note(4.0, 3.5)]
    gained = {"busy_s": 2.0, "cpu_s": 2.0, "drawn": 20, "decodes": 2}
    assert overlap_work.within(notes, 1.0, 3.0) == pytest.approx({"seconds": 2.0, "busy_share": 1.0} | gained)


def test_both_placements_get_the_same_number_of_workers() -> None:
    colocate, separate = (overlap_work.runtime("ray", placement)["roles"] for placement in ("colocate", "separate"))
    assert (colocate["engine"]["replicas"], colocate["trainer"]["ranks"]) == (2, 2)
    assert (separate["engine"]["replicas"], separate["trainer"]["ranks"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_both_placements_on_the_same_replies(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [sys.executable, str(SCRIPTS / "overlap.py"), "--quick", "--json", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, env=os.environ | {"COLUMNS": "160"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [r["setting"] for r in found["tables"]["lengths"]] == [
        "colocate",
        "separate@2",
        "separate@2, resting trainer",
    ]
    assert found["problems"] == [] and found["bars"] == []  # runs of two steps decide nothing
    for run in found["runs"]:
        assert len(run["step_s"]) == len(run["wait_s"]) == 2
        assert all(0 <= wait <= step for step, wait in zip(run["step_s"], run["wait_s"], strict=True))
        assert run["cpu_s_per_step"] > 0 and run["engines"][0]["drawn"] > 0
    lags = [max(map(int, run["summary"]["lag_tokens"])) for run in found["runs"]]
    assert lags == [0, 2, 2]
