"""What the benchmark concludes from measured steps, and that its own contender does the work that it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import embedded

SCRIPTS = Path(embedded.__file__).parent


def result(framework: str, round: int, seconds: float, lengths: str = "fixed", **changed: Any) -> dict[str, Any]:
    """What a process measured; its CPU time is half of its wall time."""
    steps = 10
    return {
        "framework": framework,
        "lengths": lengths,
        "round": round,
        "steps": steps,
        "threads": 1,
        "step_s": [seconds] * steps,
        "step_s_median": seconds,
        "step_s_min": seconds,
        "step_s_max": seconds,
        "cpu_s_per_step": seconds / 2,
        "completions_per_s": 256 / seconds,
        "tokens_per_step": 16384,
        "rss_mb": 500.0,
        "reward_first": 0.02,
        "reward_last": 0.4,
    } | changed


def test_a_ratio_compares_processes_of_one_round_and_the_median_round_counts() -> None:
    relax = [result("relax", i, seconds) for i, seconds in enumerate((1.0, 2.0, 4.0))]
    trl = [result("trl", i, seconds) for i, seconds in enumerate((2.0, 3.0, 2.0))]
    assert embedded.ratios([*trl, *relax]) == {"relax": [1, 1, 1], "trl": [2.0, 1.5, 0.5]}
    (bar,) = embedded.judged([*trl, *relax])
    assert (bar["peer"], bar["lengths"], bar["ratio"], bar["reached"]) == ("trl", "fixed", 1.5, True)


@pytest.mark.parametrize("seconds, reached", [(1.39, False), (1.41, True)])
def test_the_bar_on_heavy_tailed_lengths(seconds: float, reached: bool) -> None:
    found = [result("relax", 0, 1.0, "tail"), result("trl", 0, seconds, "tail")]
    assert [(bar["lengths"], bar["reached"]) for bar in embedded.judged(found)] == [("tail", reached)]


def test_a_process_that_did_other_work_is_refused() -> None:
    a = embedded.arguments(["--steps", "10"])
    embedded.check("relax", result("relax", 0, 1.0), "fixed", a)
    for changed in ({"tokens_per_step": 16000}, {"completions_per_s": 200.0}, {"reward_last": 0.01}, {"step_s": [1.0]}):
        with pytest.raises(SystemExit, match=r"^relax: "):
            embedded.check("relax", result("relax", 0, 1.0, **changed), "fixed", a)


def test_contenders_must_sample_and_learn_alike() -> None:
    relax = result("relax", 0, 1.0, "tail", tokens_per_step=4000)
    assert not list(embedded.unlike([relax, result("trl", 0, 1.0, "tail", tokens_per_step=4100)]))
    assert len(list(embedded.unlike([relax, result("trl", 0, 1.0, "tail", tokens_per_step=6000)]))) == 1
    slow = result("trl", 0, 1.0, "tail", tokens_per_step=4000, reward_last=0.1)
    assert len(list(embedded.unlike([relax, slow]))) == 1


def test_waiting_for_a_core_is_noticed() -> None:
    found = [result("relax", 0, 1.0, cpu_s_per_step=0.99), result("trl", 0, 2.0)]
    assert embedded.busy(found) == ["trl"]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["fixed", "tail"])
def test_relax_does_the_work(lengths: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPTS / "relax_work.py"), "--steps", "1", "--warmup", "1", "--json", str(out)]
    subprocess.run([*command, *(["--tail"] if lengths == "tail" else [])], check=True)
    found = json.loads(out.read_text())
    assert found["framework"] == "relax" and len(found["step_s"]) == 1
    if lengths == "fixed":
        assert found["tokens_per_step"] == 256 * 64
    else:
        assert 256 * 10 < found["tokens_per_step"] < 256 * 20
