"""A run's directory: checkpoints, journal, trajectories, metrics and summary, cut back and written together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from relax_core import atomic
from relax_core.checkpoint import Checkpoints
from relax_core.journal import Journal
from relax_core.metrics import MetricsLog
from relax_core.summary import Summary
from relax_core.tensorboard import EventFiles
from relax_core.trajectories import TrajectoryFiles

if TYPE_CHECKING:
    from relax_core.admission import Admission
    from relax_core.media import MediaStore
    from relax_core.run import Run
    from relax_core.totals import Totals


class Storage:
    """The files of one run. One writer: the process that trains."""

    def __init__(self, run: Run, media: MediaStore, readonly: bool = False) -> None:
        config, self.directory = run.config, run.directory
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config.checkpoint.keep, readonly)
        self.journal = Journal(self.directory / "journal", config.journal.keep_steps, media.decode)
        self.trajectories = TrajectoryFiles(
            self.directory / "trajectories",
            media.modalities,
            config.trajectories.every,
            config.trajectories.media,
            media.decode,
        )
        self.metrics = MetricsLog(self.directory)
        self.curves = EventFiles(self.directory / "tensorboard")

    def cut_back(self, step: int) -> None:
        """Forget what was written after the checkpoint of ``step``: the resumed run writes it again."""
        self.checkpoints.remove_after(step)
        self.journal.cut_back(step)
        self.trajectories.cut_back(step)
        self.metrics.cut_back(step)
        self.curves.rebuild(self.metrics.read())

    def log(self, version: int, values: Mapping[str, Any], kind: Literal["train", "eval"] = "train") -> None:
        """One line of ``metrics.jsonl``, and the curves."""
        self.curves.write(self.metrics.write(version, values, kind))

    def sync(self) -> None:
        """Force what a checkpoint relies on to the disk before it is sealed."""
        self.journal.sync()
        self.metrics.sync()

    def write_summary(self, totals: Totals, admission: Admission, version: int, data: Mapping[str, Any]) -> None:
        """``summary.json`` as of a checkpoint. ``data``: what was left out of the data."""
        Summary(
            steps=version,
            evaluation=totals.evaluation,
            max_lag=totals.max_lag,
            groups=admission.counters(),
            more=totals.lengths()
            | dict(data)
            | {"dropped_tasks": list(admission.dropped_tasks), "filtered_because": dict(admission.reasons)},
            **totals.usage.state(),
        ).write(self.directory)

    def write_bad_rows(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """``bad_rows.jsonl``: every row that was left out so far, with its reason; no file when there is none."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if text:
            atomic.write_file(self.directory / "bad_rows.jsonl", text.encode(errors="replace"))

    def close(self) -> None:
        self.metrics.close()
        self.curves.close()
