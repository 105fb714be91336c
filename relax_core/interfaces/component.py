"""What every component has: an id that leads to a class, and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig


Columns = Mapping[str, Any]
"""Columns of one row: numpy arrays of length T, numbers, or small objects."""


Interrupt = Literal["continue", "abort", "drain"]


class ComponentConfig(BaseModel):
    """Base of every component's settings: strict, frozen, unknown keys refused. Document a field under the field."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Component:
    """What a provider hook returns for one id.

    ``target`` is ``"package.module:Class"`` and is imported only where the role is built. A class whose module imports
    something heavy gives its ``config`` from a module that does not; a light class nests ``Config`` and leaves it out.
    """

    target: str
    config: type[ComponentConfig] | None = None
    summary: str = ""
    makes: frozenset[str] = frozenset()
    """Of a stage: the columns that it can make. It is built when the algorithm needs one of them."""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """Of a model: settings of a small one that needs no files, for commands that have no run file."""


class Configurable:
    """Built from its own ``Config``; ``check`` may refuse what only the whole run file shows to be wrong."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        """One line for each setting that cannot work in ``run``: what was found, what is allowed, what to do."""
        return ()
