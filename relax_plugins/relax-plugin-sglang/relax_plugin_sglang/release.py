"""Which release of SGLang serves: the oldest that can, those that were tested, and how they differ for us."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from relax_core.errors import EngineError

OLDEST = (0, 5, 11)
TESTED = ((0, 5, 11), (0, 5, 23))
"""From and to; which ones between, the plugin's README says."""
_SESSIONS = (0, 5, 21)


@dataclass(frozen=True, slots=True)
class Release:
    """``text``: what the server, or its environment, says."""

    text: str
    number: tuple[int, ...] | None
    """None for what is no release, such as a build of a source tree without tags: it is taken for the newest."""

    @classmethod
    def of(cls, text: str) -> Self:
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
        number = tuple(map(int, found.groups())) if found else None
        return cls(text, number if number and any(number) else None)

    def check(self, where: str) -> None:
        """Raises EngineError for a release that cannot serve. ``where``: the setting that led to it, and its value."""
        if self.number is not None and self.number < OLDEST:
            oldest = _dotted(OLDEST)
            raise EngineError(f"{where} has SGLang {self.text}; the oldest that can serve is {oldest}: update it")

    def note(self) -> str | None:
        """A line about one that nobody has tested."""
        first, last = TESTED
        if self.number is not None and self.number <= last:
            return None
        found = "is newer than" if self.number else "is none of"
        return (
            f"engine sglang: SGLang {self.text} {found} the tested releases ({_dotted(first)} to {_dotted(last)}); "
            "the probe compares its log-probs before anything is played"
        )

    @property
    def sessions(self) -> bool:
        """Whether weights from memory or a group are taken only between two requests that say so."""
        return self.number is None or self.number >= _SESSIONS


def installed(python: Path, distribution: str) -> str:
    """The version of a distribution in the environment of an interpreter; empty where that is not to be known."""
    ask = f"from importlib.metadata import version; print(version({distribution!r}))"
    try:
        found = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))
