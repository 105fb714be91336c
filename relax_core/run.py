"""A run: its settings, its directory and the plugins it stands on. Rebuilt in every process from the resolved file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.interfaces import ModelAdapter
    from relax_core.media import MediaStore
    from relax_core.plugins import Stack

MEDIA_BYTES = 1_000_000_000
"""Model features of media that no row needs any more are kept up to this size."""


@dataclass(frozen=True, slots=True)
class Run:
    """What callbacks and roles may know of the run they belong to."""

    config: RunConfig
    directory: Path
    stack: Stack


def rebuild(resolved: Mapping[str, Any]) -> Run:
    """The run of a resolved run file, in whatever process this is."""
    from relax_core.config.resolve import resolve

    config, stack = resolve(dict(resolved))
    return Run(config, config.runs / config.name, stack)


def build_adapter(run: Run) -> tuple[ModelAdapter, MediaStore]:
    """The model adapter of a process, with the media store that it fills."""
    from relax_core.media import MediaStore

    sections = run.stack.components("modalities")
    modalities = {kind: run.stack.build_default("modalities", kind) for kind in sections}
    media = MediaStore(modalities, max_bytes=MEDIA_BYTES)
    return run.stack.build("models", run.config.model, media, where="model"), media
