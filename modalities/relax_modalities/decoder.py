"""The one decoder interface: what a backend of each kind of medium promises, and how they are tried in order.

A backend's module imports its library at the top and is itself imported when a medium first needs it, so a missing
library costs nothing until then and is an error only where no other backend can read the medium.

Shape legend: N samples or frames, H height, W width.
"""

from __future__ import annotations

import importlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from relax_core.errors import DataError, nearest
from relax_core.media import describe
from relax_core.types import MediaKind
from relax_modalities.forms import advice, form_of
from relax_modalities.truncation import refuse_truncated

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

Source = Path | bytes
"""A file, or its content."""

Byte = Annotated[int, Field(ge=0, le=255)]

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

BACKENDS: dict[MediaKind, dict[str, str]] = {
    "image": {"pillow": "relax_modalities.backends.pillow_image:PillowImage"},
    "audio": {
        "soundfile": "relax_modalities.backends.soundfile_audio:SoundfileAudio",
        "pyav": "relax_modalities.backends.pyav_audio:PyavAudio",
        "librosa": "relax_modalities.backends.librosa_audio:LibrosaAudio",
    },
    "video": {
        "pyav": "relax_modalities.backends.pyav_video:PyavVideo",
        "pillow": "relax_modalities.backends.pillow_video:PillowVideo",
        "decord": "relax_modalities.backends.decord_video:DecordVideo",
    },
}
"""Backends by name. Any other class is named as ``package.module:Class``."""

PACKAGES = {"pillow": "pillow", "soundfile": "soundfile", "librosa": "librosa", "pyav": "av", "decord": "decord2"}
"""What to install for a backend."""


# --- what a backend promises ------------------------------------------------------------------------------------------


class Backend(ABC):
    """Base of all backends; built without arguments. Several threads use one at once.

    A backend raises DataError for a medium that it understands and that is broken or over a limit: no other backend
    is tried then. Any other exception means "not mine", and the next one gets its turn. It closes what it opens, and
    holds memory in proportion to the limits that it is given, whatever a file claims about itself.
    """

    kind: ClassVar[MediaKind]


class ImageBackend(Backend):
    kind = "image"

    @abstractmethod
    def read(self, source: Source, max_pixels: int, background: Colour) -> NDArray[np.uint8]:
        """RGB pixels (H, W, 3), upright, alpha composited on ``background``; the first frame of an animation."""


@dataclass(frozen=True, slots=True)
class Sound:
    """``mono_N``: float32, the mean of the channels, full scale is [-1, 1]. ``rate``: samples per second."""

    mono_N: NDArray[np.float32]
    rate: int


class AudioBackend(Backend):
    kind = "audio"

    @abstractmethod
    def read(self, source: Source, max_seconds: float) -> Sound:
        """The default audio stream at its own rate. ``relax_modalities.mixing.Mixer`` mixes blocks and keeps limits."""


class Clip(ABC):
    """An open video. ``starts_N``: when each frame appears, float64 seconds, ascending; ``end``: when the last goes."""

    starts_N: NDArray[np.float64]
    end: float
    height: int
    width: int

    @abstractmethod
    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """The frames at ascending ``indices`` (some may repeat), upright, RGB uint8 (H, W, 3)."""


class VideoBackend(Backend):
    kind = "video"

    @abstractmethod
    def open(self, source: Source, max_pixels: int, background: Colour) -> AbstractContextManager[Clip]:
        """The default video stream. Larger frames are an error; alpha is composited on ``background``."""


def too_long(kind: MediaKind, source: Source, seconds: float, limit: float) -> DataError:
    """The error for a medium over its limit of seconds."""
    return DataError(f"{kind} {describe(source)}: {seconds:.1f} s long; max_seconds allows {limit:g}: cut it")


def too_large(kind: MediaKind, source: Source, width: int, height: int, limit: int) -> DataError:
    """The error for a medium over its limit of pixels."""
    where = f"{kind} {describe(source)}"
    return DataError(f"{where}: {width}x{height} pixels; max_pixels allows {limit}: scale it down")


def broken(kind: MediaKind, source: Source, backend: str, reason: str | Exception) -> DataError:
    """The error for a medium that a backend understands and cannot read."""
    text = reason if isinstance(reason, str) else reason_of(reason, named=not isinstance(reason, ValueError))
    return DataError(f"{kind} {describe(source)}: {backend}: {text}")


# --- trying them in order ---------------------------------------------------------------------------------------------

B = TypeVar("B", bound=Backend)
T = TypeVar("T")


class Decoder(Generic[B]):
    """Backends of one kind, tried in order. Thread-safe."""

    def __init__(self, kind: MediaKind, names: Sequence[str]) -> None:
        self.kind = kind
        self.names = check_names(kind, tuple(names))
        self._loaded: dict[str, B | str] = {}

    def read(self, source: Source, attempt: Callable[[B], T]) -> T:
        """The first result that a backend gives. Raises DataError: one line with the file, each backend, its reason."""
        self._refuse_nothing(source)
        if self.kind != "image":  # Pillow notices by itself
            refuse_truncated(source, self.kind)
        reasons = []
        for name in self.names:
            backend = self._load(name)
            if isinstance(backend, str):
                reasons.append(f"{name}: {backend}")
                continue
            try:
                return attempt(backend)
            except DataError:
                raise
            except Exception as error:
                reasons.append(f"{name}: {reason_of(error)}")
        what = advice(form_of(source), self.kind)
        raise DataError(f"{self.kind} {describe(source)}: no backend can read it{what} ({'; '.join(reasons)})")

    def _refuse_nothing(self, source: Source) -> None:
        if isinstance(source, Path) and not source.is_file():
            reason = "not a file" if source.exists() else "no such file"
            raise DataError(f"{self.kind} {source}: {reason}: check the path")
        if not (len(source) if isinstance(source, bytes) else source.stat().st_size):
            raise DataError(f"{self.kind} {describe(source)}: is empty: write or download it again")

    def _load(self, name: str) -> B | str:
        """The backend, or why it cannot be used: said once in the log, and in every error that it takes part in."""
        if name not in self._loaded:
            module, _, attribute = BACKENDS[self.kind].get(name, name).partition(":")
            try:
                self._loaded[name] = getattr(importlib.import_module(module), attribute)()
            except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library that does not load
                advice = f"; pip install {PACKAGES[name]}" if name in PACKAGES else ""
                self._loaded[name] = f"cannot be imported ({reason_of(error)}){advice}"
                _log.warning("%s backend %s %s", self.kind, name, self._loaded[name])
        return self._loaded[name]


def check_names(kind: MediaKind, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if each is known or a ``package.module:Class``. Raises ValueError for a config model to report."""
    known = BACKENDS[kind]
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"unknown {kind} backend {name!r}{nearest(name, known)}; known are {', '.join(known)}, "
                "and any other as package.module:Class"
            )
    return names


def reason_of(error: Exception, named: bool = True) -> str:
    """An error's type (if ``named``) and text on one line, without what changes from call to call."""
    text: Any = " ".join(str(error).split())
    text = re.sub(r"\[Errno -?\d+\] |<[\w.]+ object at 0x[0-9a-f]+>:?\s*|\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", text)
    text = text.strip()
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text[:300]}" if named else text[:300]
