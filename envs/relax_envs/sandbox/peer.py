"""One end of the pipes between judge and program: asks the other, and answers it while it waits.

A message is four bytes of length and a JSON list: a request ``["?", number, dropped, what, operands]``, or the answer
to it, ``["=", number, value, changed]`` or ``["!", number, exception, changed]``; ``changed`` holds the new content of
containers among the operands. Loaded by its path, beside ``wire``.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from _thread import RLock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from relax_envs.sandbox.wire import Decoder, Encoder, Unsayable, base_of, parts, refill, same_parts
else:
    from wire import Decoder, Encoder, Unsayable, base_of, parts, refill, same_parts

MOST_BYTES = 32 << 20
"""Of a message."""
MOST_NESTED = 80
"""Calls in calls from side to side."""
_SOURCE, _TEXT, _CLASS = "_relax_source_", "_relax_text_", "_relax_class_"
"""Where an exception keeps its number on the other side and its text, and a class its number."""


class Broken(BaseException):
    """The other side is gone, or says what is no answer. ``how`` it is called."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Peer:
    """One end. Subclasses say what they do when asked (``perform``), and what handles of the other are (``proxy``)."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._asked = self._nested = 0
        self._lock = RLock()
        self._shown: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._last = 0
        self._classes: dict[int, type[BaseException]] = {}
        self.dropped: set[int] = set()

    # --- what each side does in its own way

    def perform(self, what: str, operands: tuple[Any, ...]) -> Any:
        """Do what the other side asks."""
        raise NotImplementedError

    def proxy(self, number: int, name: str, kin: list[int], special: bool) -> Any:
        """What stands for an object of the other side; see ``handle_node``."""
        raise NotImplementedError

    def foreign(self, value: Any) -> int | None:
        """The number of what ``proxy`` made."""
        raise NotImplementedError

    def shared(self, value: Any) -> list[Any] | None:
        """Module and name of what both sides have."""
        raise NotImplementedError

    def found(self, module: str, name: str) -> Any:
        """What both sides have, of that name."""
        raise NotImplementedError

    def handle_node(self, value: Any, encode: Encoder, depth: int) -> Any:
        """Number, its class's name, numbers of that class and those above it, and whether it is special: of the
        program one that has content to be compared, of the tests one that is called alone."""
        raise NotImplementedError

    def raised(self, what: str, error: BaseException) -> BaseException:
        """What to raise where the other side raised an error."""
        return error

    # --- asking and answering

    def ask(self, what: str, *operands: Any) -> Any:
        """The other side's answer; what it raises is raised."""
        encode = Encoder((), self._other_node)
        node = encode(operands)
        with self._lock:
            raised, value = self.exchange(what, node, encode.kept)
        if raised:
            raise self.raised(what, value)
        return value

    def exchange(self, what: str, node: Any, kept: list[Any]) -> tuple[bool, Any]:
        """Whether the other side raised, and its value; ``kept``: the containers that it may have changed."""
        dropped, self.dropped = sorted(self.dropped), set()
        self._asked += 1
        asked = self._asked
        self.send(["?", asked, dropped, what, node])
        while (message := self.receive())[0] == "?":
            self.answer(message)
        kind, number, said, changed = message
        if number != asked or kind not in ("=", "!"):
            raise Unsayable("an answer to another question")
        decode = Decoder(kept, self._other_value)
        value = decode(said)
        for place, content in changed:
            if type(place) is not int or not 0 <= place < len(kept):
                raise Unsayable("a change of what was not given")
            refill(kept[place], decode(content))
        if kind == "!" and not isinstance(value, BaseException):
            raise Unsayable("an error that is none")
        return kind == "!", value

    def answer(self, message: list[Any]) -> None:
        """Do what is asked and say what came of it."""
        _, asked, dropped, what, node = message
        for number in dropped:
            if not isinstance(self._shown.get(number), type):  # by whose number its instances are known
                self._numbers.pop(id(self._shown.pop(number, None)), None)
        decode = Decoder((), self._other_value)
        operands = decode(node)
        before = [(one, parts(one)) for one in decode.kept]
        self._nested += 1
        try:
            if self._nested > MOST_NESTED:
                raise RecursionError("calls in calls between tests and program")
            kind, value = "=", self.perform(what, operands)
        except Broken:
            raise
        except BaseException as error:
            kind, value = "!", error
        finally:
            self._nested -= 1
        try:
            said = self._answer(kind, asked, value, before)
        except Broken:
            raise
        except BaseException as error:
            said = self._answer("!", asked, ValueError(f"{type(error).__name__}: {error}"), [])
        self.send(said)

    def _answer(self, kind: str, asked: int, value: Any, before: list[tuple[Any, list[Any]]]) -> list[Any]:
        encode = Encoder([one for one, _ in before], self._other_node)
        node = encode(value)
        changed = [
            [place, encode.content(one, type(one))]
            for place, (one, held) in enumerate(before)
            if not same_parts(parts(one), held)
        ]
        return [kind, asked, node, changed]

    def send(self, message: list[Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            rest = rest[os.write(self._sink, rest) :]

    def receive(self) -> list[Any]:
        """The next message. Raises EOFError at the end, Unsayable for what is none."""
        size = int.from_bytes(self._read(4), "big")
        if size > MOST_BYTES:
            raise Broken("flood")
        message = json.loads(self._read(size))
        if type(message) is not list or not message:
            raise Unsayable("no message")
        return message

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            chunk = os.read(self._source, min(size - len(found), 1 << 20))
            if not chunk:
                raise EOFError
            found += chunk
        return bytes(found)

    # --- what is not plain

    def show(self, value: Any) -> int:
        """The number under which the other side knows an object from now on."""
        number = self._numbers.get(id(value))
        if number is None:
            self._last = number = self._last + 1
            self._shown[number], self._numbers[id(value)] = value, number
        return number

    def _other_node(self, value: Any, encode: Encoder, depth: int) -> Any:
        if (number := self.foreign(value)) is not None:
            return ["y", number]
        if base_of(value, (BaseException,)):
            number = source_of(value)
            return self._error_node(value, encode, depth) if number is None else ["y", number]
        if base_of(value, (type,)) and BaseException in value.__mro__:
            number = vars(value).get(_CLASS)
            return ["X", self._chain(value)] if number is None else ["y", number]
        if (name := self.shared(value)) is not None:
            return ["g", *name]
        if (node := encode.other_plain(value, depth)) is not None:
            return node
        return self.handle_node(value, encode, depth)

    def _error_node(self, error: BaseException, encode: Encoder, depth: int) -> Any:
        try:
            given = encode(tuple(error.args), depth)
            text = str(error)
        except Exception:
            given, text = ["t", []], ""
        own = library_name(type(error)) is None
        return ["x", self._chain(type(error)), given, text, self.show(error) if own else None]

    def _chain(self, kind: type) -> list[list[Any]]:
        """An exception's class and those above it, by module and name, or by number where they are our own."""
        return [library_name(one) or [self.show(one), one.__name__] for one in kind.__mro__ if one is not object]

    def _other_value(self, node: list[Any], decode: Decoder) -> Any:
        tag, *rest = node
        if tag == "y":
            return self._shown[rest[0]]
        if tag == "h":
            number, name, kin, special = rest
            if type(number) is not int or type(name) is not str or not all(type(one) is int for one in kin):
                raise Unsayable("no handle")
            return self.proxy(number, name, kin, special is True)
        if tag == "g":
            return self.found(*rest)
        if tag == "X":
            return self._class_of(rest[0])
        if tag == "x":
            chain, given, text, number = rest
            return self._error_of(chain, decode(given), str(text), number)
        raise Unsayable(f"no value: {str(tag)[:20]}")

    def _class_of(self, chain: list[list[Any]]) -> type[BaseException]:
        """The library's class, or one that stands for the other side's, below the library's that it has."""
        kinds = [_library_error(*one) for one in chain if type(one[0]) is str]
        base = next((kind for kind in kinds if kind is not None), Exception)
        for number, name in reversed([one for one in chain if type(one[0]) is int]):
            if number not in self._classes:
                body = {"__str__": _text, "__getattr__": _attribute(self), _CLASS: number}
                self._classes[number] = type(str(name), (base,), body)
            base = self._classes[number]
        return base

    def _error_of(self, chain: list[list[Any]], given: tuple[Any, ...], text: str, number: Any) -> BaseException:
        kind = self._class_of(chain)
        error = kind.__new__(kind, *given)
        error.args = given
        if type(number) is int:
            vars(error).update({_SOURCE: number, _TEXT: text})
        return error


def source_of(error: BaseException) -> int | None:
    """The number that an exception has on the other side, where it is from there."""
    number = vars(error).get(_SOURCE)
    return number if type(number) is int else None


def _text(error: BaseException) -> str:
    return str(vars(error).get(_TEXT, ""))


def _attribute(peer: Peer) -> Callable[[BaseException, str], Any]:
    def get(error: BaseException, name: str) -> Any:
        if name.startswith("_") or source_of(error) is None:
            raise AttributeError(name)
        return peer.ask("get", error, name)

    return get


def library_name(kind: type) -> list[Any] | None:
    """Module and name of a class of Python's own."""
    module = kind.__module__
    if type(module) is not str or module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    name = kind.__qualname__
    return [module, name] if getattr(sys.modules.get(module), name, None) is kind else None


def _library_error(module: str, name: str) -> type[BaseException] | None:
    """An exception's class of Python's own, of the modules that are loaded."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found = getattr(builtins if module == "builtins" else sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
