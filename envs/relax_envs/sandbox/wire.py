"""Values as JSON between the judge and the program: plain ones by content, of exact builtin types; others by handle.

A node is None, a bool, number or text, or a list that begins with a tag. Lists, dicts, sets, deques and bytearrays are
numbered in the order in which they are met, so that one met again is a reference and what a call changed can be said.

Standard library only: both sides load it by its path.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported here costs every run
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    Other = Callable[[Any, "Encoder", int], Any]

DEEPEST = 150
"""Values nested deeper cannot be said."""
_SMALL = 1 << 62
_FLAT = (str, float, bool, type(None))
TYPES = {t.__name__: t for t in (int, float, str, bytes, bool, complex, list, tuple, dict, set, frozenset, object)}
_BASES = (int, float, complex, str, bytes, tuple, frozenset)
"""What a subclass of these holds cannot change: it goes by content."""
JUDGING = {name for kind in (str, bytes, set, float) for name in dir(kind) if name.startswith("is")}
JUDGING |= {"startswith", "endswith", "difference", "symmetric_difference", "all", "any"}
"""Methods of builtin values, and arrays, whose answer is nearly a verdict: nothing of the program's own has these."""
NUMBERED = (deque, Counter, OrderedDict, defaultdict, list, dict, set, bytearray)


class Unsayable(ValueError):
    """A value that is nested too deep, or a message that is none."""


def base_of(value: object, bases: Iterable[type]) -> type | None:
    """The first of the bases that the value's class has, whatever the value says of its class."""
    kinds = type.__getattribute__(type(value), "__mro__")
    return next((base for base in bases if base in kinds), None)


