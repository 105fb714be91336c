"""Every error a user can meet: one line that says where, what was found, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RelaxError(Exception):
    """Base of all errors that Relax raises on purpose. ``str(error)`` is one line."""


class ConfigError(RelaxError):
    """A run file, an override or a combination of settings that cannot work; raised before any work.

    ``problems``: one line each, when several things are wrong at once.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class PluginError(RelaxError):
    """A plugin, hook or component id that cannot be used; names the distribution and its version."""


class DataError(RelaxError):
    """A row of data or a medium that cannot be used; names the file and the line where there is one."""


class MissingTrack(DataError):
    """A file without the kind of track that was asked for, such as the sound of a silent film."""


class TooManyTokens(DataError):
    """More is said to a policy than a sample may hold."""


class EngineError(RelaxError):
    """An engine that answered wrongly or died."""


class WeightsError(RelaxError):
    """Published weights that do not match their manifest."""


class CheckpointError(RelaxError):
    """A checkpoint or journal that is missing, truncated or altered."""


class FencedError(RelaxError):
    """A put or ack from a holder incarnation that was declared dead."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known word, or the empty string."""
    found = get_close_matches(word, sorted(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
