"""References to values that lie in boxes: what a put writes travels once, and is read where and when it is needed.

A box holds the arrays and the Python objects of one put. Small ones travel with the calls, large ones lie in Ray's
object store, where readers see their arrays in place (read-only, 64-byte aligned). A row's columns are ``Packed``: a
mapping that looks into its boxes on access, and that pickles as references.

A box in the object store would die with the process that made it. Its keeper, the actor of the bus, therefore maps it
too, and puts it anew when a reader finds it lost.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import ray
from ray import cloudpickle

from relax_core.errors import RelaxError
from relax_core.interfaces import Columns
from relax_core.types import MediaRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Segments = list[Any]
    """The layout of a box, and the buffers that it speaks of (uint8 arrays)."""

NAMESPACE = "relax"
"""Where keepers are found by name."""
INLINE_BYTES = 96_000
"""Boxes up to this size travel with the calls: Ray sends arguments below 100 KB in the message itself."""
ALONE_BYTES = 65_536
"""Arrays from this size on are buffers of their own; smaller ones share one."""
ALIGN = 64
OWN_OBJECTS = 256
"""Boxes whose Python objects the process that made them remembers."""
_PLAIN = frozenset({int, float, bool, complex, type(None), MediaRef})
_SHORT = 1000


class LostError(RelaxError):
    """What a row refers to is gone: the process that made it died, and the row is not on the bus any more."""


def wait(ref: ray.ObjectRef[Any]) -> Any:
    """The value of a reference; blocks, also in an actor that runs an event loop."""
    return ref.future().result()  # type: ignore[no-untyped-call]


class Layout(NamedTuple):
    """Where the values of a box lie. Arrays 0 .. ``named`` - 1 are columns, the others buffers of the objects.

    ``pickled``: the segment with the pickled objects; -1: there are none. ``buffers``: which arrays they refer to.
    """

    segments: list[int]
    offsets: list[int]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    pickled: int
    buffers: list[int]


class Box:
    """What one put wrote. Equal ids are one object in a process. Thread-safe.

    ``ref``: an ObjectRef of the segments; ``data``: the pickled segments instead; ``keeper``: the name of the actor
    that maps it too.
    """

    __slots__ = ("__weakref__", "_adopted", "_lock", "_objects", "_segments", "_views", "data", "id", "keeper", "ref")

    def __init__(self, id: str, keeper: str | None, ref: Any = None, data: bytes | None = None) -> None:
        self.id, self.keeper, self.ref, self.data = id, keeper, ref, data
        self._segments: Segments | None = None
        self._views: dict[int, NDArray[Any]] = {}
        self._objects: list[Any] | None = None
        self._adopted = False
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_opened, (self.id, self.keeper, self.ref, self.data))

    def value(self, index: int) -> Any:
        """The value of an array (0 or more) or an object (-1 or less). Raises LostError."""
        with self._lock:
            if index < 0:
                return self._all_objects()[-1 - index]
            found = self._views.get(index)
            if found is None:
                found = self._views[index] = self._view(index)
            return found

    def keep(self, segments: Segments) -> None:
        """Map the content for as long as this box lives here, whatever becomes of the process that made it."""
        self._segments = segments

    def adopted(self) -> list[Any]:
        """The reference, in a list, of the content that this process put anew."""
        if not self._adopted:
            self.ref, self._adopted = ray.put(self._all_segments()), True
        return [self.ref]

    def _all_segments(self) -> Segments:
        if self._segments is None:
            self._segments = pickle.loads(self.data) if self.data is not None else self._fetch()
        return self._segments

    def _fetch(self) -> Segments:
        try:
            return cast("Segments", wait(self.ref))
        except ray.exceptions.ObjectLostError as error:
            lost = error
        try:
            keeper = ray.get_actor(cast(str, self.keeper), NAMESPACE)
            [self.ref] = wait(keeper.adopt.remote(self.id))
            return cast("Segments", wait(self.ref))
        except Exception as error:
            raise LostError(
                f"bus: what was put in {self.id} is lost ({type(lost).__name__}): its process died and its rows have "
                "left the bus; drop these rows"
            ) from error

    def _view(self, index: int) -> NDArray[Any]:
        segments = self._all_segments()
        layout: Layout = segments[0]
        dtype, shape, begin = np.dtype(layout.dtypes[index]), layout.shapes[index], layout.offsets[index]
        buffer = segments[1 + layout.segments[index]]
        array: NDArray[Any] = np.ndarray(shape, dtype, buffer, begin)
        array.flags.writeable = False
        return array

    def _all_objects(self) -> list[Any]:
        if self._objects is None:
            self._objects = _own.get(self.id)
        if self._objects is None:
            segments = self._all_segments()
            layout: Layout = segments[0]
            self._objects = cloudpickle.loads(
                segments[1 + layout.pickled], buffers=[self._view(index) for index in layout.buffers]
            )
        return self._objects


# What this process knows of boxes: equal ids must be one object wherever they were unpickled, so this cannot belong to
# any one client.
_lock = threading.Lock()
_boxes: WeakValueDictionary[str, Box] = WeakValueDictionary()
_own: OrderedDict[str, list[Any]] = OrderedDict()
_numbers = itertools.count()


def find_box(id: str) -> Box | None:
    """The box of this id, if anything in this process refers to it."""
    return _boxes.get(id)


def _opened(id: str, keeper: str | None, ref: Any, data: bytes | None) -> Box:
    with _lock:
        box = _boxes.get(id)
        if box is None:
            box = _boxes[id] = Box(id, keeper, ref, data)
        return box


class Cell:
    """One value in a box. ``nbytes``: of an array; 0 for an object."""

    __slots__ = ("box", "index", "nbytes")

    def __init__(self, box: Box, index: int, nbytes: int) -> None:
        self.box, self.index, self.nbytes = box, index, nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return (Cell, (self.box, self.index, self.nbytes))


class Attached:
    """A value with what must live as long as it does; readers see the value alone."""

    __slots__ = ("attached", "value")

    def __init__(self, value: Any, attached: Any) -> None:
        self.value, self.attached = value, attached

    def __reduce__(self) -> tuple[Any, ...]:
        return (Attached, (self.value, self.attached))


class Packed(Mapping[str, Any]):
    """A row's columns. ``raw``: by name a small value, a Cell or an Attached."""

    __slots__ = ("raw",)

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def __getitem__(self, name: str) -> Any:
        value = self.raw[name]
        if type(value) is Cell:
            return value.box.value(value.index)
        return value.value if type(value) is Attached else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __reduce__(self) -> tuple[Any, ...]:
        return (Packed, (self.raw,))

    def __repr__(self) -> str:
        return f"Packed({', '.join(self.raw)})"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(int(getattr(value, "nbytes", 0)) for value in self.raw.values())

    @property
    def attached(self) -> list[Any]:
        return [value.attached for value in self.raw.values() if type(value) is Attached]


