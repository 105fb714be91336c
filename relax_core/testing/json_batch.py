"""A batch written as JSON, run through one algorithm: see docs/cross-check.md and ``testing.algorithm_batch``.

Legend: T tokens of a row, M sampled tokens of a row, K numbers of each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.schema import ComponentSection
from relax_core.config.validation import show
from relax_core.errors import DataError, nearest
from relax_core.interfaces import Algorithm, Member, Row, ScoredGroup
from relax_core.plugins import activate
from relax_core.testing.algorithm_examples import POLICY, example_rows
from relax_core.testing.algorithm_update import Update, evaluate
from relax_core.types import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.testing import BatchResult

TOP = ("settings", "plugins", "step", "rows")
OWN = ("id", "group", "trajectory", "ids", "mask", "logprobs", "old_logprobs", "policy_logprobs", "ratios")
REWARDS = ("reward", "rewards")
OUTPUTS = {"entropy": "entropy", "policy_values": "values"} | {
    POLICY[name]: name for name in ("topk_logprobs", "full_logprobs")
}
"""Keys of a row that stand for what a trainer computes besides log-probs: the output's name."""
WIDE = ("topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs", "policy_topk_logprobs", "policy_full_logprobs")


def run(name: str, batch_file: Path | str | Mapping[str, Any], plugins: Iterable[str] = ()) -> BatchResult:
    """See ``relax_core.testing.algorithm_batch``."""
    where, raw = _read(batch_file)
    listed = dict.fromkeys([*plugins, *_listed(where, raw.get("plugins", []))])
    stack = activate(listed)
    stack.load("algorithms", name)
    settings = raw.get("settings", {})
    if not isinstance(settings, Mapping) or "id" in settings:
        raise DataError(f"{where}: settings: found {show(settings)}; give the algorithm's settings by name, without id")
    section = ComponentSection(id=name, **settings)
    algorithm: Algorithm = stack.build("algorithms", section, where=f"{where}: settings")
    step = raw.get("step", 0)
    if not _is_whole(step) or step < 0:
        raise DataError(f"{where}: step: found {show(step)}; it is a whole number from 0 on")
    written = raw.get("rows")
    if not isinstance(written, list) or not written:
        raise DataError(f"{where}: rows: found {show(written)}; give a list of one row or more")
    rows = [_Reader(f"{where}: row {i}", row, algorithm, name) for i, row in enumerate(written)]
    return _result(algorithm, rows, step)


