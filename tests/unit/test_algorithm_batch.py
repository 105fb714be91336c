"""A batch given as JSON: the numbers that come out, what may be left out, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import ConfigError, DataError, PluginError
from relax_core.testing import BatchResult, algorithm_batch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cross-check.md"
HALF = 0.5 / (math.sqrt(0.5) + 1e-6)
"""The advantage of the better one of two rewards 1 and 0."""


def row(reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    return {"group": "a", "ids": [5, 8, 1], "logprobs": [-1.0, -2.0, -0.5], "reward": reward, **changes}


def run(*rows: dict[str, Any], name: str = "grpo", **top: Any) -> BatchResult:
    return algorithm_batch(name, {"rows": list(rows), **top})


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = {
        language: re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        for language in ("json", "python", "text")
    }
    (batch,) = found["json"]
    (tmp_path / "batch.json").write_text(batch)
    monkeypatch.chdir(tmp_path)
    assert len(found["python"]) == len(found["text"]) == 2
    for code, shown in zip(found["python"], found["text"], strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), {})
        assert printed.getvalue() == shown


def test_the_page_names_every_key_of_the_result() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for key in BatchResult.__annotations__:
        assert f"`{key}`" in text.partition("## The result")[2], key


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Ratios 1.5 (clipped at 1.2), 0.5 and 1 at A; 0.5 (clipped at 0.8) at -A: four of five tokens count."""
    found = run(
        row(1.0, ratios=[1.5, 0.5, 1.0]),
        row(0.0, ids=[7, 7], mask=[0, 1], logprobs=[None, -1.0], ratios=[None, 0.5]),
        row(None),
        settings={"aggregation": "sequence-mean"},
    )
    assert found["advantages"][0] == pytest.approx([HALF] * 3)
    assert found["advantages"][1:] == [[0, pytest.approx(-HALF)], [0, 0, 0]]
    assert found["weight"] == pytest.approx([1 / 3, 1, 0]) and found["units"] == [1, 1, 0]
    assert found["loss"] == pytest.approx((-(1.2 + 0.5 + 1) / 3 + 0.8) * HALF / 2)
    assert found["gradient"][0] == pytest.approx([0, -0.5 * HALF / 6, -HALF / 6])
    assert found["gradient"][1:] == [[0, 0], [0, 0, 0]]
    assert found["gradients"] == {"logprobs": found["gradient"]}
    assert found["metrics"]["clipped"] == pytest.approx(2 / 4)
    assert found["metrics"]["ratio"] == pytest.approx(3.5 / 4)
    assert found["ids"] == [0, 1, 2]
    assert json.loads(json.dumps(found)) == found


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"rows": [row(1.0, id="one"), row(0.0)]}))
    assert algorithm_batch("grpo", path) == algorithm_batch("grpo", str(path)) == run(row(1.0, id="one"), row(0.0))
    assert algorithm_batch("grpo", path)["ids"] == ["one", 1]


def test_what_may_be_left_out() -> None:
    given = run(
        row(1.0, mask=[1, 1, 1], old_logprobs=[-1.0, -2.0, -0.5], policy_logprobs=[-1.0, -2.0, -0.5], trajectory=1),
        row(0.0, mask=[True, True, True], ratios=[1, 1, 1], rewards={"reward": 0.0}, trajectory=2),
        step=0,
        plugins=[],
        settings={},
    )
    assert given == run(row(1.0), row(0.0))


def test_ratios_and_policy_logprobs_say_the_same() -> None:
    old = [-1.5, -1.0, -2.0]
    policy = [o + math.log(r) for o, r in zip(old, (1.1, 0.9, 3.0), strict=True)]
    one = run(row(1.0, old_logprobs=old, ratios=[1.1, 0.9, 3.0]), row(0.0))
    other = run(row(1.0, old_logprobs=old, policy_logprobs=policy), row(0.0))
    assert one["loss"] == pytest.approx(other["loss"]) and one["metrics"]["ratio"] == pytest.approx((5 + 3) / 6)
    assert one["gradient"][0] == pytest.approx(other["gradient"][0])


def test_masked_values_do_not_matter() -> None:
    plain = run(row(1.0, mask=[0, 1, 0], ratios=[1, 1.1, 1]), row(0.0))
    for garbage in (None, math.nan, math.inf, 1e9):
        lists = {"logprobs": [garbage, -2.0, garbage], "ratios": [garbage, 1.1, garbage]}
        assert run(row(1.0, mask=[0, 1, 0], **lists), row(0.0)) == plain


