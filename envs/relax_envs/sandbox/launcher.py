"""What runs in the child: takes its rights away, then runs the program. Started by its path, never imported.

Argument: marshalled settings, in hexadecimal: the limits, the folder, what may be read, the number of the pipe to
which it says that the guard is up, and as ``report`` that for verdicts, where a judge runs tests and the program has a
process of its own. Whatever fails before the guard is up is a fault of the sandbox, not of the program.
"""

import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here costs every run
    from typing import Any

CAPABILITIES = 0x20080522  # version 3 of capset's header


def main() -> None:
    """Guard, say so, run."""
    settings = marshal.loads(bytes.fromhex(sys.argv[1]))
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if settings["report"] is not None:
        _apart(settings)
        return
    _begin(settings["status"], _guard(settings, settings["folder"], settings["parent"]))
    _run(_module("__main__"), settings["folder"])


def _begin(status: int, held: "list[str]", program: int = 0) -> None:
    os.write(status, " ".join([str(program), *held]).encode())
    os.close(status)


def _apart(settings: "dict[str, Any]") -> None:
    """The program in a process of its own, forked before anything of the tests is read; the judge in this one."""
    import ctypes  # noqa: F401  # what both need

    import landlock  # type: ignore[import-not-found]  # noqa: F401  # beside this file, which is in no package here
    import peer  # type: ignore[import-not-found]  # noqa: F401
    import seccomp  # type: ignore[import-not-found]  # noqa: F401

    asked, asks = os.pipe()
    answered, answers = os.pipe()
    nothing, judge = os.open(os.devnull, os.O_RDONLY), os.getpid()
    program = os.fork()
    if program == 0:
        os.dup2(nothing, 0)
        for end in (asks, answered, nothing, settings["status"], settings["report"]):
            os.close(end)
        _as_program(settings, asked, answers, judge)
    else:
        for end in (asked, answers, nothing):
            os.close(end)
        _as_judge(settings, answered, asks, program)


def _as_program(settings: "dict[str, Any]", source: int, sink: int, judge: int) -> None:
    from serve import serve  # type: ignore[import-not-found]

    os.environ["HOME"] = os.environ["TMPDIR"] = folder = f"{settings['folder']}/program"
    os.chdir(folder)
    held = _guard(settings, folder, judge)
    module = _module("solution")
    serve(source, sink, module, held, lambda: _run(module, folder))


def _as_judge(settings: "dict[str, Any]", source: int, sink: int, program: int) -> None:
    import json

    from judge import Judge, run  # type: ignore[import-not-found]

    os.environ["HOME"] = os.environ["TMPDIR"] = folder = f"{settings['folder']}/judge"
    os.chdir(folder)
    held = _guard(settings, folder, settings["parent"], judges=True)
    judge = Judge(source, sink)
    theirs = judge.receive()
    _begin(settings["status"], [layer for layer in held if layer in theirs], program)
    gone = run(judge, program, settings["report"], json.loads(sys.stdin.buffer.read()))
    os.close(settings["report"])
    os.close(sink)
    if not gone:
        os.waitpid(program, 0)
    os._exit(0)


def _guard(settings: "dict[str, Any]", folder: str, parent: int, judges: bool = False) -> "list[str]":
    """Put every layer up that this system has; their names. A judge's death is to be a signal to its program."""
    import ctypes

    import landlock
    import seccomp

    del sys.path[0]
    held = ["time", "memory"]
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if os.uname().sysname != "Linux":
        return held
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, 9, 0, 0, 0) or os.getppid() != parent:  # PR_SET_PDEATHSIG: it dies with its parent
        raise OSError(ctypes.get_errno(), "the parent is gone")
    held.append("parent")
    if judges:
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody of the same user may look into it
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs")
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)):  # root without its powers
        raise OSError(ctypes.get_errno(), "capset")
    if landlock.abi():
        landlock.apply([folder], settings["readable"], ["/dev/null", "/dev/zero", "/dev/urandom"], judges)
        held.append("files")
    if seccomp.supported():
        seccomp.apply()
        held += ["network", "processes"]
    return held


def _module(name: str) -> "Any":
    """An empty module. For a judge it is not ``__main__``: what stands behind that is no part of what tests ask for."""
    module = sys.modules[name] = type(sys)(name)
    return module


def _run(module: "Any", folder: str) -> None:
    """The program, as a module."""
    module.__file__ = program = f"{folder}/program.py"
    with open(program, encoding="utf-8") as file:
        text = file.read()
    for own in ("landlock", "seccomp", "serve", "peer", "wire"):
        sys.modules.pop(own, None)
    sys.argv = [program]
    sys.path[:] = [folder, *sys.path]
    sys.excepthook = _excepthook
    exec(compile(text, program, "exec", dont_inherit=True), module.__dict__)


def _excepthook(kind: "Any", error: BaseException, trace: "Any") -> None:
    """As Python's, without what is here: a traceback begins in the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


main()
