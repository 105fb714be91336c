"""The judge's process: runs the tests, with the program's names as handles of what is in the program's process.

What a comparison, a truth or a sum gives is decided here, of exact builtin values; of the program's own objects a test
gets attributes, items, what calls return and how they read. Loaded by its path, beside ``peer`` and ``wire``.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
import time
import types
from _weakref import ref
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from relax_envs.sandbox.peer import Broken, Peer
    from relax_envs.sandbox.wire import JUDGING, TYPES, Encoder
else:
    from peer import Broken, Peer
    from wire import JUDGING, TYPES

_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_CLOSED = (*_CALLED, types.ModuleType, types.GeneratorType, types.CoroutineType, types.FrameType, types.TracebackType)
"""Of these a program sees no attributes: they lead to the tests."""
_PATIENCE = 2.0
"""Seconds for a program that closed its pipe to end."""


class Judge(Peer):
    """The judge's end. ``broken``: how the program went or failed to answer, once it did; then nothing passes."""

    def __init__(self, source: int, sink: int) -> None:
        super().__init__(source, sink)
        self._handles: dict[int, ref[Handle]] = {}
        self.broken: str | None = None
        self.blamed: str | None = None
        self.error: BaseException | None = None

    def ask(self, what: str, *operands: Any) -> Any:
        if what == "get":
            name = operands[1]
            if name in JUDGING or (name.startswith("__") and name != "__name__"):
                raise AttributeError(f"{name!r} of an object of the program")
        return super().ask(what, *operands)

    def exchange(self, what: str, node: Any, kept: list[Any]) -> tuple[bool, Any]:
        if self.broken is None:
            try:
                return super().exchange(what, node, kept)
            except Broken as broken:
                self.broken = broken.how
            except (EOFError, OSError):
                self.broken = "lost"
            except MemoryError:
                self.broken = "memory"
            except Exception:
                self.broken = "failed"
        raise Broken(self.broken)

    def raised(self, what: str, error: BaseException) -> BaseException:
        """An end of an iteration is one only where the next item was asked for: else it would end the tests' loops."""
        if what != "next" and isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit)):
            error = RuntimeError(f"the program raised {type(error).__name__}")
        self.error = error
        return error

    def proxy(self, number: int, name: str, kin: list[int], special: bool) -> Any:
        known = self._handles.get(number)
        found = known() if known is not None else None
        if found is None:
            found = _kind(name)()
            object.__setattr__(found, "_relax_", (self, number, frozenset(kin), special))
            self._handles[number] = ref(found)
        self.dropped.discard(number)
        return found

    def drop(self, number: int) -> None:
        """Forget a handle that is no more."""
        self._handles.pop(number, None)
        self.dropped.add(number)

    def foreign(self, value: Any) -> int | None:
        return value._relax_[1] if Handle in type(value).__mro__ else None

    def shared(self, value: Any) -> list[Any] | None:
        if type(value) is types.ModuleType:
            module, path = value.__name__, ""
        else:
            owner: Any = getattr(value, "__objclass__", value)
            module, path = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)  # type: ignore[assignment]
        if type(module) is not str or type(path) is not str:
            return None
        if module.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
            return None
        found: Any = sys.modules.get(module)
        for part in path.split(".") if path else []:
            found = getattr(found, part, None)
        return [module, path] if found is value else None

    def found(self, module: str, name: str) -> Any:
        return {"builtins": TYPES}[module][name]

    def handle_node(self, value: Any, encode: Encoder, depth: int) -> Any:
        for base in (list, dict, set):
            if isinstance(value, base):  # of a class of the tests
                return encode(base(value), depth)
        called = isinstance(value, _CALLED)
        return ["h", self.show(value), value.__name__ if called else type(value).__name__, [], called]

    def perform(self, what: str, operands: tuple[Any, ...]) -> Any:
        target = operands[0]
        if id(target) not in self._numbers:  # a text's format, say, would show more than the program was given
            raise TypeError("not an object of the tests")
        try:
            if what == "call":
                return target(*operands[1], **operands[2])
            if what in ("get", "set"):
                name = operands[1]
                if type(name) is not str or name.startswith("_") or isinstance(target, _CLOSED):
                    raise AttributeError(name)
                if what == "set" and callable(getattr(target, name, None)):
                    raise AttributeError(f"{name} is a method")  # by which the tests may judge
            return _SERVED[what](*operands)
        except AssertionError:  # of a test, whether or not the program lets it pass
            self.blamed = "wrong"
            raise


_SERVED: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "hash": hash,
    "item": operator.getitem,
    "put": operator.setitem,
    "eq": operator.eq,
    "lt": operator.lt,
    "gt": operator.gt,
}


