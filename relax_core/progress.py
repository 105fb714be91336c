"""What a run shows while it works: a live bar on a terminal, one line a step elsewhere, and the results at its end."""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

WINDOW = 20
"""Steps over which the time to the end is estimated."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What is shown of a step. ``environments``: mean reward or accuracy by environment name."""

    step: int
    reward: float | None = None
    lag: int | None = None
    tokens_per_second: float | None = None
    environments: Mapping[str, float | None] = field(default_factory=dict)

    def words(self) -> list[str]:
        """``reward 0.531``, ``lag 0``, ... for what is known."""
        found = []
        if self.reward is not None:
            found.append(f"reward {self.reward:.3f}")
        if self.lag is not None:
            found.append(f"lag {self.lag}")
        if self.tokens_per_second is not None:
            found.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return found

    def environment_words(self) -> str:
        return "  ".join(f"{name} {'-' if v is None else f'{v:.2f}'}" for name, v in self.environments.items())


class Progress:
    """``with Progress(steps, done) as progress: progress.step(view)``; ``done`` steps were taken before a resume."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None, title: str = "train") -> None:
        from rich.console import Console

        self.console = console or Console()
        self.total, self.title = total, title
        self.view = StepView(done)
        self._times: deque[tuple[float, int]] = deque([(time.monotonic(), done)], maxlen=WINDOW)
        self._started = time.monotonic()
        self._live: Live | None = None
        self._activity = ""

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, view: StepView) -> None:
        """Show a finished step."""
        self.view = view
        self._times.append((time.monotonic(), view.step))
        if self._live is None:
            words = [f"step {view.step}/{self.total}", *view.words(), f"ETA {self.eta()}", view.environment_words()]
            self._print("  ".join(word for word in words if word))

    def activity(self, text: str) -> None:
        """Say what takes time now beside training, such as an evaluation; the empty string ends it."""
        self._activity = text

    def note(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        self._print(text)

    def eta(self) -> str:
        """The time to the end at the pace of the last steps, as h:mm:ss, or ``-``."""
        (first, start), (last, now) = self._times[0], self._times[-1]
        if now <= start:
            return "-"
        return clock((last - first) / (now - start) * max(0, self.total - now))

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> Any:
        """The bar, and below it a line for the environments."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 2), expand=False)
        words = [*self.view.words(), f"ETA {self.eta()}", clock(time.monotonic() - self._started)]
        bar.add_row(
            Text(self.title, "bold"),
            ProgressBar(self.total, self.view.step, width=24),
            Text(f"{self.view.step}/{self.total}"),
            *(Text(word) for word in words),
        )
        below = "  ".join(text for text in (self.view.environment_words(), self._activity) if text)
        return Group(bar, Text(f"{' ' * len(self.title)}  {below}", "dim")) if below else bar


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def results_table(results: Mapping[str, Mapping[str, float]], title: str = "held-out results") -> Table:
    """One line an evaluation: accuracy with its standard error, items, and what else was measured.

    Counts that are as usual in all of them (one play an item, none failed or unjudged), and what was noted of plays and
    is 0, are left out.
    """
    from rich.table import Table

    usual = {"n": 1, "failed": 0, "unjudged": 0}
    keys = ["accuracy", "stderr", "items"]
    for found in results.values():
        usual |= {key: 0 for key in found if key.startswith("play/")}
        keys += [key for key, value in found.items() if key not in keys and value != usual.get(key)]
    headings = {"stderr": "standard error", "n": "plays an item", "length": "tokens a play"}
    table = Table(title=title)
    table.add_column("evaluation")
    for key in keys:
        table.add_column(headings.get(key, key), justify="right")
    for name, found in results.items():
        table.add_row(name, *(_cell(key, found.get(key)) for key in keys))
    return table


def show_results(console: Console, results: Mapping[str, Mapping[str, float]], directory: Path) -> None:
    """The results, if there are any, and how to see the curves."""
    if results:
        console.print(results_table(results))
    for line in curve_lines(directory):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def curve_lines(directory: Path) -> list[str]:
    """Where the curves and numbers of a run are."""
    quoted = shlex.quote(str(directory))
    return [
        f"curves:   tensorboard --logdir {quoted}",
        f"numbers:  {directory / 'metrics.jsonl'} (one line a step), {directory / 'summary.json'}",
        f"plays:    {directory / 'trajectories'}",
    ]


def _cell(key: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if key in ("items", "n", "failed", "unjudged") else f"{value:.3f}"
