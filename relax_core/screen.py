"""What a run says on the terminal, from its first note to its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from relax_core.progress import Progress, StepView, show_results
from relax_core.summary import identity

if TYPE_CHECKING:
    from rich.console import Console

    from relax_core.run import Run


class Screen:
    """``with Screen(run) as screen: ...``; ``quiet`` shows nothing (tests, benchmarks)."""

    def __init__(self, run: Run, quiet: bool = False) -> None:
        from rich.console import Console

        self.run = run
        self.console: Console = Console(quiet=quiet)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, error, trace)
            self._progress = None

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._progress is not None:
            self._progress.note(text)
        else:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, step: int) -> None:
        """Training goes on after ``step`` steps."""
        self._progress = Progress(self.run.config.steps, step, self.console, self.run.config.name).__enter__()

    def step(self, version: int, metrics: Mapping[str, Any]) -> None:
        environments = {
            section.label: metrics.get(f"environments/{section.label}/{self.run.config.rewards[0].label}")
            for section in self.run.config.environments
        }
        view = StepView(version, metrics["reward"], metrics["lag/max"], metrics["time/tokens_per_s"], environments)
        if self._progress is not None:
            self._progress.step(view)

    def activity(self, text: str) -> None:
        """What else takes time now; empty: nothing."""
        if self._progress is not None:
            self._progress.activity(text)

    def evaluation(self, version: int, results: Mapping[str, Mapping[str, float]]) -> None:
        found = "  ".join(f"{name} {values['accuracy']:.3f}" for name, values in results.items())
        self.note(f"evaluation of version {version}: {found}")

    def results(self) -> None:
        """The table of the summary, the account of all groups, and where the curves are."""
        self.__exit__(None, None, None)
        summary = json.loads((self.run.directory / "summary.json").read_text())
        self.note(
            f"{summary['steps']} steps in {summary['seconds']:.0f} s ({summary['cpu_seconds']:.0f} CPU-seconds), "
            f"at most {summary['peak_rss_mb']:.0f} MB; {identity(summary['groups'])}"
        )
        show_results(self.console, summary["evaluation"], self.run.directory)
