"""A seccomp filter that a process puts on itself: no network, no other processes, nothing that changes the system.

Standard library only, and no other module of ours: the launcher loads it by its path. System call numbers are those of
Linux on x86_64 and aarch64 (the kernel's own tables); the filter is classic BPF (``man 2 seccomp``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _BITS, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_NR, _ARCHITECTURE, _ARGS = 0, 4, 16
"""Offsets in seccomp_data; arguments are 64 bits wide, the low half first."""
_CLONE_THREAD = 0x00010000

DENIED: dict[str, tuple[int, int]] = {
    # network; for pairs of sockets see below
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # other programs and other processes
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setpriority": (141, 140),
    "setrlimit": (160, 164),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # owners and rights of files, of which Landlock knows nothing
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    # the system
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "acct": (163, 89),
    "quotactl": (179, 60),
    # what processes of one user share, and memory that no limit counts
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
"""Refused with EPERM: name -> number on (x86_64, aarch64); -1 where there is none."""

_CLONE, _CLONE3, _KILL_CALL, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
_SOCKETPAIR, _PRCTL, _FCNTL, _IOCTL = (53, 199), (157, 167), (72, 25), (16, 29)
_UNIX, _STREAM, _KIND_OF_SOCKET = 1, 1, 0xF
_COMMANDS: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
    # PR_SET_PDEATHSIG (to outlive its parent), _DUMPABLE, _SECUREBITS, _MM, _CHILD_SUBREAPER, _PTRACER
    _PRCTL: (0, (1, 4, 28, 35, 36, 0x59616D61)),
    # to have a pipe send a signal to somebody: F_SETOWN, F_SETSIG, F_SETOWN_EX
    _FCNTL: (1, (8, 10, 15)),
    # the same by ioctl, and to type into a terminal: FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCSCTTY, TIOCLINUX
    _IOCTL: (1, (0x8901, 0x8902, 0x5412, 0x540E, 0x541C)),
}
"""Refused with EPERM where an argument, of the given place, has one of these values."""

Instruction = tuple[int, int, int, int]
_REFUSE: Instruction = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_PASS: Instruction = (_RETURN, 0, 0, _ALLOW)


def supported() -> bool:
    """Whether the numbers of this machine are known."""
    return os.uname().sysname == "Linux" and os.uname().machine in _ARCH and struct.calcsize("P") == 8


def program(machine: str, pid: int) -> list[Instruction]:
    """The filter: (code, jump if true, jump if false, value) of each instruction."""
    column = 0 if machine == "x86_64" else 1
    found: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    if machine == "x86_64":
        found += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            found += [(_EQUAL, 0, 1, numbers[column]), _REFUSE]
    found += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]  # libc takes clone then
    # clone: threads only
    found += _unless(_CLONE[column], [(_LOAD, 0, 0, _ARGS), (_BITS, 1, 0, _CLONE_THREAD)])
    # signals: to itself only
    for call in (_KILL_CALL, _TGKILL):
        found += _unless(call[column], [(_LOAD, 0, 0, _ARGS), (_EQUAL, 1, 0, pid)])
    # pairs of sockets that can be sent nowhere else: event loops have one
    found += _unless(
        _SOCKETPAIR[column],
        [
            (_LOAD, 0, 0, _ARGS),
            (_EQUAL, 0, 3, _UNIX),
            (_LOAD, 0, 0, _ARGS + 8),
            (_AND, 0, 0, _KIND_OF_SOCKET),
            (_EQUAL, 1, 0, _STREAM),
        ],
    )
    for call, (place, values) in _COMMANDS.items():
        found += _refused_values(call[column], place, values)
    # limits may be read (the new ones are a null pointer), and never be set
    low, high = _ARGS + 16, _ARGS + 20
    found += _unless(_PRLIMIT[column], [(_LOAD, 0, 0, low), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, high), (_EQUAL, 1, 0, 0)])
    return [*found, _PASS]


def _unless(call: int, allowed: list[Instruction]) -> list[Instruction]:
    """Refuse a call unless the last test of ``allowed`` jumps over the refusal."""
    return [(_EQUAL, 0, len(allowed) + 2, call), *allowed, _REFUSE, _PASS]


def _refused_values(call: int, place: int, values: tuple[int, ...]) -> list[Instruction]:
    """Refuse a call whose argument at ``place`` is one of the values."""
    tests: list[Instruction] = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_EQUAL, 0, len(values) + 3, call), (_LOAD, 0, 0, _ARGS + 8 * place), *tests, _PASS, _REFUSE]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def apply() -> None:
    """Put the filter on this process, for good. Raises OSError when the kernel refuses."""
    instructions = program(os.uname().machine, os.getpid())
    packed = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    memory = ctypes.create_string_buffer(packed, len(packed))
    wanted = _Program(len(instructions), ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, ctypes.byref(wanted), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp")