class Packer:
    """Packs what one put writes: ``raw`` for each row, and ``box`` at the end."""

    def __init__(self, keeper: str | None) -> None:
        self._box = Box(f"{_token()}-{next(_numbers)}", keeper)
        self._cells: dict[int, Cell] = {}
        self._arrays: list[NDArray[Any]] = []
        self._objects: list[Any] = []
        self._alive: list[Any] = []

    def raw(self, columns: Columns) -> dict[str, Any]:
        """What ``Packed`` takes. Columns that are references already stay what they are, also inside a ChainMap."""
        if isinstance(columns, Packed):
            return dict(columns.raw)
        if maps := getattr(columns, "maps", None):
            merged: dict[str, Any] = {}
            for part in reversed(maps):
                merged.update(self.raw(part))
            return merged
        return {name: self._pack(value) for name, value in columns.items()}

    def box(self) -> Box | None:
        """The box, filled; None if all values were small."""
        if not self._arrays and not self._objects:
            return None
        segments = self._segments()
        box = self._box
        if sum(segment.nbytes for segment in segments[1:]) <= INLINE_BYTES:
            box.data = pickle.dumps([segments[0], *map(bytes, segments[1:])], protocol=5)
        else:
            box.ref = ray.put(segments)
        with _lock:
            _boxes[box.id] = box
            if self._objects:
                _own[box.id] = self._objects
                if len(_own) > OWN_OBJECTS:
                    _own.popitem(last=False)
        return box

    def _pack(self, value: Any) -> Any:
        cell = self._cells.get(id(value))
        if cell is not None:
            return cell
        if type(value) is np.ndarray and value.dtype.isbuiltin == 1 and not value.dtype.hasobject:
            cell = Cell(self._box, len(self._arrays), value.nbytes)
            self._arrays.append(value)
        elif small(value):
            return value
        else:
            cell = Cell(self._box, -1 - len(self._objects), int(getattr(value, "nbytes", 0)))
            self._objects.append(value)
        self._alive.append(value)  # so that its id stays its own
        self._cells[id(value)] = cell
        return cell

    def _segments(self) -> Segments:
        arrays = [np.ascontiguousarray(array) for array in self._arrays]
        shapes = [array.shape for array in self._arrays]
        dtypes = [array.dtype.str for array in arrays]
        pickled, buffers = None, []
        if self._objects:
            raw: list[pickle.PickleBuffer] = []
            pickled = cloudpickle.dumps(self._objects, protocol=5, buffer_callback=raw.append)
            places = {(array.ctypes.data, array.nbytes): i for i, array in enumerate(arrays)}
            for buffer in raw:
                array = np.frombuffer(buffer.raw(), np.uint8)
                place = places.setdefault((array.ctypes.data, array.nbytes), len(arrays))
                if place == len(arrays):
                    arrays.append(array)
                    shapes.append(array.shape)
                    dtypes.append("|u1")
                buffers.append(place)
        large, where, offsets = _laid(arrays)
        if pickled is not None:
            large.append(np.frombuffer(pickled, np.uint8))
        return [Layout(where, offsets, dtypes, shapes, len(large) - 1 if pickled else -1, buffers), *large]


def _laid(arrays: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], list[int], list[int]]:
    """Buffers, and for each array the number of its buffer and its offset there: the small ones share buffer 0."""
    buffers: list[NDArray[Any]] = [np.empty(0, np.uint8)]
    where, offsets, parts, end = [], [], [], 0
    for array in arrays:
        nbytes = array.nbytes
        if nbytes >= ALONE_BYTES:
            where.append(len(buffers))
            offsets.append(0)
            buffers.append(array.reshape(-1).view(np.uint8))
        else:
            where.append(0)
            offsets.append(end)
            parts += [array.reshape(-1).data, _PADDING[-nbytes % ALIGN]]
            end += nbytes + -nbytes % ALIGN
    if parts:
        buffers[0] = np.frombuffer(b"".join(parts), np.uint8)
    return buffers, where, offsets


_PADDING = [bytes(count) for count in range(ALIGN)]


def small(value: Any) -> bool:
    """Whether a value is no work to copy: numbers, media references, short texts, and short tuples of them."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.generic):
        return True
    if kind in (str, bytes):
        return len(value) <= _SHORT
    return kind is tuple and len(value) <= _SHORT and all(map(small, value))


_process: list[Any] = []


def _token() -> str:
    """Names this process, also after a fork."""
    if not _process or _process[0] != os.getpid():
        _process[:] = [os.getpid(), os.urandom(6).hex()]
    return cast(str, _process[1])