def _read(batch_file: Path | str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """What errors call the batch, and its data."""
    if isinstance(batch_file, Mapping):
        where, raw = "batch", dict(batch_file)
    else:
        where = str(batch_file)
        try:
            raw = json.loads(Path(batch_file).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{where}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{where}: is not JSON: {error}") from error
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: found {show(raw)}; a batch is an object with {', '.join(TOP)}")
    for key in raw:
        if key not in TOP:
            raise DataError(f"{where}: unknown key {key!r}{nearest(key, TOP) or '; known are ' + ', '.join(TOP)}")
    return where, raw


def _listed(where: str, plugins: Any) -> list[str]:
    if not isinstance(plugins, list) or not all(isinstance(name, str) for name in plugins):
        raise DataError(f"{where}: plugins: found {show(plugins)}; give a list of names, as in a run file")
    return plugins


# --- one row ----------------------------------------------------------------------------------------------------------


class _Reader:
    """A row of the file: ``columns`` as an algorithm and a loss see them. Raises DataError for what is malformed."""

    def __init__(self, where: str, raw: Any, algorithm: Algorithm, name: str) -> None:
        if not isinstance(raw, Mapping):
            raise DataError(f"{where}: found {show(raw)}; a row is an object")
        self.where, self.raw, self.name = where, raw, name
        known = [*OWN, *REWARDS, *OUTPUTS, *WIDE, "values", *sorted(algorithm.needs)]
        for key in raw:
            if key not in known:
                raise DataError(
                    f"{where}: unknown key {key!r}{nearest(key, known) or '; known are ' + ', '.join(known)}"
                )
        self.group = self._label("group")
        self.trajectory = self._label("trajectory") if "trajectory" in raw else None
        self.rewards = self._rewards()
        self.columns = self._sampled()
        self._policies()
        for column in sorted(algorithm.needs - {"old_logprobs"}):
            self.columns[column] = self._wide(column) if column in WIDE else self._numbers(column)
        for key, output in OUTPUTS.items():
            if output in algorithm.outputs:
                self.columns[POLICY[output]] = self._output(key)

    def _label(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str) and not _is_whole(value):
            raise self._wrong(key, value, "text or a whole number")
        return str(value)

    def _rewards(self) -> Mapping[str, float | None]:
        """By name; the total under the name ``reward`` where single ones are not given."""
        rewards = self.raw.get("rewards", {})
        if not isinstance(rewards, Mapping):
            raise self._wrong("rewards", rewards, "an object of numbers by name")
        parts = {str(key): self._reward(f"rewards.{key}", value) for key, value in rewards.items()}
        self.reward = self._reward("reward", self._required("reward"))
        return parts or {"reward": self.reward}

    def _reward(self, key: str, value: Any) -> float | None:
        if value is not None and (not _is_number(value) or not math.isfinite(value)):
            raise self._wrong(key, value, "a finite number, or null where it abstains")
        return None if value is None else float(value)

    def _sampled(self) -> dict[str, Any]:
        import numpy as np

        ids = self._required("ids")
        if not isinstance(ids, list) or not ids or not all(_is_whole(i) and 0 <= i < 2**31 for i in ids):
            raise self._wrong("ids", ids, "a list of token ids, whole numbers from 0 on, and at least one")
        self.length = len(ids)
        mask = self.raw.get("mask", [1] * len(ids))
        if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
            raise self._wrong("mask", mask, f"a list of {len(ids)} numbers, 1 at sampled tokens and 0 at others")
        self.mask: NDArray[np.bool_] = np.array(mask, np.bool_)
        return {"tokens": np.array(ids, np.int32), "mask": self.mask.astype(np.int8)}

    def _policies(self) -> None:
        """Log-probs of the engine, of the policy at the start of the step, and of the one being trained."""
        import numpy as np

        columns = self.columns
        columns["logprobs"] = self._numbers("logprobs")
        columns["old_logprobs"] = columns["logprobs"]
        if "old_logprobs" in self.raw:
            columns["old_logprobs"] = self._numbers("old_logprobs")
        columns["policy_logprobs"] = columns["old_logprobs"]
        if "ratios" in self.raw:
            if "policy_logprobs" in self.raw:
                raise DataError(f"{self.where}: gives both policy_logprobs and ratios; leave one of them out")
            ratios = self._numbers("ratios")
            if (ratios[self.mask] <= 0).any():
                raise self._wrong("ratios", min(ratios[self.mask].tolist()), "numbers above 0: pi / pi_old")
            with np.errstate(all="ignore"):
                columns["policy_logprobs"] = (columns["old_logprobs"] + np.log(ratios)).astype(np.float32)
        elif "policy_logprobs" in self.raw:
            columns["policy_logprobs"] = self._numbers("policy_logprobs")

    def _output(self, key: str) -> NDArray[np.float32]:
        """What the trainer would compute. The critic's values may be those that it gave before the step."""
        if key == "policy_values" and key not in self.raw:
            return self._numbers("values")
        return self._wide(key) if key in WIDE else self._numbers(key)

    def _numbers(self, key: str) -> NDArray[np.float32]:
        """A list of T numbers; null and NaN may stand where the mask is 0."""
        import numpy as np

        value = self._required(key)
        if not isinstance(value, list) or len(value) != self.length:
            raise self._wrong(key, value, f"a list of {self.length} numbers, one for each of ids")
        if not all(number is None or _is_number(number) for number in value):
            raise self._wrong(key, next(n for n in value if n is not None and not _is_number(n)), "numbers")
        found = np.array([math.nan if number is None else number for number in value], np.float64)
        if not np.isfinite(found[self.mask]).all():
            place = int(np.flatnonzero(self.mask & ~np.isfinite(found))[0])
            raise self._wrong(f"{key}[{place}]", value[place], "a finite number, since this token was sampled")
        return found.astype(np.float32)

    def _wide(self, key: str) -> NDArray[Any]:
        """A list of M or of T lists, of K numbers each."""
        import numpy as np

        value, sampled = self._required(key), int(self.mask.sum())
        if not isinstance(value, list) or len(value) not in (sampled, self.length):
            raise self._wrong(key, value, f"a list of {sampled} lists, one for each sampled token")
        lines = value if len(value) == sampled else [line for line, m in zip(value, self.mask, strict=True) if m]
        if not all(isinstance(line, list) and line and len(line) == len(lines[0]) for line in lines):
            raise self._wrong(key, value, "lists of equally many numbers")
        is_right = _is_whole if key == "topk_ids" else _is_number
        if not all(is_right(number) and math.isfinite(number) for line in lines for number in line):
            raise self._wrong(
                key, value, "token ids" if key == "topk_ids" else "finite numbers (-1e30 for a banned token)"
            )
        return np.array(lines, np.int32 if key == "topk_ids" else np.float32)

    def _required(self, key: str) -> Any:
        if key not in self.raw:
            raise DataError(f"{self.where}: {key!r} is missing; {self.name!r} with these settings needs it")
        return self.raw[key]

    def _wrong(self, key: str, value: Any, allowed: str) -> DataError:
        return DataError(f"{self.where}: {key}: found {show(value)}; allowed: {allowed}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- all rows ---------------------------------------------------------------------------------------------------------


def _groups(rows: Sequence[_Reader]) -> tuple[list[ScoredGroup], list[str]]:
    """The scored groups, and of each row of the file its id in them: ``<group>/<member>/<sample>``."""
    members: dict[str, dict[str, list[_Reader]]] = {}
    ids: list[str] = []
    places: dict[tuple[str, str], int] = {}
    for i, row in enumerate(rows):
        # text begins with a colon, so that no given name is that of a row without one
        trajectory = f"row {i}" if row.trajectory is None else f":{row.trajectory}"
        of_group = members.setdefault(row.group, {})
        whole = of_group.setdefault(trajectory, [])
        if whole and (whole[0].reward, whole[0].rewards) != (row.reward, row.rewards):
            raise DataError(
                f"{row.where}: its reward differs from that of an earlier row of trajectory {row.trajectory!r} of "
                f"group {row.group!r}; rows of one trajectory have one reward"
            )
        member = places.setdefault((row.group, trajectory), len(of_group) - 1)
        ids.append(f"{row.group}/{member}/{len(whole)}")
        whole.append(row)
    named = dict(zip(map(id, rows), ids, strict=True))
    groups = [
        ScoredGroup(
            group,
            Task(group, ()),
            [
                Member(whole[0].reward, whole[0].rewards, [Row(named[id(r)], group, r.columns) for r in whole])
                for whole in of_group.values()
            ],
        )
        for group, of_group in members.items()
    ]
    return groups, ids


def _result(algorithm: Algorithm, rows: Sequence[_Reader], step: int) -> BatchResult:
    groups, ids = _groups(rows)
    credited = example_rows(algorithm, groups)
    update = evaluate(algorithm, credited, garbage=math.nan, step=step)
    order = {row.id: row for row in credited}
    ordered = [order[id] for id in ids]
    gradients = {output: _by_row(update, output, credited) for output in update.gradients}
    by_output = {output: [found[id] for id in ids] for output, found in gradients.items()}
    return {
        "ids": [row.raw.get("id", i) for i, row in enumerate(rows)],
        "advantages": [row.columns["advantages"].tolist() for row in ordered],
        "weight": [float(row.columns["weight"]) for row in ordered],
        "units": [float(row.columns["units"]) for row in ordered],
        "loss": update.loss,
        "gradient": by_output["logprobs"],
        "gradients": by_output,
        "metrics": {name: total / count if count else None for name, (total, count) in update.metrics.items()},
    }


def _by_row(update: Update, output: str, rows: Sequence[Row]) -> dict[str, list[Any]]:
    """By row id the gradient of an output at each of its T tokens; 0 before the first sampled one."""
    import numpy as np

    flat, start = update.gradients[output], 0
    found: dict[str, list[Any]] = {}
    for row in rows:
        mask = row.columns["mask"]
        values = np.zeros((len(mask), *flat.shape[1:]), np.float32)
        if row.columns["weight"]:
            first = int(mask.argmax())
            values[first:] = flat[start : start + len(mask) - first]
            start += len(mask) - first
        found[row.id] = (values + 0.0).tolist()
    return found
