"""Files and folders that are either complete or absent: written beside their place, then renamed into it.

A rename survives the death of the process at any moment. ``sync`` adds what survives the death of the machine: the
content is on the disk before the name is, and the folder's own entry after it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Suffix of a file that is being written; such a file means nothing and may be removed."""


def sync_path(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force every file and folder below ``folder``, and itself, to the disk."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_path(Path(path, name))
        sync_path(Path(path))


def write_file(path: Path, content: bytes, sync: bool = True) -> None:
    """Write or replace a file in one go. One writer at a time: the partial file's name is fixed."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    with open(partial, "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)
    if sync:
        sync_path(path.parent)


def write_json(path: Path, value: Any, sync: bool = True) -> None:
    """``write_file`` of indented JSON; the keys stay in their order. Raises ValueError for NaN and inf."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_file(path, (text + "\n").encode(), sync)


def remove_partial(folder: Path) -> None:
    """Remove what interrupted ``write_file`` calls left in ``folder``. Only for the folder's one writer."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
