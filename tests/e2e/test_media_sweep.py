"""Over 500 media files of all kinds: each is decoded rightly, or refused with a row error that says why.

And nothing that is fed to the decoders makes them crash, hang, or keep threads, files or memory.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from relax_core.errors import DataError
from relax_core.testing.media_cases import Case, image_cases, sound_cases, video_cases
from relax_core.testing.modality import check_content, one_line, open_files
from relax_modalities.audio import Audio
from relax_modalities.image import Image
from relax_modalities.video import Video

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore"),  # Pillow warns of odd files before it decides
]

MODALITIES: dict[str, Any] = {"image": Image, "audio": Audio, "video": Video}
CASES = [*image_cases(), *sound_cases(), *video_cases()]
GROWTH = 64 << 20
"""Bytes by which memory may grow over a thousand decodings: allocators keep some."""


def modality(case: Case) -> Any:
    cls = MODALITIES[case.kind]
    return cls(cls.Config(**dict(case.settings)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("media")


def test_the_sweep_is_large_and_names_each_file_once() -> None:
    names = {(case.kind, case.file) for case in CASES}
    assert len(names) == len(CASES) >= 500
    for kind in MODALITIES:
        assert sum(case.kind == kind and case.check is not None for case in CASES) >= 70
        assert sum(case.kind == kind and case.check is None for case in CASES) >= 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.file}")
def test_file(case: Case, folder: Path) -> None:
    case.run(modality(case), folder)


def test_a_thousand_decodings_leave_nothing_behind(folder: Path) -> None:
    paths = {(case.kind, case.file): case.path(folder) for case in CASES}

    def decode_all() -> int:
        refused = 0
        for case in CASES:
            try:
                modality(case).decode(paths[case.kind, case.file])
            except DataError:
                refused += 1
        gc.collect()
        return refused

    expected = sum(case.check is None for case in CASES)
    assert decode_all() == expected  # libraries start what they keep
    before = counts()
    assert [decode_all(), decode_all()] == [expected] * 2
    after = counts()
    assert after["files"] <= before["files"]
    assert after["threads"] <= before["threads"] and after["native threads"] <= before["native threads"]
    assert after["bytes"] - before["bytes"] < GROWTH


def counts() -> dict[str, int]:
    process = psutil.Process()
    return {
        "files": open_files(),
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "bytes": process.memory_info().rss,
    }


def damaged(whole: bytes, seed: int) -> Iterator[bytes]:
    """A file with flipped bits, with a hole of zeros, without a piece, with a piece twice, and with noise in it."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            changed[place] ^= 1 << int(rng.integers(8))
        yield bytes(changed)
    start, length = int(rng.integers(len(whole))), int(rng.integers(1, 200))
    piece = whole[start : start + length]
    yield whole[:start] + bytes(len(piece)) + whole[start + length :]
    yield whole[:start] + whole[start + length :]
    yield whole[:start] + piece * 2 + whole[start + length :]
    yield whole[:start] + rng.bytes(len(piece)) + whole[start + length :]


GOOD = [case for case in CASES if case.check is not None and "samples-1936000" not in case.file]


@pytest.mark.parametrize("kind", MODALITIES)
def test_damage_gives_an_error_or_a_medium(kind: str, folder: Path) -> None:
    """Formats without checksums cannot know of every bit; what comes is whole and bounded, or one line."""
    tried = 0
    for number, case in enumerate(case for case in GOOD if case.kind == kind):
        decoder = modality(case)
        for content in damaged(case.path(folder).read_bytes(), number):
            tried += 1
            try:
                decoded = decoder.decode(content)
            except DataError as error:
                one_line(error)
            else:
                check_content(decoded, kind, case.file)
                assert decoded.data.nbytes < 1 << 30, case.file
    assert tried >= 500


def test_a_path_is_a_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that FFmpeg would take for a protocol, a pattern or a list."""
    monkeypatch.chdir(tmp_path)
    good = next(case for case in CASES if case.file == "h264.mp4")
    content = good.path(tmp_path).read_bytes()
    for name in ("concat:a|b.mp4", "http:x.mp4", "pipe:0", "frame%d.mp4", "-", "data:text", "a b\u00e9\u4e2d.mp4"):
        path = Path(name)
        path.write_bytes(content)
        assert good.check is not None
        good.check(modality(good).decode(path))
        os.unlink(path)