class Handle:
    """An object of the program. It equals itself alone, or where it is a list, dict or set what that holds."""

    __slots__ = ("__weakref__", "_relax_")
    _relax_: tuple[Judge, int, frozenset[int], bool]

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return _ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return _ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask("put", self, key, value)

    def __delitem__(self, key: Any) -> None:
        _ask("remove", self, key)

    def __iter__(self) -> Any:
        return _ask("iter", self)

    def __next__(self) -> Any:
        return _ask("next", self)

    def __len__(self) -> int:
        return _ask("len", self)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return _ask("str", self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return _ask("repr", self)  # type: ignore[no-any-return]

    def __enter__(self) -> Any:
        return _ask("enter", self)

    def __exit__(self, *error: object) -> None:  # what a test raised is not the program's to forget
        _ask("exit", self, *(None, None, None) if error[0] is None else (None, error[1], None))

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return self._relax_[1]

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        return content(self) == other if self._relax_[3] else NotImplemented

    def __instancecheck__(self, value: object) -> bool:
        return Handle in type(value).__mro__ and self._relax_[1] in value._relax_[2]  # type: ignore[attr-defined]

    __subclasscheck__ = __instancecheck__

    def __del__(self) -> None:
        judge, number, *_ = self._relax_
        judge.drop(number)


@lru_cache(1000)
def _kind(name: str) -> type[Handle]:
    return type(name, (Handle,), {"__slots__": ()})


def _ask(what: str, handle: Handle, *operands: Any) -> Any:
    return handle._relax_[0].ask(what, handle, *operands)


def content(value: Any) -> Any:
    """What a handle of a list, dict or set holds; anything else as it is."""
    return _ask("content", value) if Handle in type(value).__mro__ and value._relax_[3] else value


class Names(dict):  # type: ignore[type-arg]
    """The tests' namespace: what they do not define is Python's, else the program's; ``theirs`` is so in any case."""

    def __init__(self, judge: Judge, theirs: Iterable[str], **ours: Any) -> None:
        super().__init__(ours, __name__="__main__", __builtins__=builtins)
        self._judge, self._theirs = judge, frozenset(theirs)

    def __missing__(self, name: str) -> Any:
        if name not in self._theirs and (hasattr(builtins, name) or name.startswith("__")):
            raise KeyError(name)
        value = self._judge.ask("name", name)
        if type(value) in (_kind("function"), _kind("type")):  # which programs do not define again
            self[name] = value
        return value


class Solution(types.ModuleType):
    """The program as a module, for tests that import it."""

    def __init__(self, judge: Judge) -> None:
        super().__init__("solution")
        self.__all__: list[str] = []  # the namespace has them all, and keeps Python's
        self._judge = judge

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._judge.ask("name", name)
        except NameError as error:
            raise AttributeError(name) from error


def _holds(judge: Judge, test: dict[str, Any]) -> bool:
    """Whether a test holds; an assertion that does not raises."""
    if "function" in test:
        found = _as_json(judge.ask("name", test["function"])(*test["arguments"]))
        return any(found == right for right in test["expected"])
    import importlib

    ours = {}
    for name, (module, attribute) in test["ours"].items():
        ours[name] = importlib.import_module(module)
        ours[name] = getattr(ours[name], attribute) if attribute else ours[name]
    exec(compile(test["text"], "tests", "exec", dont_inherit=True), Names(judge, test["theirs"], **ours))
    return True


def _as_json(value: Any) -> Any:
    """As JSON would have it: a tuple is a list, and a whole number as a key is text."""
    value = content(value)
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    if isinstance(value, dict):
        return {str(key) if type(key) is int else key: _as_json(one) for key, one in value.items()}
    return value


def _verdict(judge: Judge, test: dict[str, Any]) -> str:
    judge.blamed = None
    try:
        how = "passed" if _holds(judge, test) else "wrong"
    except MemoryError:
        how = "memory"
    except BaseException as error:
        how = "wrong" if isinstance(error, AssertionError) and error is not judge.error else "failed"
    return judge.broken or judge.blamed or how


def _code(program: int) -> int | None:
    """The exit code of a program that is lost; None where it has not ended."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        number, status = os.waitpid(program, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def run(judge: Judge, program: int, report: int, tests: list[dict[str, Any]]) -> bool:
    """Judge and report, a JSON text a line: how each test came out, as far as the program lived; then that this is all.

    Of a program that is gone its exit code is said. Returns whether it is.
    """

    def say(what: Any) -> None:
        os.write(report, json.dumps(what).encode() + b"\n")

    try:
        lost = judge.receive() != ["ready"]
    except (Exception, Broken):
        lost = True
    sys.modules["solution"] = Solution(judge)
    code = None
    for test in tests:
        how = "lost" if lost else _verdict(judge, test)
        code = _code(program) if how == "lost" else None
        say(code if how == "lost" else how)
        if lost or judge.broken:
            break
    say("end")
    return code is not None
