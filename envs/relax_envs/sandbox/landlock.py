"""Landlock rules that a process puts on itself: it writes to its own folder alone, and reads what Python needs.

Standard library only, and no other module of ours: the launcher loads it by its path (``man 7 landlock``).
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here costs every run
    from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute (map a library), read a file, read a folder."""
_READ_FILE = 1 << 0 | 1 << 2
_WRITE_FILE, _TRUNCATE, _REFER, _IOCTL = 1 << 1, 1 << 14, 1 << 13, 1 << 15
_ALL = (1 << 13) - 1
"""Every right of the first version."""


def abi() -> int:
    """The kernel's version of Landlock; 0 where there is none."""
    if os.uname().sysname != "Linux":
        return 0
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, 0, 1)))


def rights(version: int) -> int:
    """The rights that a version of Landlock can take away."""
    return _ALL | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL if version >= 5 else 0)


def apply(writable: Iterable[str], readable: Iterable[str], devices: Iterable[str] = (), signals: bool = False) -> None:
    """Restrict this process, for good. Paths that do not exist are left out. Raises OSError when the kernel refuses.

    ``signals``: it may have some sent, such as that of its death to its children.
    """
    version = abi()
    handled = rights(version)
    scopes = 1 if signals else 3  # abstract sockets, and signals
    attributes = struct.pack("=QQQ", handled, 3, scopes)  # file system; TCP bind and connect
    size = 8 if version < 4 else 16 if version < 6 else 24
    libc = ctypes.CDLL(None, use_errno=True)
    rules = _checked(libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), 0), "landlock: rules")
    try:
        for path in writable:
            _allow(libc, rules, path, handled)
        for path in readable:
            _allow(libc, rules, path, _READ)
        for path in devices:
            _allow(libc, rules, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
        _checked(libc.syscall(_RESTRICT, rules, 0), "landlock: restrict")
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, allowed: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            allowed &= _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL
        rule = struct.pack("=Qi", allowed, descriptor)
        _checked(libc.syscall(_ADD, rules, 1, rule, 0), f"landlock: {path}")
    finally:
        os.close(descriptor)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result
