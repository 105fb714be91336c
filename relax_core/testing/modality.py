"""What every modality must do, whatever it decodes. In a plugin's tests, all there is to write::

    def test_mine(tmp_path: Path) -> None:
        check_modality(Mine(Mine.Config()), [some_file, another_file], tmp_path)

A backend of a built-in modality is checked through it: ``Image(Image.Config(backends=("my_package.mine:Backend",)))``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from relax_core.errors import DataError
from relax_core.interfaces import Modality
from relax_core.types import Decoded

THREADS = 8
CUTS = (0.1, 0.35, 0.5, 0.75, 0.9, 0.99)
"""Where good files are cut off, in parts of their length."""

GARBAGE = {
    "empty": b"",
    "zeros": bytes(4096),
    "text": b"not a medium at all, but words " * 100,
    "page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "noise": bytes(i * 197 % 251 for i in range(4096)),
}
"""Content that is no medium, by a name for it."""


def check_modality(modality: Modality, files: Sequence[Path], folder: Path) -> None:
    """Raise AssertionError, saying what is wrong, unless the modality keeps its promises.

    ``files``: good ones, small, of every form that it reads; ``folder``: an empty one to write to. What is decoded has
    the shape that its kind has; it is the same from a path, from bytes, under another name, again and in several
    threads; ``restore`` gives back what ``dump`` wrote; and what is missing, empty, cut off or something else is
    refused with a DataError of one line that names it. No file stays open.
    """
    modality.decode(files[0])  # libraries open files of their own when they are first used
    before = open_files()
    found = {path: modality.decode(path) for path in files}
    for path, decoded in found.items():
        check_content(decoded, modality.kind, str(path))
        check_sources(modality, path, decoded, folder)
        check_dump(modality, decoded, str(path))
        check_cuts(modality, path, decoded, folder)
    check_refusals(modality, folder)
    check_threads(modality, found)
    after = open_files()
    assert after <= before, f"{after - before} files stay open"


def check_content(decoded: Decoded, kind: str, name: str) -> None:
    """Kind, type, shape, rate and times are as ``Decoded`` promises."""
    import numpy as np

    data = decoded.data
    assert decoded.kind == kind, f"{name}: gives {decoded.kind}, not {kind}"
    assert data.size, f"{name}: is decoded to nothing: shape {data.shape}"
    assert decoded.hash, f"{name}: has no hash"
    if kind == "audio":
        assert data.dtype == np.float32 and data.ndim == 1, f"{name}: {data.dtype} {data.shape}, not float32 (samples,)"
        assert np.isfinite(data).all(), f"{name}: a sample is not finite"
    else:
        axes = 3 if kind == "image" else 4
        assert data.dtype == np.uint8, f"{name}: {data.dtype}, not uint8"
        assert data.ndim == axes and data.shape[-1] == 3, f"{name}: shape {data.shape} is not (..., height, width, 3)"
    if kind == "image":
        assert decoded.rate is None, f"{name}: an image has rate {decoded.rate}"
    else:
        assert decoded.rate is not None and 0 < decoded.rate < float("inf"), f"{name}: rate {decoded.rate}"
    if decoded.times is not None:
        times = decoded.times
        assert kind == "video" and len(times) == len(data), f"{name}: {len(times)} times for {len(data)} frames"
        assert times[0] == 0 and all(a < b for a, b in pairwise(times)), f"{name}: times {times}"


def check_sources(modality: Modality, path: Path, decoded: Decoded, folder: Path) -> None:
    """A path, its bytes and a file with the wrong suffix give the same."""
    wrong = folder / "colon: 100%d.txt"
    wrong.write_bytes(path.read_bytes())
    for source in (path, path.read_bytes(), wrong):
        again = modality.decode(source)
        what = "bytes" if isinstance(source, bytes) else str(source)
        assert again == decoded, f"{path}: from {what} it is {again}, not {decoded}"


def check_dump(modality: Modality, decoded: Decoded, name: str) -> None:
    """What is restored equals what was dumped."""
    import numpy as np

    suffix, content = modality.dump(decoded)
    assert suffix.startswith(".") and content, f"{name}: dump gives suffix {suffix!r} and {len(content)} bytes"
    restored = modality.restore(content)
    assert restored == decoded, f"{name}: restored is {restored}, not {decoded}"
    assert np.array_equal(restored.data, decoded.data), f"{name}: restored data differ"


def check_cuts(modality: Modality, path: Path, decoded: Decoded, folder: Path) -> None:
    """A file that was cut off is refused, or nothing that counts was lost: never fewer frames or samples in silence."""
    content = path.read_bytes()
    for part in CUTS:
        cut = folder / f"cut-{path.name}"
        cut.write_bytes(content[: int(len(content) * part)])
        try:
            left = modality.decode(cut)
        except DataError as error:
            one_line(error, str(cut))
        else:
            assert left == decoded, f"{path} cut at {part:.0%} is read as {left}, not refused"


def check_refusals(modality: Modality, folder: Path) -> None:
    """What is not there, or no medium, is refused in one line with its name; so is a dump that is none."""
    refuse(modality, folder / "nowhere.bin")
    refuse(modality, folder)
    for name, content in GARBAGE.items():
        path = folder / f"{name}.bin"
        path.write_bytes(content)
        refuse(modality, path)
        refuse(modality, content)
        try:
            modality.restore(content)
        except DataError as error:
            one_line(error)
        else:
            raise AssertionError(f"restore takes {name} for a dump")


def check_threads(modality: Modality, found: dict[Path, Decoded]) -> None:
    """Several threads that decode at once get what one gets."""
    jobs = list(found) * max(1, 2 * THREADS // len(found))
    with ThreadPoolExecutor(THREADS) as pool:
        for path, decoded in zip(jobs, pool.map(modality.decode, jobs), strict=True):
            assert decoded == found[path], f"{path}: in a thread it is {decoded}, not {found[path]}"


def refuse(modality: Modality, source: Path | bytes) -> None:
    """Decoding must raise a DataError of one line, with the path if there is one."""
    name = str(source) if isinstance(source, Path) else ""
    try:
        decoded = modality.decode(source)
    except DataError as error:
        one_line(error, name)
    else:
        what = repr(source[:40]) if isinstance(source, bytes) else name
        raise AssertionError(f"{what} is read as {decoded}, not refused")


def one_line(error: DataError, *words: str) -> None:
    """The error's text must be one line with all of ``words``."""
    text = str(error)
    assert "\n" not in text, f"more than one line: {text}"
    assert all(word in text for word in words), f"{words} not in: {text}"
    assert len(text) < 2000, f"{len(text)} characters long: {text[:200]}..."


def open_files() -> int:
    """How many files this process has open; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
