"""What ``relax grade`` prints: tables for people, or one JSON document."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from relax_core.grade import BadRow, Graded

CLASSES = ("0", "1", "other", "abstain")
"""What a reward can be in the confusion table; ``other``: any other number."""

SHOWN = 60
"""Characters of a gold or a response that are shown."""


def to_json(path: Path, found: Sequence[Graded | BadRow]) -> str:
    """``rows``: every line in order; ``graders``: counts, mean and times of each; ``confusion``: expected -> got."""
    document = {
        "file": str(path),
        "rows": [_row(one) for one in found],
        "graders": {name: summary(rows) for name, rows in _by_grader(found).items()},
        "confusion": {name: confusion(rows) for name, rows in _by_grader(found).items() if _judged(rows)},
        "disagreements": sum(one.agrees is False for one in graded(found)),
        "bad_rows": len(found) - len(graded(found)),
    }
    return json.dumps(document, indent=1)


def to_text(path: Path, found: Sequence[Graded | BadRow]) -> str:
    """A table of graders, for each a confusion table, the rows that disagree, and the bad ones."""
    from rich.console import Console

    text = io.StringIO()
    width = None if sys.stdout.isatty() else 160
    console = Console(file=text, width=width, markup=False, highlight=False, force_terminal=sys.stdout.isatty())
    by_grader = _by_grader(found)
    if by_grader:
        console.print(_graders_table(by_grader))
    for name, rows in by_grader.items():
        if _judged(rows):
            console.print()
            console.print(_confusion_table(name, rows))
    _print_rows(console, path, found)
    console.print()
    console.print(f"{path}: {_in_words(found)}", soft_wrap=True)
    return text.getvalue().rstrip("\n")


def graded(found: Sequence[Graded | BadRow]) -> list[Graded]:
    """Those that could be graded."""
    from relax_core.grade import Graded

    return [one for one in found if isinstance(one, Graded)]


def summary(rows: Sequence[Graded]) -> dict[str, Any]:
    """Counts, the mean of the rewards that are no abstentions, and times in seconds."""
    values = [one.reward for one in rows if one.reward is not None]
    times = sorted(one.seconds for one in rows)
    return {
        "rows": len(rows),
        "mean": math.fsum(values) / len(values) if values else None,
        "abstained": sum(one.reward is None and one.error is None for one in rows),
        "failed": sum(one.error is not None for one in rows),
        "agree": sum(one.agrees is True for one in rows),
        "disagree": sum(one.agrees is False for one in rows),
        "seconds_p50": _quantile(times, 0.5),
        "seconds_p99": _quantile(times, 0.99),
    }


def confusion(rows: Sequence[Graded]) -> dict[str, dict[str, int]]:
    """How many rows should be one thing and came out as another; a failed grader abstains."""
    table = {expected: dict.fromkeys(CLASSES, 0) for expected in CLASSES}
    for one in _judged(rows):
        table[_class(one.row.expected)][_class(one.reward)] += 1
    return table


# --- pieces -----------------------------------------------------------------------------------------------------------


def _row(one: Graded | BadRow) -> dict[str, Any]:
    from relax_core.grade import BadRow

    if isinstance(one, BadRow):
        return {"line": one.line, "grader": one.grader or None, "reward": None, "error": one.reason, "bad": True}
    judged = {"expected": one.row.expected, "agrees": one.agrees} if one.row.judged else {}
    plain = {"line": one.row.line, "grader": one.row.grader, "reward": one.reward, **judged}
    return {**plain, "error": one.error, "seconds": round(one.seconds, 6)}


def _by_grader(found: Sequence[Graded | BadRow]) -> dict[str, list[Graded]]:
    by_grader: dict[str, list[Graded]] = {}
    for one in graded(found):
        by_grader.setdefault(one.row.grader, []).append(one)
    return by_grader


def _judged(rows: Sequence[Graded]) -> list[Graded]:
    return [one for one in rows if one.row.judged]


def _class(reward: float | None) -> str:
    return "abstain" if reward is None else {0.0: "0", 1.0: "1"}.get(reward, "other")


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that so large a share does not exceed."""
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 6) if ordered else None


def _graders_table(by_grader: Mapping[str, Sequence[Graded]]) -> Table:
    table = _table("grader", "rows", "mean", "abstained", "failed", "agree", "disagree", "p50 ms", "p99 ms")
    for name, rows in by_grader.items():
        s = summary(rows)
        times = [f"{1000 * s[key]:.2f}" for key in ("seconds_p50", "seconds_p99")]
        mean = "-" if s["mean"] is None else f"{s['mean']:.4g}"
        counts = [str(s[key]) for key in ("abstained", "failed", "agree", "disagree")]
        table.add_row(name, str(s["rows"]), mean, *counts, *times)
    return table


def _confusion_table(name: str, rows: Sequence[Graded]) -> Table:
    table = _table(f"{name}: expected", *(f"got {kind}" for kind in CLASSES))
    for expected, got in confusion(rows).items():
        if any(got.values()):
            table.add_row(expected, *(str(count) if count else "." for count in got.values()))
    return table


def _print_rows(console: Console, path: Path, found: Sequence[Graded | BadRow]) -> None:
    from relax_core.grade import Graded

    wrong = [one for one in graded(found) if one.agrees is False]
    failed = [one for one in graded(found) if one.error is not None and one.agrees is not False]
    if wrong or failed:
        console.print()
        table = _table("line", "grader", "expected", "got", "gold", "response", "why it abstained")
        for one in (*wrong, *failed):
            row = one.row
            expected = "-" if not row.judged else _value(row.expected)
            gold, response = _short(row.trajectory.task.answer), _short(row.trajectory.last_reply)
            table.add_row(str(row.line), row.grader, expected, _value(one.reward), gold, response, one.error or "")
        console.print(table)
    for bad in found:
        if not isinstance(bad, Graded):
            console.print(f"{path}:{bad.line}: {bad.reason}", soft_wrap=True)


def _in_words(found: Sequence[Graded | BadRow]) -> str:
    rows = graded(found)
    parts = [f"{len(rows)} rows graded"]
    if judged := _judged(rows):
        wrong = sum(one.agrees is False for one in judged)
        parts.append(f"{len(judged) - wrong} agree with their reward, {wrong} do not")
    if bad := len(found) - len(rows):
        parts.append(f"{bad} cannot be used")
    return ", ".join(parts)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", style="bold" if i == 0 else None)
    return table


def _value(reward: float | None) -> str:
    return "abstain" if reward is None else f"{reward:g}"


def _short(value: Any) -> str:
    """One line, without control characters; of a long one the beginning and the end."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2 - 2]} ... {text[-SHOWN // 2 + 3 :]}"
