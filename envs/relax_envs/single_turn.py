"""Single-turn tasks from a JSONL data set: ask once, and score the reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import ComponentConfig, Environment
from relax_core.types import MediaPart, Task, content_hash
from relax_envs.jsonl import JsonLines
from relax_envs.lazy import LazyTasks
from relax_envs.rows import row_id, task_of
from relax_envs.split import held_out


class Split(ComponentConfig):
    eval: Annotated[float, Field(gt=0, lt=1)]
    """Share of the rows that is held out, chosen by the hash of what they say and show."""


class SingleTurn(Environment):
    """Rows such as ``{"messages": [{"role": "user", "content": "what digit ? <image>"}], "images": ["7.png"],
    "answer": "7"}``; ``{"prompt": "..."}`` stands for one user message. ``<image>``, ``<audio>`` and ``<video>`` are
    replaced by the row's media in order; paths are relative to the file. ``id`` defaults to the line's number.

    A row that cannot be used is left out and listed in ``bad_rows``; too many of them, a missing or an empty file and
    an id that occurs twice raise DataError.
    """

    class Config(ComponentConfig):
        data: Path
        """The JSONL file, one row a line."""
        eval_data: Path | None = None
        """Another one for evaluation."""
        split: Split | None = None
        """Holds a part of ``data`` out for evaluation instead."""
        max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
        """Share of a file's rows that may be bad; more is an error."""
        need_answer: bool = True
        """Whether a row without an answer is bad."""

        @model_validator(mode="after")
        def _one_eval(self) -> SingleTurn.Config:
            if self.eval_data is not None and self.split is not None:
                raise ValueError("eval_data and split are both set; keep one: each says what evaluation plays")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._loaded: list[_DataSet] | None = None

    @property
    def bad_rows(self) -> Sequence[str]:
        """``file:line: reason`` of each row left out. Reads the files when nothing did so before."""
        return [reason for data in self._data() for reason in data.bad]

    def tasks(self, split: Literal["train", "eval"]) -> Sequence[Task]:
        if split == "eval" and self.config.eval_data is None and self.config.split is None:
            raise ConfigError(f"{self.config.data}: nothing is held out for evaluation: set eval_data or split there")
        sets = self._data()
        data = sets[-1] if split == "eval" else sets[0]
        rows = data.eval if split == "eval" else data.train
        if not rows:
            raise DataError(f"{data.path}: no row for {split}: {len(data.lines)} rows, {len(data.bad)} of them bad")
        return LazyTasks(len(rows), lambda index: data.task(rows[index]), keep=False)

    def verify(self, decode: Callable[[MediaPart], object]) -> None:
        for data in self._data():
            data.verify(decode)

    def _data(self) -> list[_DataSet]:
        if self._loaded is None:
            config = self.config
            fraction = config.split.eval if config.split else 0.0
            loaded = [_DataSet(config.data, "", config.max_bad_fraction, config.need_answer)]
            if config.eval_data is not None:
                loaded.append(_DataSet(config.eval_data, "eval-", config.max_bad_fraction, config.need_answer))
            seen: dict[str, str] = {}
            for data in loaded:
                data.load(fraction if data is loaded[0] else 1.0, seen)
            self._loaded = loaded
        return self._loaded


@dataclass
class _DataSet:
    """One file: which of its rows are good, and on which side of the split each stands."""

    path: Path
    prefix: str
    """Of its task ids."""
    max_bad_fraction: float
    need_answer: bool
    train: list[int] = field(default_factory=list)
    eval: list[int] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = JsonLines(self.path)

    def load(self, fraction: float, seen: dict[str, str]) -> None:
        """Look at every row once. ``seen`` maps ids to where they were met; ``fraction`` of the rows is held out."""
        for index, row in enumerate(self.lines.rows()):
            try:
                if isinstance(row, ValueError):
                    raise row
                task = self._make(row, index)
                held = fraction == 1 or (fraction > 0 and held_out(content_hash(task), fraction))
            except (ValueError, OSError) as error:
                self.bad.append(f"{self._where(index)}: {error}")
                continue
            if other := seen.get(task.id):
                raise DataError(f"{self._where(index)}: id {task.id!r} was already used at {other}: make it unique")
            seen[task.id] = self._where(index)
            (self.eval if held else self.train).append(index)
        self._check()

    def task(self, index: int) -> Task:
        """The task of a row that was good when the file was indexed."""
        try:
            return self._make(self.lines[index], index)
        except (ValueError, OSError) as error:
            raise DataError(f"{self._where(index)}: {error}: the file has changed since it was indexed") from error

    def verify(self, decode: Callable[[MediaPart], object]) -> None:
        for rows in (self.train, self.eval):
            unreadable = set()
            for index in rows:
                try:
                    for message in self.task(index).messages:
                        for medium in message.media():
                            decode(medium)
                except DataError as error:
                    unreadable.add(index)
                    self.bad.append(f"{self._where(index)}: {error}")
            rows[:] = [index for index in rows if index not in unreadable]
        self._check()

    def _make(self, row: dict[str, Any], index: int) -> Task:
        id = self.prefix + row_id(row, self.lines.numbers[index])
        return task_of(row, self.path.parent, id, self.need_answer)

    def _where(self, index: int) -> str:
        return f"{self.path}:{self.lines.numbers[index]}"

    def _check(self) -> None:
        bad, total = len(self.bad), len(self.lines)
        if bad > self.max_bad_fraction * total or bad == total:
            more = f" (and {bad - 1} more)" if bad > 1 else ""
            count = f"{bad} of {total} rows are bad, max_bad_fraction allows {self.max_bad_fraction:g}"
            raise DataError(f"{self.bad[0]}{more}: {count}: mend the file or allow more")