class Encoder:
    """Makes nodes; ``kept`` are the numbered containers. ``other`` makes the node of what is not plain."""

    def __init__(self, given: Sequence[Any], other: Other) -> None:
        self.kept = list(given)
        self._seen = {id(one): n for n, one in enumerate(given)}
        self._other = other

    def __call__(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _FLAT:
            return value
        if kind is int:
            return value if -_SMALL < value < _SMALL else ["i", hex(value)]
        if depth > DEEPEST:
            raise Unsayable("a value that is nested too deep")
        if kind in NUMBERED:
            if id(value) in self._seen:
                return ["r", self._seen[id(value)]]
            self._seen[id(value)] = len(self.kept)
            return self.content(value, kind, depth)
        if (simple := _SIMPLE.get(kind)) is not None:
            return simple(self, value, depth + 1)
        if (library := _LIBRARY.get((kind.__module__, kind.__name__))) is not None:
            return library(self, value, depth + 1)
        return self._other(value, self, depth + 1)

    def content(self, value: Any, kind: type, depth: int = 0) -> Any:
        """The node of a numbered container, also of one that has been met."""
        self.kept.append(value)
        depth += 1
        if kind is list:
            return ["l", self.items(value, depth)]
        if kind is set:
            return ["S", self.items(value, depth)]
        if kind is bytearray:
            return ["B", value.decode("latin-1")]
        if kind is deque:
            return ["q", value.maxlen, self.items(value, depth)]
        pairs = [[self(k, depth), self(v, depth)] for k, v in dict.items(value)]
        if kind is defaultdict:
            factory = value.default_factory
            return ["D", next((name for name, one in TYPES.items() if one is factory), None), pairs]
        return ["C" if kind is Counter else "O" if kind is OrderedDict else "d", pairs]

    def items(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [one if type(one) in _FLAT else self(one, depth) for one in values]

    def as_base(self, value: Any, base: type, depth: int) -> Any:
        """The node of a subclass's instance by what it holds: its class's methods are not asked."""
        if base is tuple:
            items = self.items(tuple.__iter__(value), depth)
            fields = getattr(type(value), "_fields", None)
            if type(fields) is tuple and len(fields) == len(items):
                return ["n", type(value).__name__, list(fields), items]
            return ["t", items]
        if base is frozenset:
            return ["f", self.items(frozenset.__iter__(value), depth)]
        return self(_EXACT[base](value), depth)

    def other_plain(self, value: Any, depth: int) -> Any:
        """The node of an instance of a subclass of what cannot change, or of numpy; None where it is neither."""
        kind = type(value)
        if kind.__module__ == "numpy":
            if kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
                return ["a", value.dtype.str, list(value.shape), value.tobytes().decode("latin-1")]
            if kind.__name__ != "ndarray" and hasattr(value, "item"):
                return self(value.item(), depth)
        base = base_of(value, _BASES)
        return None if base is None else self.as_base(value, base, depth)


_EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda v: complex(complex.real.__get__(v), complex.imag.__get__(v)),
    str: str.__str__,
    bytes: lambda v: bytes.__getitem__(v, slice(None)),
}
_SIMPLE: dict[type, Callable[[Encoder, Any, int], Any]] = {
    tuple: lambda e, v, d: ["t", e.items(v, d)],
    frozenset: lambda e, v, d: ["f", e.items(v, d)],
    bytes: lambda e, v, d: ["b", v.decode("latin-1")],
    complex: lambda e, v, d: ["c", v.real, v.imag],
    range: lambda e, v, d: ["R", *(e(one) for one in (v.start, v.stop, v.step))],
    slice: lambda e, v, d: ["s", *(e(one, d) for one in (v.start, v.stop, v.step))],
    type({}.keys()): lambda e, v, d: ["k", e.items(v, d)],
    type({}.values()): lambda e, v, d: ["v", e.items(v, d)],
    type({}.items()): lambda e, v, d: ["w", e.items(v, d)],
}
_LIBRARY: dict[tuple[str, str], Callable[[Encoder, Any, int], Any]] = {
    ("decimal", "Decimal"): lambda e, v, d: ["M", str(v)],
    ("fractions", "Fraction"): lambda e, v, d: ["F", e(v.numerator), e(v.denominator)],
    ("datetime", "date"): lambda e, v, d: ["T", "date", v.isoformat()],
    ("datetime", "time"): lambda e, v, d: ["T", "time", v.isoformat()],
    ("datetime", "datetime"): lambda e, v, d: ["T", "datetime", v.isoformat()],
    ("datetime", "timedelta"): lambda e, v, d: ["E", v.days, v.seconds, v.microseconds],
}


class Decoder:
    """Makes values of nodes, strictly: whatever is no node raises. ``kept`` as the encoder has it."""

    def __init__(self, given: Sequence[Any], other: Callable[[list[Any], Decoder], Any]) -> None:
        self.kept = list(given)
        self._other = other

    def __call__(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        tag, *rest = node
        if tag == "l":
            found: list[Any] = []
            self.kept.append(found)
            found += self.items(rest[0])
            return found
        if (maker := _MAKERS.get(tag)) is not None:
            return maker(self, *rest)
        return self._other(node, self)

    def items(self, nodes: Any) -> list[Any]:
        if type(nodes) is not list:
            raise Unsayable("items that are no list")
        return [self(one) if type(one) is list else one for one in nodes]

    def pairs(self, nodes: Any) -> list[tuple[Any, Any]]:
        return [(self(one), self(other)) for one, other in nodes]

    def numbered(self, made: Any, fill: Callable[[], None]) -> Any:
        self.kept.append(made)
        fill()
        return made


def _integer(decoder: Decoder, text: str) -> int:
    return int(text, 16)


def _dictionary(made: Any) -> Callable[[Decoder, Any], Any]:
    def make(decoder: Decoder, pairs: Any) -> Any:
        found: dict[Any, Any] = made()
        update = dict.update if made is Counter else made.update  # that of Counter counts
        return decoder.numbered(found, lambda: update(found, decoder.pairs(pairs)))

    return make


def _default(decoder: Decoder, factory: Any, pairs: Any) -> Any:
    found: Any = defaultdict(None if factory is None else TYPES[factory])
    return decoder.numbered(found, lambda: found.update(decoder.pairs(pairs)))


def _set(decoder: Decoder, items: Any) -> Any:
    found: set[Any] = set()
    return decoder.numbered(found, lambda: found.update(decoder.items(items)))


def _deque(decoder: Decoder, most: Any, items: Any) -> Any:
    found: deque[Any] = deque(maxlen=most)
    return decoder.numbered(found, lambda: found.extend(decoder.items(items)))


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


@lru_cache(100)
def _class_of(name: str, *fields: str) -> Any:
    if JUDGING & {*fields}:
        raise Unsayable("a field with the name of a method of builtin values")
    return namedtuple(name, fields)  # which checks the names


def _time(decoder: Decoder, kind: str, text: str) -> Any:
    import datetime

    kinds: dict[str, Any] = {"date": datetime.date, "time": datetime.time, "datetime": datetime.datetime}
    return kinds[kind].fromisoformat(text)


def _delta(decoder: Decoder, days: int, seconds: int, micro: int) -> Any:
    import datetime

    return datetime.timedelta(days, seconds, micro)


def _decimal(decoder: Decoder, text: str) -> Any:
    import decimal

    return decimal.Decimal(text)


def _fraction(decoder: Decoder, top: Any, bottom: Any) -> Any:
    import fractions

    return fractions.Fraction(decoder(top), decoder(bottom))


def _array(decoder: Decoder, kind: str, shape: list[int], text: str) -> Any:
    import numpy

    if numpy.dtype(kind).kind not in "biufc":
        raise Unsayable("an array of other things than numbers")
    return numpy.frombuffer(_bytes(text), kind).reshape(shape).copy()


_MAKERS: dict[Any, Callable[..., Any]] = {
    "i": _integer,
    "c": lambda d, real, imaginary: complex(real, imaginary),
    "b": lambda d, text: _bytes(text),
    "B": lambda d, text: d.numbered(bytearray(_bytes(text)), lambda: None),
    "t": lambda d, items: tuple(d.items(items)),
    "f": lambda d, items: frozenset(d.items(items)),
    "S": _set,
    "d": _dictionary(dict),
    "C": _dictionary(Counter),
    "O": _dictionary(OrderedDict),
    "D": _default,
    "q": _deque,
    "n": lambda d, name, fields, items: _class_of(name, *fields)(*d.items(items)),
    "R": lambda d, *ends: range(*map(d, ends)),
    "s": lambda d, *ends: slice(*map(d, ends)),
    "k": lambda d, items: dict.fromkeys(d.items(items)).keys(),
    "v": lambda d, items: dict(enumerate(d.items(items))).values(),
    "w": lambda d, items: dict(d.items(items)).items(),
    "M": _decimal,
    "F": _fraction,
    "T": _time,
    "E": _delta,
    "a": _array,
    "r": lambda d, number: d.kept[number],
}


def parts(value: Any) -> list[Any]:
    """What a numbered container holds, to see later whether that changed."""
    if isinstance(value, dict):
        return [one for pair in dict.items(value) for one in pair]
    return sorted(value, key=id) if isinstance(value, set) else list(value)


def same_parts(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def refill(value: Any, content: Any) -> None:
    """Have a container hold what another of its kind does."""
    if base_of(value, NUMBERED) is not type(content):
        raise Unsayable("a change of kind")
    value.clear()
    fill: Callable[[Any], None] = value.update if isinstance(value, dict | set) else value.extend
    fill(content)
