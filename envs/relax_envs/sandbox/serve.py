"""The program's process: runs the program, and does with what it defines as the judge asks.

Nothing here is trusted: a program may change all of it. Loaded by its path, beside ``peer`` and ``wire``.
"""

from __future__ import annotations

import operator
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any

    from relax_envs.sandbox.peer import Peer, library_name
    from relax_envs.sandbox.wire import TYPES, Encoder, base_of
else:
    from peer import Peer, library_name
    from wire import TYPES, base_of

_CONTENT: dict[type, Callable[[Any], Any]] = {list: list.__iter__, dict: dict.items, set: set.__iter__}


class Served(Peer):
    """The program's end, with the module that the program is."""

    def __init__(self, source: int, sink: int, module: types.ModuleType) -> None:
        super().__init__(source, sink)
        self._module = module
        self._proxies: dict[int, Any] = {}
        self._foreign: dict[int, int] = {}

    def perform(self, what: str, operands: tuple[Any, ...]) -> Any:
        return self._named(*operands) if what == "name" else _DONE[what](*operands)

    def _named(self, name: str) -> Any:
        names = vars(self._module)
        if name not in names and hasattr(names.get("Solution"), name):
            return getattr(names["Solution"](), name)
        if name not in names:
            raise NameError(f"name {name!r} is not defined")
        return names[name]

    def proxy(self, number: int, name: str, kin: list[int], special: bool) -> Any:
        if number not in self._proxies:
            found: Any = self._function(name) if special else Remote(self)
            self._proxies[number], self._foreign[id(found)] = found, number
        return self._proxies[number]

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return self.ask("call", call, arguments, named)

        call.__name__ = call.__qualname__ = name
        return call

    def handle_node(self, value: Any, encode: Encoder, depth: int) -> Any:
        kind = value if base_of(value, (type,)) else type(value)
        kin = [self.show(one) for one in kind.__mro__ if library_name(one) is None]
        return ["h", self.show(value), type(value).__name__, kin, base_of(value, _CONTENT) is not None]

    def foreign(self, value: Any) -> int | None:
        return self._foreign.get(id(value))

    def shared(self, value: Any) -> list[Any] | None:
        return next((["builtins", name] for name, one in TYPES.items() if one is value), None)

    def found(self, module: str, name: str) -> Any:
        import importlib

        found: Any = importlib.import_module(module)
        for part in name.split(".") if name else []:
            found = getattr(found, part)
        return found


def _content(value: Any) -> Any:
    base = base_of(value, _CONTENT)
    assert base is not None
    return base(_CONTENT[base](value))


def _leave(context: Any, kind: None, error: BaseException | None, trace: None) -> None:
    context.__exit__(None if error is None else type(error), error, trace)


_DONE: dict[str, Callable[..., Any]] = {
    "call": lambda called, arguments, named: called(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "remove": operator.delitem,
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "enter": lambda context: context.__enter__(),
    "exit": _leave,
    "content": _content,
}


class Remote:
    """An object of the tests, that they gave to the program."""

    def __init__(self, peer: Served) -> None:
        object.__setattr__(self, "_relax_", peer)

    def __getattr__(self, name: str) -> Any:
        return self._relax_.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._relax_.ask("set", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._relax_.ask("call", self, arguments, named)


def _asking(what: str) -> Callable[..., Any]:
    return lambda self, *operands: self._relax_.ask(what, self, *operands)


_OPERATORS = {"getitem": "item", "setitem": "put"}
for _name in ("iter", "next", "len", "str", "repr", "hash", "eq", "lt", "gt", *_OPERATORS):
    setattr(Remote, f"__{_name}__", _asking(_OPERATORS.get(_name, _name)))


def serve(source: int, sink: int, module: types.ModuleType, held: list[str], run: Callable[[], None]) -> None:
    """Say which guards are up, run the program, then answer until nobody asks any more."""
    peer = Served(source, sink, module)
    peer.send(held)
    run()
    peer.send(["ready"])
    while True:
        try:
            message = peer.receive()
        except EOFError:
            os._exit(0)
        peer.answer(message)
