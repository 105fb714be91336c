"""A media store that shares features with other processes: each set is put in the object store once, and read in place.

``share`` and ``know`` are the two ends. What is known and was not read yet costs this process nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from relax_core.interfaces import Modality, Row
from relax_core.media import Features, MediaStore
from relax_core.types import MediaKind
from relax_plugin_ray.boxes import Box
from relax_plugin_ray.references import Packed, Packer


class Shared:
    """Features that lie in a box. Picklable; whoever has it keeps them in the object store."""

    __slots__ = ("__weakref__", "_features", "box", "key", "nbytes", "raw")

    def __init__(self, key: str, box: Box | None, raw: dict[str, Any], nbytes: int) -> None:
        self.key, self.box, self.raw, self.nbytes = key, box, raw, nbytes
        self._features: Features | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Shared, (self.key, self.box, self.raw, self.nbytes))

    def features(self) -> Features:
        """Read-only arrays, fetched at the first call."""
        if self._features is None:
            self._features = dict(Packed(self.raw))
        return self._features


class SharedMedia(MediaStore):
    """See ``MediaStore``; besides what this process made it serves what it was told to ``know``.

    Known features stay while they are retained, while a row of this process refers to them, and otherwise while there
    is room: ``max_bytes`` for what was made here, and as much again for what is only known. A release of the last hold
    on known features lets go of them at once.
    """

    def __init__(self, modalities: Mapping[MediaKind, Modality] | Mapping[str, Modality], max_bytes: int) -> None:
        super().__init__(modalities, max_bytes)
        self._guard = threading.RLock()
        self._alive: WeakValueDictionary[str, Shared] = WeakValueDictionary()  # known, by whomever it is kept
        self._holds: Counter[str] = Counter()
        self._held_shared: dict[str, Shared] = {}
        self._recent: OrderedDict[str, Shared] = OrderedDict()  # held by nobody, least recently told of first
        self._recent_bytes = 0
        self._given: dict[str, Shared] = {}  # made here, and shared

    def __contains__(self, key: str) -> bool:
        return super().__contains__(key) or key in self._alive

    def share(self, keys: Iterable[str], keeper: str | None = None) -> dict[str, Shared]:
        """The features under these keys, for other processes; keys that are not in the store are left out.

        ``keeper``: see ``references.Box``. What is shared stays shared until it is neither held nor idle here.
        """
        result = {}
        with self._guard:
            for key in dict.fromkeys(keys):
                shared = self._given.get(key) or self._alive.get(key)
                if shared is None and super().__contains__(key):
                    shared = self._given[key] = _shared(key, super().get(key), keeper)
                if shared is not None:
                    result[key] = shared
            for key in [key for key in self._given if not super(SharedMedia, self).__contains__(key)]:
                del self._given[key]
        return result

    def know(self, shared: Mapping[str, Shared]) -> None:
        """Features of another process, to be read at the first ``get``."""
        with self._guard:
            for key, value in shared.items():
                if not super().__contains__(key) and key not in self._held_shared:
                    value = self._alive.setdefault(key, value)
                    self._forget(key)
                    self._recent[key] = value
                    self._recent_bytes += value.nbytes
            while self._recent_bytes > self.max_bytes and len(self._recent) > 1:
                self._forget(next(iter(self._recent)))

    def know_rows(self, rows: Iterable[Row]) -> None:
        """The features that came with rows: as long as the columns live, they can be got."""
        for row in rows:
            if isinstance(row.columns, Packed):
                for attached in row.columns.attached:
                    self.know({shared.key: shared for shared in attached})

    def get(self, key: str) -> Features:
        if not super().__contains__(key) and (shared := self._alive.get(key)) is not None:
            return shared.features()
        return super().get(key)

    def size(self, keys: Iterable[str]) -> int:
        keys = set(keys)
        with self._guard:
            known = [
                self._alive[key].nbytes
                for key in keys
                if not super(SharedMedia, self).__contains__(key) and key in self._alive
            ]
        return super().size(keys) + sum(known)

    def retain(self, keys: Iterable[str]) -> None:
        with self._guard:
            known, own = self._apart(
                keys, lambda key: key in self._alive and not super(SharedMedia, self).__contains__(key)
            )
            super().retain(own.elements())
            for key in known:
                self._held_shared.setdefault(key, self._alive[key])
                self._forget(key)
            self._holds += known

    def release(self, keys: Iterable[str]) -> None:
        with self._guard:
            counts = Counter(keys)
            known = Counter({key: min(count, self._holds[key]) for key, count in counts.items() if key in self._holds})
            super().release((counts - known).elements())
            self._holds -= known
            for key in known:
                if key not in self._holds:
                    del self._held_shared[key]

    def _apart(self, keys: Iterable[str], known: Any) -> tuple[Counter[str], Counter[str]]:
        counts = Counter(keys)
        first = Counter({key: count for key, count in counts.items() if known(key)})
        return first, counts - first

    def _forget(self, key: str) -> None:
        """Drop what is held by nobody."""
        found = self._recent.pop(key, None)
        if found is not None:
            self._recent_bytes -= found.nbytes


def _shared(key: str, features: Features, keeper: str | None) -> Shared:
    packer = Packer(keeper)
    raw = packer.raw(features)
    return Shared(key, packer.box(carried=False), raw, Packed(raw).nbytes)
