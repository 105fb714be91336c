"""What a run shows, and its summary: a line a step without a terminal, a live bar on one, results and curves."""

from __future__ import annotations

import io
import json
import multiprocessing
import time
from pathlib import Path

import pytest
from rich.console import Console

from relax_core.progress import Progress, StepView, clock, curve_lines, results_table, show_results
from relax_core.summary import COUNTS, Summary, Usage, identity


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=110, force_terminal=terminal, _environ={"TERM": "xterm"})


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_each_step_is_one_line() -> None:
    out = console()
    with Progress(400, console=out) as progress:
        progress.step(StepView(1, 0.53, 2, 5123.4, {"text": 0.5, "image": None}))
        progress.note("checkpoint [a/b] is damaged")
        progress.step(StepView(2))
    lines = printed(out).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/400  reward 0.530  lag 2  5,123 tokens/s  ETA ")
    assert lines[0].endswith("  text 0.50  image -")
    assert lines[1] == "checkpoint [a/b] is damaged"
    assert lines[2].startswith("step 2/400  ETA ")


def test_a_long_line_is_not_wrapped() -> None:
    out = console()
    with Progress(2, console=out) as progress:
        progress.step(StepView(1, 0.5, 0, 1.0, {f"environment-{i}": 0.5 for i in range(20)}))
    assert len(printed(out).splitlines()) == 1


def test_on_a_terminal_there_is_a_bar_that_moves() -> None:
    out = console(terminal=True)
    with Progress(4, console=out, title="demo") as progress:
        progress.step(StepView(3, 0.53, 0, 12.0, {"text": 0.25}))
        progress.activity("evaluating text")
        progress.note("a note")
    text = printed(out)
    for word in ("demo", "3/4", "reward 0.530", "lag 0", "12 tokens/s", "ETA", "text 0.25", "━", "a note"):
        assert word in text, word


def test_the_time_to_the_end_follows_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(100, done=40, console=console())
    assert progress.eta() == "-"
    for step in range(41, 91):
        now += 60.0 if step < 60 else 2.0
        progress.step(StepView(step))
    assert progress.eta() == "0:20"


def test_clock() -> None:
    assert [clock(s) for s in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_results_and_where_the_curves_are() -> None:
    out = console()
    text = {"accuracy": 0.984, "stderr": 0.008, "items": 256.0, "n": 1.0, "failed": 0.0, "reward": float("nan")}
    image = {"accuracy": 1.0, "items": 1256.0, "n": 4.0, "pass@2": 0.5}
    show_results(out, {"text": text, "image": image}, Path("runs/my run"))
    lines = printed(out).splitlines()
    heading = next(line for line in lines if "evaluation" in line)
    assert all(word in heading for word in ("accuracy", "standard error", "items", "plays an item", "pass@2"))
    assert "failed" not in heading
    row = next(line for line in lines if "text" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["text", "0.984", "0.008", "256", "-", "1", "-"]
    row = next(line for line in lines if "image" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["image", "1.000", "-", "1,256", "-", "4", "0.500"]
    assert lines[-3] == "curves:   tensorboard --logdir 'runs/my run'"
    assert "runs/my run/metrics.jsonl" in lines[-2] and "runs/my run/summary.json" in lines[-2]


def test_without_evaluations_only_the_curves_are_named() -> None:
    out = console()
    show_results(out, {}, Path("runs/x"))
    assert printed(out).splitlines() == curve_lines(Path("runs/x"))
    assert results_table({}).row_count == 0


# --- summary ----------------------------------------------------------------------------------------------------------


def test_summary(tmp_path: Path) -> None:
    groups = {"issued": 12, "trained": 10, "in_flight": 2, "other": 3}
    evaluation = {"text": {"accuracy": 0.5, "stderr": float("nan")}}
    Summary(10, 1.23, 4.56, 789.04, evaluation, 2, groups, {"mean_length": {"played": 3.0}}).write(tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == {
        "steps": 10,
        "seconds": 1.2,
        "cpu_seconds": 4.6,
        "peak_rss_mb": 789.0,
        "evaluation": {"text": {"accuracy": 0.5, "stderr": None}},
        "max_lag": 2,
        "groups": {**dict.fromkeys(COUNTS, 0), "issued": 12, "trained": 10, "in_flight": 2},
        "mean_length": {"played": 3.0},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_identity_in_words() -> None:
    groups = dict(zip(COUNTS, (20, 10, 4, 3, 1, 7, 2), strict=True))
    assert identity(groups) == (
        "groups: 20 issued = 10 trained + 4 filtered + 3 failed + 1 dropped + 2 in flight; 7 evicted and played again"
    )
    assert "DOES NOT ADD UP: they are 20" in identity({**groups, "issued": 21})


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_usage_adds_up_over_resumes() -> None:
    # The system counts CPU time in ticks of 0.01 s.
    first = Usage()
    burn(0.05)
    before = first.state()
    assert 0.02 < before["cpu_seconds"] < 10 and before["seconds"] >= 0.05 and before["peak_rss_mb"] > 5
    second = Usage({**before, "seconds": 1000.0, "peak_rss_mb": 1e6})
    burn(0.05)
    after = second.state()
    assert before["cpu_seconds"] + 0.02 < after["cpu_seconds"] < before["cpu_seconds"] + 10
    assert 1000.04 < after["seconds"] < 1010
    assert after["peak_rss_mb"] == 1e6


CHILD = """
import time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
time.sleep(60)
"""


def test_usage_counts_children_while_they_live_and_afterwards() -> None:
    usage = Usage()
    child = multiprocessing.get_context("spawn").Process(target=exec, args=(CHILD,))
    start = time.process_time()
    child.start()
    while usage.state()["cpu_seconds"] - (time.process_time() - start) < 0.25:
        time.sleep(0.02)
    child.kill()
    child.join()
    assert usage.state()["cpu_seconds"] - (time.process_time() - start) >= 0.25
