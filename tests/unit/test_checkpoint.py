"""Checkpoints: whole or absent whatever kills the writer, verified, never the last good one lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from relax_core.checkpoint import MANIFEST, Checkpoints, find_fault
from relax_core.errors import CheckpointError
from relax_core.testing.kills import killed_after, killed_at_each_operation, said


def fill(folder: Path, step: int) -> None:
    """Some files of known content, one of them in a folder of its own."""
    (folder / "trainer").mkdir()
    (folder / "trainer" / "weights.bin").write_bytes(random.Random(step).randbytes(3000))
    (folder / "state.json").write_text(json.dumps({"step": step}))
    (folder / "empty").write_bytes(b"")


def written(root: Path, *steps: int, keep: int = 10) -> Checkpoints:
    checkpoints = Checkpoints(root, keep)
    for step in steps:
        with checkpoints.write(step) as folder:
            fill(folder, step)
    return checkpoints


def newest_step(root: Path) -> int | None:
    found = Checkpoints(root, keep=2, readonly=True).newest()
    return found and found[0]


def test_a_checkpoint_is_found_again(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 50, 100)
    assert checkpoints.newest() == (100, tmp_path / "step-00000100")
    manifest = json.loads((tmp_path / "step-00000100" / MANIFEST).read_text())
    assert manifest["step"] == 100
    assert manifest["files"]["trainer/weights.bin"]["size"] == 3000
    assert set(manifest["files"]) == {"trainer/weights.bin", "state.json", "empty"}


def test_no_checkpoint(tmp_path: Path) -> None:
    reports: list[str] = []
    assert Checkpoints(tmp_path / "none", keep=2).newest(reports.append) is None
    assert Checkpoints(tmp_path / "never made", keep=2, readonly=True).newest() is None
    assert not (tmp_path / "never made").exists()
    assert reports == []


def test_before_is_for_a_past_step(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 50, 100, 150)
    assert checkpoints.before(149) == (100, checkpoints.path(100))
    assert checkpoints.before(150) == (150, checkpoints.path(150))
    assert checkpoints.before(49) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert written(tmp_path, 1, 2, 3, 4, 5, keep=3).steps() == [3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{n}" for n in (3, 4, 5)]


def test_truncated_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1, 2, 3, keep=3)
    for step in (2, 3):
        (checkpoints.path(step) / "state.json").write_bytes(b"")
    written(tmp_path, 4, keep=2)
    assert checkpoints.steps() == [1, 2, 3, 4]  # 1 is the only other good one
    written(tmp_path, 5, keep=2)
    assert checkpoints.steps() == [4, 5]


def test_altered_ones_that_were_seen_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1, 2, keep=2)
    flip(checkpoints.path(2) / "trainer" / "weights.bin", 7)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() == (1, checkpoints.path(1))
    with checkpoints.write(3) as folder:
        fill(folder, 3)
    assert checkpoints.steps() == [1, 2, 3]


def test_a_failing_writer_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1)
    with pytest.raises(RuntimeError, match="full"), checkpoints.write(2) as folder:
        fill(folder, 2)
        raise RuntimeError("the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_file_in_the_place_of_the_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give that file another name"):
        with Checkpoints(tmp_path, keep=2).write(1) as folder:
            (folder / MANIFEST).write_text("{}")


def test_a_step_may_be_written_again(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1, 2)
    with checkpoints.write(2) as folder:
        (folder / "other").write_text("new")
    assert checkpoints.newest() == (2, checkpoints.path(2))
    assert sorted(p.name for p in checkpoints.path(2).iterdir()) == [MANIFEST, "other"]
    assert checkpoints.steps() == [1, 2]


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


FILES = ["trainer/weights.bin", "state.json", "empty", MANIFEST]


@pytest.mark.parametrize(
    ("name", "damage"),
    [(n, d) for n in FILES for d in ("truncated", "longer", "missing") if (n, d) != ("empty", "truncated")],
)
def test_damage_is_reported_and_the_one_before_is_used(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = written(tmp_path, 50, 100)
    path = checkpoints.path(100) / name
    if damage == "missing":
        path.unlink()
    elif damage == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.write_bytes(path.read_bytes()[:-1])
    reports: list[str] = []
    assert checkpoints.newest(reports.append) == (50, checkpoints.path(50))
    [report] = reports
    assert "\n" not in report
    assert str(checkpoints.path(100)) in report and name in report
    assert report.endswith("; step-00000050 is used instead")


@pytest.mark.parametrize("name", FILES)
def test_every_single_changed_bit_is_found(tmp_path: Path, name: str) -> None:
    checkpoints = written(tmp_path, 50, 100)
    path = checkpoints.path(100) / name
    whole = path.read_bytes()
    bits = range(len(whole) * 8)
    for bit in bits if len(bits) < 120 else random.Random(0).sample(bits, 120):
        flip(path, bit)
        assert checkpoints.newest() == (50, checkpoints.path(50)), f"bit {bit}"
        path.write_bytes(whole)
    assert checkpoints.newest() == (100, checkpoints.path(100))


def test_a_manifest_of_another_step_is_no_manifest(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 50, 100)
    checkpoints.path(100).rename(checkpoints.path(200))
    reports: list[str] = []
    assert checkpoints.newest(reports.append) == (50, checkpoints.path(50))
    assert "belongs to step 100" in reports[0]


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 50, 100)
    for step in (50, 100):
        flip(checkpoints.path(step) / "state.json", 3)
    reports: list[str] = []
    assert checkpoints.newest(reports.append) is None
    assert [str(checkpoints.path(step)) in report for step, report in zip((100, 50), reports, strict=True)] == [1, 1]
    assert all(report.endswith("no older one is left") for report in reports)


def test_later_ones_are_removed_but_never_the_last_good_one(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 50, 100, 150)
    checkpoints.remove_after(100)
    assert checkpoints.steps() == [50, 100]
    flip(checkpoints.path(50) / "state.json", 3)
    with pytest.raises(CheckpointError, match="step 100 is: it stays"):
        checkpoints.remove_after(50)
    assert checkpoints.steps() == [50, 100]
    flip(checkpoints.path(100) / "state.json", 3)
    checkpoints.remove_after(0)  # nothing good is lost
    assert checkpoints.steps() == []


# --- kills ------------------------------------------------------------------------------------------------------------

SETUP = "from relax_core.checkpoint import Checkpoints"
WRITER = """
checkpoints = Checkpoints(folder / "c", keep=2)
for step in (1, 2, 3, 3):  # the first is removed, the last replaces the one before
    with checkpoints.write(step) as work:
        (work / "part").mkdir()
        (work / "part" / "a").write_bytes(bytes([step]) * 100)
        (work / "b").write_text(str(step))
    done(step)
