"""Environments whose tasks are rows of data sets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.tasks import Mixture
from relax_core.types import Task
from relax_envs.data.columns import Columns, read_columns
from relax_envs.data.tasks import DataSet, DataTasks, Source

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig

Sources = Path | Source | Annotated[tuple[Path | Source, ...], Field(min_length=1)]


class Split(ComponentConfig):
    eval: Annotated[float, Field(gt=0, lt=1)]
    """Share of the rows that is held out, chosen by the hash of what they say and show. Every row is read once."""


class RowsEnvironment(Environment):
    """What all of them share; a class that says how a row is played may stand beside it, as in ``tool_use``.

    A missing or empty file raises DataError, as does asking for the task of a row that cannot be used.
    """

    class Config(ComponentConfig):
        data: Sources
        """A path, a source, or a list of them, which are mixed by weight."""
        eval_data: Sources | None = None
        """The same for evaluation."""
        split: Split | None = None
        """Holds a part of ``data`` out for evaluation instead."""
        columns: Columns | Path | None = None
        """For all sources that have none of their own: a mapping, or the path of a YAML file with one."""
        need_answer: bool = True
        """Whether a row without an answer is bad."""

        @model_validator(mode="after")
        def _one_eval(self) -> RowsEnvironment.Config:
            if self.eval_data is not None and self.split is not None:
                raise ValueError("eval_data and split are both set; keep one: each says what evaluation plays")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._opened: dict[str, Sequence[Task]] | None = None
        self._lock = threading.Lock()

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        try:
            for source in (config, *_listed(config.data), *_listed(config.eval_data)):
                read_columns(source.columns)
        except ConfigError as error:
            yield from error.problems

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        if split == "eval" and self.config.eval_data is None and self.config.split is None:
            paths = ", ".join(str(source.path) for source in _listed(self.config.data))
            raise ConfigError(f"{paths}: nothing is held out for evaluation: set eval_data or split there")
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
        tasks = self._opened[split]
        if not len(tasks):
            paths = ", ".join(str(source.path) for source in _listed(self.config.data))
            other = "train" if split == "eval" else "eval"
            raise DataError(
                f"{paths}: no row for {split}: all {len(self._opened[other])} are for {other}: change split"
            )
        return tasks

    def _open(self) -> dict[str, Sequence[Task]]:
        config = self.config
        trained = self._data_sets(_listed(config.data), "")
        held = self._data_sets(_listed(config.eval_data), "eval-")
        _find_duplicates([*trained.values(), *held.values()])
        if config.split is None:
            return {
                "train": _joined({name: (DataTasks(data), data.source.weight) for name, data in trained.items()}),
                "eval": _joined({name: (DataTasks(data), data.source.weight) for name, data in held.items()}),
            }
        sides = {name: data.split(config.split.eval) for name, data in trained.items()}
        weights = {name: data.source.weight for name, data in trained.items()}
        return {
            side: _joined({name: (parts[i], weights[name]) for name, parts in sides.items()})
            for i, side in enumerate(("train", "eval"))
        }

    def _data_sets(self, sources: Sequence[Source], prefix: str) -> dict[str, DataSet]:
        """By name. Ids begin with the name where there are several."""
        found = {}
        for name, source in zip(_names(sources), sources, strict=True):
            begin = f"{prefix}{name}:" if len(sources) > 1 else prefix
            found[name] = DataSet(source, self.config.columns, self.config.need_answer, begin)
        return found


def _listed(sources: Sources | None) -> list[Source]:
    several = sources if isinstance(sources, tuple) else () if sources is None else (sources,)
    return [source if isinstance(source, Source) else Source(path=source) for source in several]


def _names(sources: Sequence[Source]) -> list[str]:
    """The paths; a path that is there again is numbered."""
    seen: Counter[str] = Counter()
    names = []
    for source in sources:
        name = str(source.path) + (f" {source.hf_split}" if source.hf_split else "")
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return names


def _joined(parts: dict[str, tuple[DataTasks, float]]) -> Sequence[Task]:
    if len(parts) == 1:
        return next(iter(parts.values()))[0]
    return Mixture(parts)


def _find_duplicates(data_sets: Sequence[DataSet]) -> None:
    """Tell each data set which of its ids others had before. Where no row has an id of its own, none can be twice."""
    from relax_envs.data.ids import Duplicates

    if not any(data.scan.hashes for data in data_sets):
        return
    found = Duplicates([data.scan.hashes for data in data_sets])
    for data in data_sets:
        data.others, data.duplicates = data_sets, found
