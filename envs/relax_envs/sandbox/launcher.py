"""What runs in the child: takes its rights away, then runs the program. Started by its path, never imported.

Arguments: a JSON object with the limits, the folder, the program's and the harness's file and the number of the pipe
to which it says that the guard is up. Whatever fails before that is a fault of the sandbox, not of the program.
"""

import json
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here costs every run
    from typing import Any

CAPABILITIES = 0x20080522  # version 3 of capset's header


def main() -> None:
    """Guard, say so, run."""
    settings = json.loads(sys.argv[1])
    held = _guard(settings)
    os.write(settings["status"], json.dumps(held).encode())
    os.close(settings["status"])
    _run(settings["program"], settings["harness"])


def _guard(settings: "dict[str, Any]") -> list[str]:
    """Put every layer up that this system has; their names."""
    import ctypes

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import landlock  # type: ignore[import-not-found]  # beside this file, which is no part of a package where it runs
    import seccomp  # type: ignore[import-not-found]

    del sys.path[0]
    held = ["time", "memory"]
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if os.uname().sysname != "Linux":
        return held
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(1, 9, 0, 0, 0) or os.getppid() != settings["parent"]:  # PR_SET_PDEATHSIG: it dies with its parent
        raise OSError(ctypes.get_errno(), "the parent is gone")
    held.append("parent")
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs")
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(nothing)):  # root without its powers
        raise OSError(ctypes.get_errno(), "capset")
    if landlock.abi():
        landlock.apply([settings["folder"]], settings["readable"], ["/dev/null", "/dev/zero", "/dev/urandom"])
        held.append("files")
    if seccomp.supported():
        seccomp.apply()
        held += ["network", "processes"]
    return held


def _run(program: str, harness: str) -> None:
    """The program as ``__main__``; with a harness as a module, and then the harness, which has a namespace of its own.

    As a module, since what stands behind ``if __name__ == "__main__"`` is no part of what a harness asks for.
    """
    with open(program, encoding="utf-8") as file:
        text = file.read()
    module = type(sys)("solution" if harness else "__main__")
    module.__file__ = program
    own: dict[str, Any] = {"__name__": "harness", "module": module}
    if harness:
        with open(harness, encoding="utf-8") as file:
            after = compile(file.read(), "harness", "exec", dont_inherit=True)
        os.unlink(harness)
        exec(after, own)  # defines end(), which holds what it needs from before the program ran
        del after
    sys.argv = [program]
    sys.path[:] = [os.path.dirname(program), *sys.path]
    sys.modules[module.__name__] = module
    exec(compile(text, program, "exec", dont_inherit=True), module.__dict__)
    if harness:
        own["end"]()


main()
