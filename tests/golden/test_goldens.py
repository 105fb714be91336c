"""What every algorithm makes of fixed rows, compared with tests/golden/<id>.txt, which are reviewed like code.

After a change that is meant, write them anew: ``python tests/golden/test_goldens.py``
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Algorithm, Row
from relax_core.testing.algorithm_checks import Update, evaluate, example_rows

FOLDER = Path(__file__).parent
TOLERANCE = 2e-6  # the files hold six decimals

GOLDENS: dict[str, tuple[type[Algorithm], list[dict[str, Any]]]] = {
    "grpo": (
        Grpo,
        [
            {"aggregation": "token-mean"},
            {"aggregation": "sequence-mean"},
            {"aggregation": "sequence-sum"},
            {"aggregation": "constant", "constant": 16},
            {"aggregation": "prompt-mean"},
            {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.3},
            {"entropy": {"start": 0.1, "end": 0.01, "steps": 10}},
        ],
    )
}


def written(algorithm: type[Algorithm], all_settings: list[dict[str, Any]]) -> str:
    """The text of a golden file: one block for each settings."""
    blocks = []
    for settings in all_settings:
        built = algorithm(algorithm.Config.model_validate(settings))
        rows = example_rows(built)
        blocks.append("\n".join([f"# {settings}", *lines(rows, evaluate(built, rows))]))
    return "\n\n".join(blocks) + "\n"


def lines(rows: list[Row], update: Update) -> Iterator[str]:
    """The loss, the metrics, then of each trained row its share and, by token, advantages and gradients."""
    yield f"loss {update.loss:.6f}"
    for name, (total, count) in update.metrics.items():
        yield f"{name} {total:.6f} / {count:g}"
    start = 0
    for row in rows:
        columns = row.columns
        if not columns["weight"]:
            yield f"{row.id} not trained"
            continue
        first = int(columns["mask"].argmax())
        stop = start + len(columns["mask"]) - first
        yield f"{row.id} weight {columns['weight']:.6f} units {columns['units']:g}"
        yield f"  advantages {numbers(columns['advantages'][first:])}"
        for name, gradient in update.gradients.items():
            yield f"  d loss / d {name} {numbers(gradient[start:stop])}"
        start = stop


def numbers(values: Any) -> str:
    return " ".join(f"{value + 0.0:.6f}" for value in values.tolist())


def parsed(text: str) -> list[str | float]:
    """Words, and numbers as numbers: the last digit may differ between machines."""

    def value(word: str) -> str | float:
        try:
            return float(word)
        except ValueError:
            return word

    return [value(word) for word in text.split()]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    found, golden = parsed(written(*GOLDENS[name])), parsed((FOLDER / f"{name}.txt").read_text())
    assert len(found) == len(golden)
    for f, g in zip(found, golden, strict=True):
        assert f == (g if isinstance(g, str) else pytest.approx(g, abs=TOLERANCE))


if __name__ == "__main__":
    for name, golden in GOLDENS.items():
        (FOLDER / f"{name}.txt").write_text(written(*golden))
