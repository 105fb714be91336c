"""Which media features an engine elsewhere holds for this client: each is brought once, and dropped when too much."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_core.media import MediaStore
    from relax_core.remote.wire import Message

Pack = Callable[[list[str]], Mapping[str, Any]]
"""What brings the features under these keys to the engine: themselves, or references to them."""


class SentMedia:
    """Least recently used first; those of running requests stay. ``pack`` raises DataError for an unknown key."""

    def __init__(self, media: MediaStore, max_bytes: int, pack: Pack | None = None) -> None:
        self.media, self.max_bytes = media, max_bytes
        self._pack: Pack = pack or self._themselves
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._uses: Counter[str] = Counter()
        self._total = 0

    def _themselves(self, keys: list[str]) -> Mapping[str, Any]:
        return {key: self.media.get(key) for key in keys}

    def forget(self) -> None:
        """A new engine holds nothing."""
        self._sizes.clear()
        self._uses.clear()
        self._total = 0

    def use(self, keys: list[str]) -> list[Message]:
        """A request needs these: the messages that bring what the engine lacks."""
        missing = list(dict.fromkeys(key for key in keys if key not in self._sizes))
        parcels = self._pack(missing) if missing else {}
        for key in parcels:
            self._sizes[key] = self.media.size([key])
            self._total += self._sizes[key]
        for key in keys:
            self._sizes.move_to_end(key)
            self._uses[key] += 1
        return [("put", key, parcel) for key, parcel in parcels.items()]

    def done(self, keys: list[str]) -> list[Message]:
        """That request has ended: the messages that drop what is too much now."""
        self._uses.subtract(keys)
        dropped: list[Message] = []
        for key in list(self._sizes) if self._total > self.max_bytes else ():
            if self._total <= self.max_bytes:
                break
            if self._uses[key] <= 0:
                self._total -= self._sizes.pop(key)
                del self._uses[key]
                dropped.append(("drop", key))
        return dropped
