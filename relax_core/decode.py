"""``relax decode``: what the decoders make of media files, and how many tokens a model reads of each, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.errors import ConfigError, DataError, MissingTrack, nearest
from relax_core.types import MEDIA_KINDS, Audio, Decoded, MediaKind, MediaPart, user

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_core.media import MediaStore
    from relax_core.plugins import Stack

UNREADABLE = 2
"""Exit code when some files cannot be read; the others are shown all the same."""

ORDER: tuple[MediaKind, ...] = ("image", "video", "audio")
"""In which order kinds are tried: many sounds come in containers of videos, and some with a picture."""

_PARTS: Mapping[MediaKind, type[Any]] = {kind: part for part, kind in MEDIA_KINDS.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """A medium of a file. ``error``: why it cannot be decoded, or why the model cannot read it.

    ``duration`` and ``timestamps`` (of a video's frames) are in seconds, ``rate`` in samples or frames per second.
    """

    file: str
    kind: MediaKind | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    duration: float | None = None
    rate: float | None = None
    timestamps: tuple[float, ...] | None = None
    tokens: int | None = None
    content_hash: str | None = None
    error: str | None = None


def main(
    files: Sequence[Path],
    *,
    as_json: bool = False,
    kind: str | None = None,
    model: str | None = None,
    plugins: Sequence[str] = (),
    run: Path | None = None,
) -> int:
    """Show every file. Decoders and model are those of the run file, or else the built-in ones and ``model``.

    Returns 0 when all of them can be read, 2 when some cannot. Raises ConfigError for a kind or model that is unknown.
    """
    if not (kind is None or kind in ORDER):
        raise ConfigError(f"--kind: found {kind!r}{nearest(kind, ORDER)}; allowed are {', '.join(ORDER)}")
    adapter, media = _from_run(run) if run is not None else _default(model, plugins)
    found = [one for file in files for one in look(file, media, adapter, kind)]
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2, ensure_ascii=False))
    else:
        _print(found)
    return UNREADABLE if any(one.error for one in found) else 0


def look(
    file: Path, media: MediaStore, adapter: ModelAdapter | None = None, kind: MediaKind | None = None
) -> Iterator[Found]:
    """What is in a file: one medium, and for a video its sound, too. ``kind`` None: what it turns out to be."""
    try:
        there, problem = file.is_file(), "not a file" if file.exists() else "no such file"
    except OSError as error:  # a name that is too long
        there, problem = False, str(error.strerror)
    if not there:
        yield Found(str(file), kind, error=f"{file}: {problem}: check the path")
        return
    if kind is not None:
        yield _look(file, kind, media, adapter)
        return
    known = [kind for kind in ORDER if kind in media.modalities]
    likely = [kind for kind in known if media.modalities[kind].recognizes(file)]
    errors: list[Found] = []
    for tried in [*likely, *(kind for kind in known if kind not in likely)]:
        one = _look(file, tried, media, adapter)
        if one.shape is None:
            errors.append(one)
            continue
        yield one
        if tried == "video":
            yield from _sound_of(file, media, adapter)
        return
    if likely:
        yield errors[0]
    else:
        yield Found(str(file), error=f"looks like neither {' nor '.join(known)}: {errors[0].error}")


def _sound_of(file: Path, media: MediaStore, adapter: ModelAdapter | None) -> Iterator[Found]:
    """The sound of a video, unless it has none."""
    try:
        media.decode(Audio(file))
    except MissingTrack:
        return
    except DataError:
        pass
    yield _look(file, "audio", media, adapter)


def _look(file: Path, kind: MediaKind, media: MediaStore, adapter: ModelAdapter | None) -> Found:
    part: MediaPart = _PARTS[kind](file)
    try:
        decoded = media.decode(part)
    except DataError as error:
        return Found(str(file), kind, error=str(error))
    tokens, problem = _tokens(part, kind, adapter)
    return Found(
        str(file),
        kind,
        decoded.data.shape,
        str(decoded.data.dtype),
        len(decoded.data) / decoded.rate if decoded.rate else None,
        decoded.rate,
        _timestamps(decoded),
        tokens,
        decoded.hash,
        problem,
    )


def _timestamps(decoded: Decoded) -> tuple[float, ...] | None:
    if decoded.kind != "video":
        return None
    return decoded.times or tuple(i / (decoded.rate or 1.0) for i in range(len(decoded.data)))


def _tokens(part: MediaPart, kind: MediaKind, adapter: ModelAdapter | None) -> tuple[int | None, str | None]:
    """The medium's placeholders in a message, or why the model cannot read it."""
    if adapter is None or kind not in adapter.kinds:
        return None, None
    try:
        return sum(ref.length for ref in adapter.encode([user(part)]).media), None
    except DataError as error:
        return None, str(error)


# --- whose decoders, whose tokens -----------------------------------------------------------------------------------


def _from_run(path: Path) -> tuple[ModelAdapter, MediaStore]:
    from relax_core.config.resolve import load
    from relax_core.run import Run, build_adapter

    config, stack = load(path)
    return build_adapter(Run(config, config.runs / config.name, stack))


def _default(model: str | None, plugins: Sequence[str]) -> tuple[ModelAdapter | None, MediaStore]:
    """The built-in decoders, and a model with the settings that its plugin gives as a sample of it."""
    from relax_core.config.schema import ComponentSection, DataSection
    from relax_core.media import MediaStore
    from relax_core.plugins import activate
    from relax_core.run import build_modalities

    named, found = _sample(model)
    stack: Stack = activate(list(dict.fromkeys([*plugins, *named])))
    media = MediaStore(build_modalities(stack), max_bytes=DataSection().media_bytes)
    if found is None:
        return None, media
    section = ComponentSection.model_validate({"id": found, **stack.provided("models", found).component.sample})
    return stack.build("models", section, media, 0, where="--model"), media


def _sample(model: str | None) -> tuple[list[str], str | None]:
    """The plugin to activate and the model's id: ``model``, or the first installed one with sample settings."""
    from relax_core.catalog import catalog
    from relax_core.plugins import BUILT_IN

    models = {e.id: e for e in catalog() if e.kind == "models" and e.component and e.component.sample}
    if model is None:
        model = next(iter(models), None)
    if model is None:
        return [], None
    if model not in models:
        raise ConfigError(
            f"--model: found {model!r}{nearest(model, models)}; allowed are {', '.join(models) or 'none'} "
            "(--run takes the model of a run file)"
        )
    plugin = models[model].plugin
    return ([] if plugin in BUILT_IN else [plugin]), model


# --- the table --------------------------------------------------------------------------------------------------------


def _print(found: Sequence[Found]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("file", "kind", "shape", "type", "seconds", "rate", "frames at", "tokens", "content hash"):
        table.add_column(name, overflow="fold")
    for one in found:
        if one.shape is not None:
            table.add_row(*(one.file, str(one.kind), " x ".join(map(str, one.shape)), str(one.dtype)), *_times(one))
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    if table.row_count:
        console.print(table)
    for one in found:
        if one.error:
            console.print(f"error: {one.error}", soft_wrap=True)


def _times(one: Found) -> tuple[str, ...]:
    at = [f"{time:.2f}" for time in one.timestamps or ()]
    shown = at if len(at) <= 6 else [*at[:3], "...", *at[-2:]]
    return (
        "" if one.duration is None else f"{one.duration:.3f}",
        "" if one.rate is None else f"{one.rate:g}",
        " ".join(shown),
        "" if one.tokens is None else str(one.tokens),
        str(one.content_hash),
    )
