"""What every algorithm makes of fixed rows, compared with tests/golden/<id>.txt, which are reviewed like code.

After a change that is meant, write them anew: ``python tests/golden/test_goldens.py``
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_algorithms.testing import aggregations
from relax_core.interfaces import Algorithm, Row
from relax_core.plugins import Stack, activate
from relax_core.testing.algorithm_checks import Update, evaluate, example_rows

FOLDER = Path(__file__).parent
TOLERANCE = 2e-6  # the files hold six decimals
PLUGINS = ("algorithms-extra",)

AGGREGATIONS = aggregations(16)
OPTIONS: list[dict[str, Any]] = [
    {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.3},
    {"entropy": {"start": 0.1, "end": 0.01, "steps": 10}},
    {"whiten": True},
    {"kl": {"coefficient": 0.1}},
    {"kl": {"coefficient": 0.1, "estimator": "k2", "unbiased": True}},
    {"kl": {"coefficient": 0.1, "place": "reward"}},
    {"correction": {"kind": "truncate", "high": 1.2}},
    {"correction": {"kind": "mask", "low": 0.8, "high": 1.25}},
    {"correction": {"kind": "decoupled", "level": "sequence"}},
    {"rejection": {"by": "geometric-mean", "low": 0.98, "high": 1.1}},
    {"rejection": {"by": "product", "low": 0.5, "high": 2.0}},
    {"opsm": 0.05},
]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "grpo": [*AGGREGATIONS, *OPTIONS],
    "dr-grpo": [{"constant": 16}, {"aggregation": "token-mean"}],
    "rloo": [{}, {"clip": False}],
    "gspo": [{}, {"aggregation": "token-mean"}, {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.1}],
    "sapo": [{}, {"tau_pos": 2.0, "tau_neg": 0.5}],
    "cispo": [{}, {"clip_low": 0.2, "clip_high": 3.0}],
    "reinforce++": [{}, {"gamma": 0.9, "baseline": True}, {"kl": {"place": "reward", "coefficient": 0.2}}],
    "ppo": [{}, {"gamma": 0.9, "lam": 0.8, "whiten": False}, {"value_clip": None}, {"critic_warmup": 1}],
    "opd": [
        {},
        {"reward_weight": 0.5, "weight": 0.2},
        {"over": "topk"},
        {"over": "topk", "divergence": "jsd", "beta": 0.3},
        {"over": "full", "divergence": "forward"},
        {"over": "full", "divergence": "jsd", "reward_weight": 1.0},
    ],
    "gmpo": [{}, {"aggregation": "token-mean", "log_clip_low": 0.2, "log_clip_high": 0.1}],
    "dapo": [{}, {"clip_high": 0.1}],
}
"""The settings of each file's blocks; default: the algorithm's own defaults, and three options."""
DEFAULT: list[dict[str, Any]] = [{}, {"aggregation": "sequence-mean"}, {"entropy": OPTIONS[1]["entropy"]}]


def ids() -> list[str]:
    return list(activate(PLUGINS).components("algorithms"))


def written(stack: Stack, id: str) -> str:
    """The text of a golden file: one block for each settings."""
    algorithm: type[Algorithm] = stack.load("algorithms", id)
    blocks = []
    for settings in VARIANTS.get(id, DEFAULT):
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
    """One number a token; where a token has a line of them, all of them in a row."""
    return " ".join(f"{value + 0.0:.6f}" for value in values.ravel().tolist())


def parsed(text: str) -> list[str | float]:
    """Words, and numbers as numbers: the last digit may differ between machines."""

    def value(word: str) -> str | float:
        try:
            return float(word)
        except ValueError:
            return word

    return [value(word) for word in text.split()]


@pytest.mark.parametrize("id", ids())
def test_golden(id: str) -> None:
    found, golden = parsed(written(activate(PLUGINS), id)), parsed((FOLDER / f"{id}.txt").read_text())
    assert len(found) == len(golden)
    for f, g in zip(found, golden, strict=True):
        assert f == (g if isinstance(g, str) else pytest.approx(g, abs=TOLERANCE))


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(ids())


if __name__ == "__main__":
    for id in ids():
        (FOLDER / f"{id}.txt").write_text(written(activate(PLUGINS), id))
