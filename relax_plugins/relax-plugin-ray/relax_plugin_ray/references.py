"""References to values in boxes: what a put writes travels once, and is read where and when it is needed.

A row's columns are ``Packed``: a mapping that looks into its boxes on access, and that pickles as references.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.interfaces import Columns
from relax_core.types import MediaRef
from relax_plugin_ray.boxes import Box, fill, new_box

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLAIN = frozenset({int, float, bool, complex, type(None), MediaRef})
_SHORT = 1000


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
        self._box = new_box(keeper)
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

    def box(self, carried: bool = True) -> Box | None:
        """The box, filled; None if all values were small. ``carried``: by the one call that it is for, if it may be."""
        if not self._arrays and not self._objects:
            return None
        fill(self._box, self._arrays, self._objects, carried)
        return self._box

    def _pack(self, value: Any) -> Any:
        cell = self._cells.get(id(value))
        if cell is not None:
            return cell
        if type(value) is np.ndarray and _plain(value.dtype):
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


def _plain(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype.str`` says all of it. (``isbuiltin`` is 0 of one that was pickled.)"""
    return not dtype.hasobject and np.dtype(dtype.str) == dtype


def small(value: Any) -> bool:
    """Whether a value is no work to copy: numbers, media references, short texts, and short tuples of them."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.generic):
        return True
    if kind in (str, bytes):
        return len(value) <= _SHORT
    return kind is tuple and len(value) <= _SHORT and all(map(small, value))