def test_rows_of_one_trajectory_share_its_weight_wherever_they_stand() -> None:
    found = run(
        row(1.0, trajectory="x"),
        row(0.0, trajectory="y"),
        row(1.0, trajectory="x", ids=[1], logprobs=[-1.0]),
        settings={"aggregation": "sequence-mean"},
    )
    assert found["weight"] == pytest.approx([1 / 4, 1 / 3, 1 / 4]) and found["units"] == [1, 1, 0]
    assert [len(gradient) for gradient in found["gradient"]] == [3, 3, 1]
    assert found["gradient"][2] == pytest.approx([-HALF / 4 / 2])
    assert found["gradient"][1] == pytest.approx([HALF / 3 / 2] * 3)


def test_groups_are_compared_within_themselves() -> None:
    found = run(row(1.0, group=1), row(5.0, group=2), row(0.0, group=1), row(5.0, group=2))
    assert [advantages[0] for advantages in found["advantages"]] == pytest.approx([HALF, 0, -HALF, 0])


def test_the_gradient_is_that_of_the_loss() -> None:
    """By central differences of single log-probs, away from the clip's corners."""
    policy = [[-1.1, -1.7, -0.6], [-0.9, -2.2, -0.4]]

    def loss(values: list[list[float]]) -> BatchResult:
        return run(*(row(r, policy_logprobs=v) for r, v in zip((1.0, 0.0), values, strict=True)))

    gradient = loss(policy)["gradient"]
    for i in range(2):
        for t in range(3):
            up, down = ([[*v] for v in policy] for _ in range(2))
            up[i][t] += 0.01
            down[i][t] -= 0.01
            assert (loss(up)["loss"] - loss(down)["loss"]) / 0.02 == pytest.approx(gradient[i][t], abs=1e-3)


def test_an_entropy_bonus_follows_the_step() -> None:
    """Coefficient 0.2 at step 0, 0.1 from step 10 on; its gradient is -coefficient / 6 tokens."""
    settings = {"entropy": {"start": 0.2, "end": 0.1, "steps": 10}}
    rows = [row(1.0, entropy=[1.0, 2.0, 3.0]), row(0.0, entropy=[0.0, 0.0, 0.0])]
    for step, coefficient in ((0, 0.2), (5, 0.15), (10, 0.1)):
        found = run(*rows, settings=settings, step=step)
        assert found["gradients"]["entropy"][0] == pytest.approx([-coefficient / 6] * 3)
        assert found["loss"] == pytest.approx(-coefficient)
    assert found["metrics"]["entropy"] == 1.0


def test_kl_in_the_loss_needs_a_reference() -> None:
    """k2 at d = 0.5: 0.125; its gradient is 0.1 x 0.5 / 6 beside the policy's."""
    settings = {"kl": {"coefficient": 0.1, "estimator": "k2"}}
    rows = [row(1.0, ref_logprobs=[-1.5, -2.5, -1.0]), row(1.0, ref_logprobs=[-1.5, -2.5, -1.0])]
    found = run(*rows, settings=settings)
    assert found["loss"] == pytest.approx(0.1 * 0.125)
    assert found["gradient"] == [pytest.approx([0.1 * 0.5 / 6] * 3)] * 2
    with pytest.raises(DataError, match="batch: row 0: 'ref_logprobs' is missing; 'grpo' with these settings needs it"):
        run(row(), settings=settings)


def test_nothing_to_train() -> None:
    found = run(row(None), row(None))
    assert found["loss"] == 0 and found["gradient"] == [[0, 0, 0]] * 2 and found["metrics"]["clipped"] is None
    empty = run(row(1.0, mask=[0, 0, 0]), row(0.0))
    assert empty["weight"] == [0, 1] and empty["gradient"][0] == [0, 0, 0]


def test_numbers_for_each_candidate() -> None:
    """Lists of K numbers, one for each sampled token, or one for each token."""
    student, teacher = [[-0.7, -1.5], [-0.4, -2.0]], [[-0.5, -1.8], [-0.5, -1.8]]
    shared = {"mask": [0, 1, 1], "policy_topk_logprobs": student, "teacher_topk_logprobs": teacher}
    settings = {"over": "topk"}
    found = run(row(1.0, **shared, topk_ids=[[3, 4], [3, 9]]), name="opd", settings=settings)
    assert found == run(row(1.0, **shared, topk_ids=[[0, 0], [3, 4], [3, 9]]), name="opd", settings=settings)
    grid = found["gradients"]["topk_logprobs"][0]
    assert [len(line) for line in grid] == [2, 2, 2] and grid[0] == [0, 0] and any(grid[1])


