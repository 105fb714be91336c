"""The media store of a process: each medium is decoded once, and each set of model features is made once.

Rows carry keys, not media. What rows and running plays hold is counted by ``retain`` and ``release``; what nobody
holds stays while there is room, so that the next play of a task finds it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from relax_core.errors import DataError, RelaxError
from relax_core.media_files import file_of
from relax_core.types import MEDIA_KINDS, Decoded, MediaKind, MediaPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from relax_core.interfaces import Modality

Features = dict[str, "NDArray[Any]"]
"""What a model reads of one medium, by the name of the input."""

_Key = tuple[str, str]
"""("decoded", identity of the source) or ("features", key)."""


def describe(source: Path | bytes) -> str:
    """How errors call a source: the file's path, or the size of bytes that came from no file."""
    return f"{len(source)} bytes" if isinstance(source, bytes) else str(source)


@dataclass(slots=True)
class _Entry:
    value: Any
    nbytes: int
    references: int = 0


class MediaStore:
    """Thread-safe. ``modalities`` decode, by kind of medium; ``max_bytes`` bounds what nobody holds.

    Two threads that ask for the same thing at once share one decoding: the second waits for the first.
    """

    def __init__(self, modalities: Mapping[MediaKind, Modality] | Mapping[str, Modality], max_bytes: int) -> None:
        self.modalities: Mapping[str, Modality] = {str(kind): m for kind, m in modalities.items()}
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}
        self._idle: OrderedDict[_Key, None] = OrderedDict()  # held by nobody, least recently used first
        self._making: dict[_Key, Future[Any]] = {}
        self._nbytes = 0
        self._thread = threading.local()  # ``held``: the keys that ``holding`` keeps for this thread

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in the store."""
        return self._nbytes

    def __contains__(self, key: str) -> bool:
        """Whether features are stored under ``key``."""
        return ("features", key) in self._entries

    def decode(self, part: MediaPart) -> Decoded:
        """The content of a medium; decoded content passes through. A file is decoded again when it has changed.

        Raises DataError for a file that is missing or unreadable, and for a kind that no active modality decodes.
        """
        kind, source = MEDIA_KINDS[type(part)], part.source
        if isinstance(source, Decoded):
            if source.kind != kind:
                raise DataError(f"{kind}: got decoded {source.kind}; use {source.kind.capitalize()} for it")
            return source
        if kind not in self.modalities:
            known = ", ".join(sorted(self.modalities)) or "none"
            raise DataError(f"{kind} {describe(source)}: no modality decodes {kind} (there are: {known}); add a plugin")
        key = ("decoded", _identity(kind, source))
        return cast(Decoded, self._once(key, lambda: _decode(self.modalities[kind], source)))

    def dump(self, part: MediaPart) -> tuple[str, bytes]:
        """See ``file_of``."""
        return file_of(part, self.modalities)

    def features(self, key: str, make: Callable[[], Features]) -> str:
        """Store what ``make`` returns under ``key``, unless it is there already. Returns ``key``.

        ``key`` must name content, kind and every setting that shapes the features: equal keys mean equal features.
        """
        self._once(("features", key), make)
        return key

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Features that this thread asks for inside stay until the end of the block, whatever other threads add.

        Encode and ``retain`` inside of one: between the two, features of another thread might push them out. The block
        must not await.
        """
        before: list[_Key] | None = getattr(self._thread, "held", None)
        held: list[_Key] = []
        self._thread.held = held
        try:
            yield
        finally:
            self._thread.held = before
            self.release(key for _, key in held)

    def size(self, keys: Iterable[str]) -> int:
        """Bytes of the features under these keys, each counted once; those that are not in the store count as 0."""
        with self._lock:
            found = (self._entries.get(("features", key)) for key in set(keys))
            return sum(entry.nbytes for entry in found if entry is not None)

    def put(self, key: str, features: Mapping[str, NDArray[Any]]) -> None:
        """Store features that another process made."""
        self._once(("features", key), lambda: dict(features))

    def get(self, key: str) -> Features:
        """The features under ``key``. Raises DataError when they are not (or no longer) there."""
        with self._lock:
            entry = self._entries.get(("features", key))
            if entry is None:
                raise DataError(
                    f"media {key}: not in the store: encode its messages, and retain the key while it is used"
                )
            self._touch(("features", key), entry)
            return cast(Features, entry.value)

    def retain(self, keys: Iterable[str]) -> None:
        """Hold features, once for each mention of their key. Raises DataError, and holds nothing, if one is missing."""
        counts = Counter(keys)
        with self._lock:
            entries = [(("features", key), self._held(key), count) for key, count in counts.items()]
            for full, entry, count in entries:
                entry.references += count
                self._idle.pop(full, None)

    def release(self, keys: Iterable[str]) -> None:
        """Undo ``retain``. Raises DataError, and releases nothing, if one is held less often than that."""
        counts = Counter(keys)
        with self._lock:
            entries = [(("features", key), self._held(key, count), count) for key, count in counts.items()]
            for full, entry, count in entries:
                entry.references -= count
                if not entry.references:
                    self._idle[full] = None
            self._shrink()

    def _held(self, key: str, least: int = 0) -> _Entry:
        entry = self._entries.get(("features", key))
        if entry is None or entry.references < least:
            found = "not in the store" if entry is None else f"held {entry.references} times, to be released {least}"
            raise DataError(f"media {key}: {found}: retain and release must come in pairs")
        return entry

    def _once(self, key: _Key, make: Callable[[], Any]) -> Any:
        """The value under ``key``, made now if nobody has made it; whoever else asks meanwhile waits for it."""
        with self._lock:
            if entry := self._entries.get(key):
                self._touch(key, entry)
                self._hold(key, entry)
                return entry.value
            future = self._making.get(key)
            mine = future is None
            if future is None:
                future = self._making[key] = Future()
        if not mine:
            return self._shared(key, future.result())
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._insert(key, value)
        future.set_result(value)
        return value

    def _shared(self, key: _Key, value: Any) -> Any:
        """What another thread has just made. It may be pushed out already: then it is put back for this one."""
        with self._lock:
            if entry := self._entries.get(key):
                self._hold(key, entry)
            else:
                self._insert(key, value)
        return value

    def _hold(self, key: _Key, entry: _Entry) -> None:
        held: list[_Key] | None = getattr(self._thread, "held", None)
        if held is not None and key[0] == "features":
            held.append(key)
            entry.references += 1
            self._idle.pop(key, None)

    def _insert(self, key: _Key, value: Decoded | Features) -> None:
        arrays = [value.data] if isinstance(value, Decoded) else list(value.values())
        entry = _Entry(value, sum(array.nbytes for array in arrays))
        self._entries[key] = entry
        self._nbytes += entry.nbytes
        self._idle[key] = None
        self._hold(key, entry)
        self._shrink(keep=key)

    def _touch(self, key: _Key, entry: _Entry) -> None:
        if not entry.references:
            self._idle.move_to_end(key)

    def _shrink(self, keep: _Key | None = None) -> None:
        """Drop what nobody holds, least recently used first, until the rest fits. ``keep`` was asked for just now."""
        while self._nbytes > self.max_bytes and self._idle:
            key = next(iter(self._idle))
            if key == keep:
                return
            del self._idle[key]
            self._nbytes -= self._entries.pop(key).nbytes


def _identity(kind: str, source: Path | bytes) -> str:
    if isinstance(source, bytes):
        return f"{kind} {hashlib.sha256(source).hexdigest()}"
    try:
        found = os.stat(source)
    except OSError as error:
        raise DataError(f"{kind} {source}: {error.strerror or error}: check the path") from error
    return f"{kind} {os.path.abspath(source)} {found.st_mtime_ns} {found.st_size}"


def _decode(modality: Modality, source: Path | bytes) -> Decoded:
    try:
        return modality.decode(source)
    except RelaxError:
        raise
    except Exception as error:  # whatever a library raises for odd bytes: a bad medium is data, not the end of a run
        text = " ".join(str(error).split())
        raise DataError(f"{modality.kind} {describe(source)}: {type(error).__name__}: {text}") from error
