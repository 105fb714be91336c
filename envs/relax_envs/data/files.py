"""Which files a path of a data set means: a file, a pattern, a folder, one of a hub, or one saved by ``datasets``."""

from __future__ import annotations

import glob
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from relax_core.errors import DataError, nearest

Format = Literal["json lines", "json", "parquet", "arrow"]

_FORMATS: dict[str, Format] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
}
_OTHERS = (".csv", ".tsv", ".gz", ".zst", ".zip", ".tar", ".xlsx", ".pkl")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True, slots=True)
class Files:
    """``indices``: files that say which rows, in which order, where a saved data set has such."""

    format: Format
    paths: Sequence[Path]
    indices: Sequence[Path] = ()


def find(path: Path, split: str | None = None) -> Files:
    """The files of a path, sorted; ``split``: those that belong to a split of the data set, such as ``train``.

    Raises DataError when nothing matches, or when it is not clear what is meant.
    """
    if path.is_file():
        if split is not None:
            raise DataError(f"{path}: hf_split {split!r} chooses from a folder, and this is one file: leave it out")
        return _of_one_kind(path, [path])
    if path.is_dir():
        return _folder(path, split)
    pattern = str(path)
    found = sorted(p for text in glob.glob(pattern, recursive=True) if (p := Path(text)).is_file())
    if not found:
        if glob.has_magic(pattern):
            raise DataError(f"{path}: no file matches (looked in {Path.cwd()}): check the pattern")
        raise DataError(f"{path}: no such file or folder (looked in {Path.cwd()}){_neighbour(path)}: check the path")
    return _of_one_kind(path, _of_split(path, found, split, Path(_fixed(pattern))))


def _neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    close = get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), 1)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def _fixed(pattern: str) -> str:
    """The folder of a pattern in which everything lies that it matches."""
    parts = Path(pattern).parts
    magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return str(Path(*parts[:magic])) if magic else ""


def _of_one_kind(path: Path, files: Sequence[Path]) -> Files:
    """Files that are all of one format. Raises DataError for a mixture, and for what cannot be read."""
    formats = {file: _format(file) for file in files}
    kinds = sorted(set(formats.values()))
    if len(kinds) > 1:
        shown = ", ".join(next(f.name for f in files if formats[f] == kind) for kind in kinds)
        raise DataError(f"{path}: files of several formats ({shown}): choose by a pattern such as '*{files[0].suffix}'")
    return Files(kinds[0], files)


def _format(file: Path) -> Format:
    """By the name; a file with an unknown one is taken for JSON lines."""
    suffix = file.suffix.lower()
    if suffix in _OTHERS:
        unpack = "unpack it" if suffix in (".gz", ".zst", ".zip", ".tar") else "write it as .jsonl or .parquet"
        raise DataError(f"{file}: {suffix} files are not read: {unpack}")
    return _FORMATS.get(suffix, "json lines")


# --- folders ------------------------------------------------------------------------------------------------------


def _folder(path: Path, split: str | None) -> Files:
    if (path / "state.json").is_file():
        if split is not None:
            raise DataError(f"{path}: holds one saved data set without splits: leave hf_split {split!r} out")
        return _saved(path)
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits") or []
        return _saved(path / _chosen(path, splits, split))
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
    kinds: dict[Format, list[Path]] = defaultdict(list)
    for file in files:
        if (kind := _FORMATS.get(file.suffix.lower())) and file.name not in _ABOUT:
            kinds[kind].append(file)
    if len(kinds) > 1:
        kinds.pop("json", None)  # beside data files it is some description of them
    if not kinds:
        raise DataError(f"{path}: no data file in this folder: .jsonl, .json, .parquet and .arrow are read")
    found = [file for group in kinds.values() for file in group]
    return _of_one_kind(path, _of_split(path, sorted(found), split, path))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _saved(path: Path) -> Files:
    """What ``save_to_disk`` wrote."""
    state = _json(path / "state.json")
    data, indices = (
        [path / file["filename"] for file in state.get(key) or []] for key in ("_data_files", "_indices_data_files")
    )
    if not data:
        raise DataError(f"{path / 'state.json'}: names no data file: save the data set again")
    return Files("arrow", data, indices)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}: save the data set again") from error
    return found if isinstance(found, dict) else {}


# --- splits -------------------------------------------------------------------------------------------------------


def _of_split(path: Path, files: Sequence[Path], split: str | None, root: Path) -> list[Path]:
    """The files of a split; all of them for ``all``, and when none is asked for and they do not belong to several."""
    split = next((name for name, words in _SPLITS.items() if split in words), split)
    by_split: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        by_split[_split_of(file, root, split)].append(file)
    named = [name for name in by_split if name]
    if split == "all" or (split is None and len(named) < 2):
        chosen = list(files)
    else:
        chosen = by_split[_chosen(path, named, split)]
    _check_subsets(path, chosen, root)
    return chosen


def _split_of(file: Path, root: Path, wanted: str | None) -> str:
    """The split that a file's name, or else the names of its folders, speak of; empty if none do."""
    known = _SPLITS if wanted is None or wanted in _SPLITS else {wanted: (wanted,)} | _SPLITS
    if shard := _SHARD.search(file.name):
        stem = file.name[: shard.start()]
        return next((name for name, words in known.items() if stem in words), stem)
    parts = file.relative_to(root).parts if root in file.parents else (file.name,)
    for part in reversed(parts):
        for name, words in known.items():
            if re.search(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, words))})(?![A-Za-z])", part, re.IGNORECASE):
                return name
    return ""


def _chosen(path: Path, splits: Iterable[str], split: str | None) -> str:
    splits = list(splits)
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        found = f"no split {split!r}{nearest(split, splits)}" if split else "several splits"
        raise DataError(f"{path}: {found}: choose one by hf_split: {', '.join(splits) or 'it has none'}")
    return split


def _check_subsets(path: Path, files: Sequence[Path], root: Path) -> None:
    """Raises DataError where shards of one name lie in several folders: subsets of a hub data set."""
    folders: dict[str, set[Path]] = defaultdict(set)
    for file in files:
        if _SHARD.search(file.name):
            folders[file.name].add(file.parent)
    for several in folders.values():
        if len(several) > 1:
            shown = ", ".join(sorted(str(folder) for folder in several))
            raise DataError(f"{path}: several subsets of a data set: name the folder of one: {shown}")