def test_a_critic() -> None:
    """Values that are given once are both those before the step and those being trained."""
    once = run(row(1.0, values=[0.1, 0.2, 0.3]), row(0.0, values=[0.3, 0.2, 0.1]), name="ppo")
    both = [{"values": v, "policy_values": v} for v in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert once == run(row(1.0, **both[0]), row(0.0, **both[1]), name="ppo")
    assert all(gradient != 0 for row_ in once["gradients"]["values"] for gradient in row_)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-1.0]}, "logprobs: found a list of 1; allowed: a list of 3 numbers, one for each of ids"),
        ({"logprobs": [-1.0, "x", 0]}, "logprobs: found 'x'; allowed: numbers"),
        ({"logprobs": [-1.0, None, 0]}, r"logprobs\[1\]: found null; allowed: a finite number"),
        ({"mask": [1, 2, 0]}, "mask: found a list of 3; allowed: a list of 3 numbers, 1 at sampled tokens"),
        ({"mask": [1, 0]}, "mask: found a list of 2"),
        ({"ids": []}, "ids: found a list of 0; allowed: a list of token ids"),
        ({"ids": [1, 2, -3]}, "ids: found"),
        ({"ids": "abc"}, "ids: found 'abc'"),
        ({"group": None}, "group: found null; allowed: text or a whole number"),
        ({"reward": "1"}, "reward: found '1'; allowed: a finite number, or null"),
        ({"reward": math.nan}, "reward: found NaN"),
        ({"reward": True}, "reward: found true"),
        ({"rewards": [1.0]}, "rewards: found a list of 1; allowed: an object"),
        ({"rewards": {"x": "y"}}, "rewards.x: found 'y'"),
        ({"ratios": [1.0, 0.0, 1.0]}, "ratios: found 0.0; allowed: numbers above 0"),
        ({"ratios": [1, 1, 1], "policy_logprobs": [0, 0, 0]}, "gives both policy_logprobs and ratios; leave one"),
        ({"old_logprob": [0, 0, 0]}, "unknown key 'old_logprob'; did you mean 'old_logprobs'?"),
        ({"trajectory": [1]}, "trajectory: found a list of 1"),
        ({"trajectory": 1, "reward": 0.0}, "its reward differs from that of an earlier row of trajectory '1'"),
    ],
)
def test_a_malformed_row(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^batch: row 1: {message}"):
        run(row(1.0, trajectory=1), row(0.5) | changes)


@pytest.mark.parametrize("key", ["group", "ids", "logprobs", "reward"])
def test_a_missing_key(key: str) -> None:
    with pytest.raises(DataError, match=f"row 0: '{key}' is missing"):
        run({name: value for name, value in row().items() if name != key})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"row": []}, "batch: unknown key 'row'; did you mean 'rows'?"),
        ({"rows": []}, "batch: rows: found a list of 0; give a list of one row or more"),
        ({"rows": [3]}, "batch: row 0: found 3; a row is an object"),
        ({"rows": [row()], "step": -1}, "batch: step: found -1"),
        ({"rows": [row()], "plugins": "x"}, "batch: plugins: found 'x'"),
        ({"rows": [row()], "settings": {"id": "grpo"}}, "batch: settings: found a mapping of id"),
    ],
)
def test_a_malformed_batch(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        algorithm_batch("grpo", batch)


def test_wide_lists_that_are_none() -> None:
    shared: dict[str, Any] = {"policy_topk_logprobs": [[-1.0, -2.0]] * 3, "teacher_topk_logprobs": [[-1.0, -2.0]] * 3}
    for ids, message in (
        ([[1, 2]], "topk_ids: found a list of 1; allowed: a list of 3 lists"),
        ([[1, 2], [1], [1, 2]], "lists of equally many numbers"),
        ([[1, 2], [1, 0.5], [1, 2]], "token ids"),
    ):
        with pytest.raises(DataError, match=message):
            run(row(**shared, topk_ids=ids), name="opd", settings={"over": "topk"})


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: cannot be read: No such file"):
        algorithm_batch("grpo", tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"rows": [')
    with pytest.raises(DataError, match=r"half\.json: is not JSON"):
        algorithm_batch("grpo", tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="found a list of 0; a batch is an object with settings, plugins, step, rows"):
        algorithm_batch("grpo", tmp_path / "list.json")
    with pytest.raises(PluginError, match="no algorithm has the id 'grop'; did you mean 'grpo'"):
        run(row(), name="grop")
    with pytest.raises(ConfigError, match=r"batch: settings\.clip_low: found -1"):
        run(row(), settings={"clip_low": -1.0})
    with pytest.raises(PluginError, match="'nowhere' is not installed"):
        algorithm_batch("grpo", {"rows": [row()]}, plugins=["nowhere"])


def test_importing_the_package_is_light() -> None:
    code = "import sys, relax_core.testing; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
