"""Real scanned digits as a data set: ``python -m relax_envs.digits FOLDER``.

The 1,797 digits that come with scikit-learn (UCI, "Optical Recognition of Handwritten Digits"; Alpaydin and Kaynak,
1998), written as PNG files of 64 x 64 with ``train.jsonl`` (1,500 rows) and ``test.jsonl`` (297 rows) beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from relax_core.errors import DataError
from relax_core.keys import generator

PROMPT = "what digit ? <image>"
ANSWERS = tuple("0123456789")
TOTAL, TRAIN = 1797, 1500
_SIDE, _SCALE = 8, 8


def write(folder: Path) -> bool:
    """Write the data set unless it is there already, whole or not at all. Returns whether it was written.

    Raises DataError when the folder holds something else, or when scikit-learn is missing.
    """
    if complete(folder):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: exists and is not this data set: name another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _fill(made)
        made.chmod(0o755)
        os.replace(made, folder)  # an empty folder of that name is replaced too
    except OSError:
        if not complete(folder):  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return True


def complete(folder: Path) -> bool:
    """Whether the folder holds the data set."""
    return (folder / "train.jsonl").is_file() and (folder / "test.jsonl").is_file()


def _fill(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits: they come with scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    grey_NHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    (folder / "images").mkdir()
    rows = []
    for i, (grey_HW, label) in enumerate(zip(grey_NHW, digits.target, strict=True)):
        name = f"images/{i:04}.png"
        Image.fromarray(grey_HW.repeat(_SCALE, 0).repeat(_SCALE, 1)).convert("RGB").save(folder / name)
        content = [{"role": "user", "content": PROMPT}]
        rows.append({"id": f"digit-{i:04}", "messages": content, "images": [name], "answer": ANSWERS[label]})
    assert len(rows) == TOTAL
    order = generator(0, "digits").permutation(TOTAL).tolist()  # the source sorts them by writer
    for name, places in (("train.jsonl", order[:TRAIN]), ("test.jsonl", order[TRAIN:])):
        lines = [json.dumps(rows[place]) for place in sorted(places)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m relax_envs.digits FOLDER", file=sys.stderr)
        return 2
    try:
        written = write(Path(arguments[0]))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    state = "written" if written else "already there"
    print(f"{arguments[0]}: {state}: {TRAIN} rows in train.jsonl, {TOTAL - TRAIN} in test.jsonl")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
