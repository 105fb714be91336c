"""The folder of a program that may be hostile: how much is in it, and how to be rid of it."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress


def holds_more(folder: str, size: int, entries: int) -> bool:
    """Whether there are more bytes or entries in it, or places where one cannot look: too deep, or closed to us."""
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries -= 1
                    size -= entry.stat(follow_symlinks=False).st_blocks * 512
                    if entries < 0 or size < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:  # removed just now
            continue
        except OSError:
            return True
    return False


def remove(folder: str) -> None:
    """Remove it with all that is in it; nothing writes there any more.

    Folders in folders are moved up before they are emptied: they may be nested deeper than a path can say, or Python
    can recurse, and may be closed even to their owner.
    """
    name, moved = secrets.token_hex(8), 0
    with suppress(OSError):
        while inner := _without_files(folder):
            for path in inner:
                for deeper in _without_files(path):
                    os.rename(deeper, f"{folder}/{name}{moved}")
                    moved += 1
                os.rmdir(path)
        os.rmdir(folder)


def _without_files(folder: str) -> list[str]:
    """Remove the files of a folder, and open the folders in it, whose paths are returned."""
    with os.scandir(folder) as found:
        entries = list(found)
    folders = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            folders.append(entry.path)
        else:
            os.unlink(entry.path)
    return folders
