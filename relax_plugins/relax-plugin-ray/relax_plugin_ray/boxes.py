"""References to values that lie in boxes: what a put writes travels once, and is read where and when it is needed.

A box holds the arrays and the Python objects of one put. Large ones lie in Ray's object store, where readers see their
arrays in place (read-only, 64-byte aligned). Smaller ones are carried by the call, which is quicker; their keeper, the
actor of the bus, puts those of a claim in the object store together. A row's columns are ``Packed``: a mapping that
looks into its boxes on access, and that pickles as references.

What a process puts in the object store would die with it. The keeper therefore maps large boxes too, and puts one anew
when a reader finds it lost.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np
import ray
from ray import cloudpickle

from relax_core.errors import RelaxError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Segments = list[Any]
    """The layout of a box, and the buffers that it speaks of (uint8 arrays)."""

NAMESPACE = "relax"
"""Where keepers are found by name."""
CARRIED_BYTES = 600_000
"""Boxes up to this size travel with the call that puts them (measured: beyond 1 MB the object store is quicker)."""
PIECE_BYTES = 96_000
"""Arguments up to this size go into the message itself: for larger ones Ray takes the object store."""
ALONE_BYTES = 65_536
"""Arrays from this size on are buffers of their own; smaller ones share one."""
ALIGN = 64
OWN_OBJECTS = 256
"""Boxes whose Python objects the process that made them remembers."""


class LostError(RelaxError):
    """What a row refers to is gone: the process that made it died, and the row is not on the bus any more."""


def wait(ref: ray.ObjectRef[Any]) -> Any:
    """The value of a reference; blocks, also in an actor that runs an event loop."""
    return ref.future().result()


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


class Bundle(list[Any]):
    """The boxes that one object of the object store holds; a list that can be referred to weakly."""


class Box:
    """What one put wrote. Equal ids are one object in a process. Thread-safe.

    ``data``: the flat content; else ``ref``, an ObjectRef: of the segments, or of a bundle in which this is ``part``.
    ``keeper``: the name of the actor that maps it too.
    """

    __slots__ = (
        *("__weakref__", "_bundle", "_lock", "_objects", "_segments", "_views"),
        *("data", "id", "keeper", "lasting", "part", "ref"),
    )

    def __init__(
        self, id: str, keeper: str | None, ref: Any = None, part: int | None = None, data: bytes | None = None
    ) -> None:
        self.id, self.keeper, self.ref, self.part, self.data = id, keeper, ref, part, data
        self.lasting = False  # whether this process owns what ``ref`` refers to
        self._bundle: Bundle | None = None
        self._segments: Segments | None = None
        self._views: dict[int, NDArray[Any]] = {}
        self._objects: list[Any] | None = None
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_opened, (self.id, self.keeper, self.ref, self.part, self.data))

    def value(self, index: int) -> Any:
        """The value of an array (0 or more) or an object (-1 or less). Raises LostError."""
        with self._lock:
            if index < 0:
                return self._all_objects()[-1 - index]
            found = self._views.get(index)
            if found is None:
                found = self._views[index] = self._view(index)
            return found

    # --- for the keeper

    def keep(self, segments: Segments) -> None:
        """Map the content for as long as this box lives here, whatever becomes of the process that made it."""
        self._segments = segments

    def adopt(self) -> tuple[list[Any], int | None]:
        """Where the content lies, owned by this process: the reference, in a list, and its part."""
        if not self.lasting:
            self.ref, self.part, self.lasting = ray.put(self._all_segments()), None, True
        return [self.ref], self.part

    def move(self, ref: Any, part: int) -> None:
        """The content lies in a bundle from now on."""
        self.ref, self.part, self.data, self.lasting = ref, part, None, True

    # --- inside

    def _all_segments(self) -> Segments:
        if self._segments is None:
            if self.data is not None:
                self._segments = _unflat(np.frombuffer(self.data, np.uint8))
            elif self.part is None:
                self._segments = self._fetch()
            else:
                self._bundle = _bundle(self)
                self._segments = _unflat(self._bundle[self.part])
        return self._segments

    def _fetch(self) -> Segments:
        try:
            return cast("Segments", wait(self.ref))
        except ray.exceptions.ObjectLostError as error:
            lost = error
        try:
            keeper = ray.get_actor(cast(str, self.keeper), NAMESPACE)
            [self.ref], self.part = wait(keeper.adopt.remote(self.id))
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
_bundles: WeakValueDictionary[Any, Bundle] = WeakValueDictionary()
_own: OrderedDict[str, list[Any]] = OrderedDict()
_numbers = itertools.count()


def find_box(id: str) -> Box | None:
    """The box of this id, if anything in this process refers to it."""
    return _boxes.get(id)


def _opened(id: str, keeper: str | None, ref: Any, part: int | None, data: bytes | None) -> Box:
    with _lock:
        box = _boxes.get(id)
        if box is None:
            box = _boxes[id] = Box(id, keeper, ref, part, data)
        elif box.ref is None and box.data is None:  # made here, and given away
            box.ref, box.part, box.data = ref, part, data
        return box


def _bundle(box: Box) -> Bundle:
    """The bundle in which a box lies, read once by this process while any of its boxes is in use."""
    with _lock:
        found = _bundles.get(box.ref)
    if found is None:
        found = Bundle(wait(box.ref))
        with _lock:
            found = _bundles.setdefault(box.ref, found)
    return found


def new_box(keeper: str | None) -> Box:
    """An empty box with an id of its own."""
    return Box(f"{_token()}-{next(_numbers)}", keeper)


def fill(box: Box, arrays: list[NDArray[Any]], objects: list[Any], carried: bool) -> None:
    """Put the content in a new box, and that in the object store; ``carried``: unless it is small."""
    segments = _segments(arrays, objects)
    if carried and sum(segment.nbytes for segment in segments[1:]) <= CARRIED_BYTES:
        box.data = _flat(segments)
    else:
        box.ref = ray.put(segments)
    with _lock:
        _boxes[box.id] = box
        if objects:
            _own[box.id] = objects
            if len(_own) > OWN_OBJECTS:
                _own.popitem(last=False)


def dumps(value: Any, **how: Any) -> bytes:
    """A pickle, also of what only this process can import."""
    return cast(bytes, cloudpickle.dumps(value, **how))  # type: ignore[no-untyped-call]


def _segments(named: list[NDArray[Any]], objects: list[Any]) -> Segments:
    arrays = [np.ascontiguousarray(array) for array in named]
    shapes = [array.shape for array in named]
    dtypes = [array.dtype.str for array in arrays]
    pickled, buffers = None, []
    if objects:
        raw: list[pickle.PickleBuffer] = []
        pickled = dumps(objects, protocol=5, buffer_callback=raw.append)
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
    where: list[int] = []
    offsets: list[int] = []
    parts: list[Any] = []
    end = 0
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


def _flat(segments: Segments) -> bytes:
    """One run of bytes: the length of the head, the head, and the aligned segments."""
    head = pickle.dumps((segments[0], [segment.nbytes for segment in segments[1:]]), protocol=5)
    parts: list[Any] = [len(head).to_bytes(8, "little"), head, _PADDING[-(8 + len(head)) % ALIGN]]
    for segment in segments[1:]:
        parts += [segment.data, _PADDING[-segment.nbytes % ALIGN]]
    return b"".join(parts)


def _unflat(flat: NDArray[np.uint8]) -> Segments:
    """Views of the segments."""
    end = 8 + int.from_bytes(flat[:8].tobytes(), "little")
    layout, sizes = pickle.loads(flat[8:end].data)
    segments: Segments = [layout]
    for size in sizes:
        end += -end % ALIGN
        segments.append(flat[end : end + size])
        end += size
    return segments


_process: list[Any] = []


def _token() -> str:
    """Names this process, also after a fork."""
    if not _process or _process[0] != os.getpid():
        _process[:] = [os.getpid(), os.urandom(6).hex()]
    return cast(str, _process[1])