"""


def test_a_kill_at_any_file_operation_loses_nothing_that_was_written(tmp_path: Path) -> None:
    folders = killed_at_each_operation(SETUP, WRITER, tmp_path)
    assert len(folders) > 60  # there were that many moments
    for folder in folders:
        before = newest_step(folder / "c") if (folder / "c").exists() else None
        acknowledged = max(map(int, said(folder)), default=0)
        reports: list[str] = []
        checkpoints = Checkpoints(folder / "c", keep=2)
        found = checkpoints.newest(reports.append)
        assert (found[0] if found else 0) >= max(acknowledged, before or 0), folder
        assert not reports, folder  # an interrupted write is no damage,
        assert not any(find_fault(checkpoints.path(s), s) for s in checkpoints.steps()), folder  # nor is a removal
        assert not list((folder / "c").glob(".*")), folder
        with checkpoints.write(9) as work:
            (work / "x").write_text("x")
        assert newest_step(folder / "c") == 9
    assert said(folders[-1]) == ["1", "2", "3", "3"]


@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_a_random_moment_loses_nothing_that_was_written(tmp_path: Path, seed: int) -> None:
    script = f"""
import itertools
{SETUP}
checkpoints = Checkpoints(folder / "c", keep=2)
for step in itertools.count(1):
    with checkpoints.write(step) as work:
        for i in range(5):
            (work / f"{{i}}").write_bytes(bytes([step % 256]) * 200_000)
    done(step)
"""
    seconds = random.Random(seed).uniform(0, 0.3)
    acknowledged = int(killed_after(script, tmp_path / "run", seconds)[-1])
    reports: list[str] = []
    found = Checkpoints(tmp_path / "run" / "c", keep=2).newest(reports.append)
    assert found is not None and found[0] in (acknowledged, acknowledged + 1)
    assert not reports
