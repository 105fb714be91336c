"""The digits data set: written once, whole or not at all, and playable by single_turn."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from relax_core.content_hash import content_hash
from relax_core.errors import DataError
from relax_core.tasks import Scanned
from relax_envs.digits import complete, main, write
from relax_envs.single_turn import SingleTurn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data") / "deep" / "digits"
    assert main([str(found)]) == 0
    return found


def test_single_turn_reads_it(folder: Path) -> None:
    digits = SingleTurn(SingleTurn.Config(data=folder / "train.jsonl", eval_data=folder / "test.jsonl"))
    train, test = digits.tasks("train"), digits.tasks("eval")
    assert (len(train), len(test)) == (1500, 297)
    assert isinstance(train, Scanned) and not train.bad_places
    hashes = [{content_hash(task) for task in tasks} for tasks in (train, test)]
    assert len(hashes[0]) == 1500 and len(hashes[1]) == 297 and not hashes[0] & hashes[1]
    assert {task.modality for task in test} == {"image"}
    for tasks in (train, test):
        counts = Counter(task.answer for task in tasks)
        assert set(counts) == set("0123456789") and min(counts.values()) > len(tasks) / 20


def test_pictures_are_the_scanned_digits(folder: Path) -> None:
    from sklearn.datasets import load_digits

    assert len(list((folder / "images").iterdir())) == 1797
    pixels = np.asarray(Pillow.open(folder / "images" / "0042.png"))
    assert pixels.shape == (64, 64, 3)
    np.testing.assert_allclose(pixels[4::8, 4::8, 1] * (16 / 255), load_digits().images[42], atol=0.04)


def test_written_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "train.jsonl").stat().st_mtime_ns
    assert write(folder) is False
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: already there: 1500 rows in train.jsonl, 297 in test.jsonl\n"
    assert (folder / "train.jsonl").stat().st_mtime_ns == before
    assert [p.name for p in folder.parent.iterdir()] == ["digits"], "nothing half-made is left"


def test_another_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(DataError, match="exists and is not this data set: name another folder, or remove it"):
        write(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_without_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        write(tmp_path / "digits")
    assert not list(tmp_path.iterdir()) and not complete(tmp_path / "digits")


def test_usage() -> None:
    done = subprocess.run([sys.executable, "-m", "relax_envs.digits"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
