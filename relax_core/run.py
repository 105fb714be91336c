"""A run: its settings, its directory and the plugins it stands on. Rebuilt in every process from the resolved file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.types import MEDIA_KINDS, MediaKind

if TYPE_CHECKING:
    from relax_core.config.schema import ComponentSection, RunConfig
    from relax_core.interfaces import Algorithm, Environment, Modality, ModelAdapter
    from relax_core.media import MediaStore
    from relax_core.plugins import Stack


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


def build_algorithm(run: Run) -> Algorithm:
    """The run's algorithm: it holds settings alone, so everyone who asks something of it may have one."""
    algorithm: Algorithm = run.stack.build("algorithms", run.config.algorithm, where="algorithm")
    return algorithm


def build_environments(run: Run) -> dict[str, Environment]:
    """By label."""
    sections = enumerate(run.config.environments)
    return {s.label: run.stack.build("environments", s, where=f"environments.{i}") for i, s in sections}


def build_modalities(stack: Stack, named: Sequence[ComponentSection] = ()) -> dict[MediaKind, Modality]:
    """One decoder for each kind of medium: the built-in ones, replaced by those that are ``named`` in a run file."""
    from relax_core.config.schema import ComponentSection

    built_in = [ComponentSection(id=kind) for kind in MEDIA_KINDS.values()]
    sections = [("modalities", s) for s in built_in] + [(f"modalities.{i}", s) for i, s in enumerate(named)]
    found = [stack.build("modalities", section, where=where) for where, section in sections]
    return {modality.kind: modality for modality in found}


def build_adapter(
    run: Run, model: ComponentSection | None = None, where: str = "model"
) -> tuple[ModelAdapter, MediaStore]:
    """The adapter of a model (default: the run's) in this process, with the media store that it fills."""
    from relax_core.media import MediaStore

    media = MediaStore(build_modalities(run.stack, run.config.modalities), max_bytes=run.config.data.media_bytes)
    return run.stack.build("models", model or run.config.model, media, run.config.seed, where=where), media
