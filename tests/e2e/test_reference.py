"""Runs with a reference: what it is compared with, its refreshes, and that a kill changes nothing. And one with a
teacher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.errors import ConfigError
from relax_core.plugins import installed_plugins
from relax_core.replay import main as replay
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import TEXT_RUN, accounted, in_child, metrics, run_file, summary, train

REFRESHED = {
    "steps": 8,
    "checkpoint": {"every": 3},
    "evaluation": [],
    "algorithm": {"id": "grpo", "kl": {"coefficient": 0.01}},
    "stages": [{"id": "reference", "refresh": 2}],
}
"""Checkpoints after 3, 6 and 8 steps; the one after 3 holds a reference that is neither the policy nor the first."""


def kl(directory: Path) -> list[float]:
    """The mean divergence from the reference at every step."""
    return [line["train/kl_ref"] for line in metrics(directory)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(run_file(tmp_path_factory.mktemp("undisturbed"), **REFRESHED))


def test_the_policy_starts_at_the_reference_and_is_it_again_after_each_refresh(undisturbed: Path) -> None:
    found = kl(undisturbed)
    assert all(found[step] < 1e-9 for step in (0, 2, 4, 6))
    assert all(found[step] > 1e-5 for step in (1, 3, 5, 7))


def test_replay_is_equal_to_the_last_bit(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(undisturbed, 7) == 0
    assert "kl_ref" in capsys.readouterr().out


def dies_at_call(owner: Any, name: str, count: int) -> None:
    """The ``count``-th call of ``owner.name`` kills the process when its work is done."""
    real, calls = getattr(owner, name), 0

    def lethal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(*args, **kwargs)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, lethal)


def in_a_checkpoint(count: int) -> None:
    from relax_core.torch.reference import Reference

    dies_at_call(Reference, "save", count)


def after_a_refresh(count: int) -> None:
    from relax_core.torch import reference

    dies_at_call(reference, "take_weights", count)


def in_the_forward_of_a_reference(count: int) -> None:
    from relax_core.torch.annotate import Annotator

    dies_at_call(Annotator, "_stated", 5 * count)


def killed_and_resumed(path: Path, moment: Callable[[int], None], count: int, resume: Callable[[], object]) -> Path:
    def work() -> None:
        moment(count)
        train(path)

    assert in_child(work) == -signal.SIGKILL
    assert in_child(resume) == 0
    return path.parent / "runs" / "tiny"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("moment", "count"),
    [
        (in_a_checkpoint, 2),
        pytest.param(after_a_refresh, 2, marks=pytest.mark.slow),
        pytest.param(in_the_forward_of_a_reference, 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_and_resumed_run_has_the_same_curve(
    undisturbed: Path, tmp_path: Path, moment: Callable[[int], None], count: int
) -> None:
    """Killed within the second checkpoint (it goes on from step 3), at the second refresh, and among groups."""
    path = run_file(tmp_path, **REFRESHED)
    directory = killed_and_resumed(path, moment, count, lambda: train(path))
    assert metrics(directory) == metrics(undisturbed)
    assert summary(directory)["groups"] == summary(undisturbed)["groups"]
    assert (directory / "checkpoints/step-00000008/stages/reference/weights.safetensors").is_file()


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_reference_that_is_not_restored_would_be_seen(undisturbed: Path, tmp_path: Path) -> None:
    path = run_file(tmp_path, **REFRESHED)

    def resume() -> None:
        from relax_core.torch.reference import Reference

        Reference.load = lambda self, folder: None  # type: ignore[method-assign]
        train(path)

    found, wanted = kl(killed_and_resumed(path, in_a_checkpoint, 2, resume)), kl(undisturbed)
    assert found[:3] == wanted[:3] and found[3] > 1.5 * wanted[3]


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_two_versions_behind_in_two_processes(tmp_path: Path) -> None:
    changes = {"max_staleness": 2, "order": "finished", "runtime": {"id": "local", "overlap": "process"}}
    found = summary(train(run_file(tmp_path, **(REFRESHED | changes))))
    assert found["steps"] == 8 and accounted(found["groups"]) and found["groups"]["trained"] == 32


def test_one_that_is_needed_and_not_listed_holds_the_initial_weights(tmp_path: Path) -> None:
    path = run_file(tmp_path, **(REFRESHED | {"steps": 3, "stages": []}))
    directory = train(path)
    found = kl(directory)
    assert found[0] < 1e-9 and all(value > 1e-5 for value in found[1:])
    assert not (directory / "checkpoints/step-00000003/stages").exists()


def test_a_model_of_its_own_is_far_from_the_first_step_on(tmp_path: Path) -> None:
    model = {"id": "text", "tiny": {**TEXT_RUN["model"]["tiny"], "hidden": 16, "heads": 2, "seed": 5}}
    found = kl(train(run_file(tmp_path, **(REFRESHED | {"steps": 2, "stages": [{"id": "reference", "model": model}]}))))
    assert found[0] > 0.01


def test_what_cannot_work_ends_before_the_first_step(tmp_path: Path) -> None:
    tiny = TEXT_RUN["model"]["tiny"]
    wide = {"id": "text", "tiny": {**tiny, "hidden": 16, "heads": 2}}
    fewer = {"id": "text", "tiny": {**tiny, "words": tiny["words"][:-1]}}
    for stages, said in [
        ([{"id": "reference", "model": wide, "refresh": 5}], r"stages.0.refresh: found 5, .*do not fit.*\(20, 32\)"),
        ([{"id": "reference", "model": fewer}], "stages.0.model: has a vocabulary of 19 tokens.*one of 20.*token 19"),
    ]:
        path = run_file(tmp_path, **(REFRESHED | {"stages": stages, "name": f"n{len(said)}"}))
        with pytest.raises(ConfigError, match=said) as error:
            train(path)
        assert "\n" not in str(error.value) and not list((tmp_path / "runs").rglob("journal/*.npz"))


def test_kl_in_the_loss_holds_the_policy_near_the_reference(tmp_path: Path) -> None:
    """The same run with next to no penalty and with a large one."""
    found = {}
    for coefficient in (1e-9, 1.0):
        algorithm = {"id": "grpo", "kl": {"coefficient": coefficient}, "entropy": TEXT_RUN["algorithm"]["entropy"]}
        changes = {"algorithm": algorithm, "stages": [], "steps": 8, "trainer": {"lr": 3e-3}}
        directory = train(run_file(tmp_path / str(coefficient), **(REFRESHED | changes)))
        found[coefficient] = kl(directory)[-1]
    assert found[1.0] < 0.5 * found[1e-9]


PLUGIN = '''
"""An algorithm that looks at all that a teacher can make."""
from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Component


class Pupil(Grpo):
    needs = frozenset({"teacher_logprobs", "topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs"})

    def advantages(self, groups):
        for row in (row for group in groups for member in group.members for row in member.rows):
            assert row.columns["topk_ids"].shape == (row.columns["mask"].sum(), 3)
        return super().advantages(groups)

    def loss(self, batch, outputs):
        full, mask = batch.columns["teacher_full_logprobs"], batch.mask_BT
        own = full.gather(-1, batch.tokens_BT[..., None])[..., 0]
        assert (own - batch.columns["teacher_logprobs"])[mask].abs().max() < 1e-6
        at = full.gather(-1, batch.columns["topk_ids"].long())
        assert (at - batch.columns["teacher_topk_logprobs"])[mask].abs().max() < 1e-6
        assert (own - outputs.logprobs_BT)[mask].abs().max() > 0.1  # the teacher is another model
        return super().loss(batch, outputs)


def relax_algorithms():
    return {"pupil": Component("pupil_plugin:Pupil")}
'''


def test_a_teachers_columns_reach_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_plugins()
    write_plugin(tmp_path / "plugins", "pupil", PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    model = {"id": "text", "tiny": {**TEXT_RUN["model"]["tiny"], "layers": 2, "seed": 5}}
    stages = [{"id": "teacher", "model": model, "top_k": 3}]
    changes = {"plugins": ["pupil"], "algorithm": {"id": "pupil"}, "stages": stages, "steps": 2, "evaluation": []}
    directory = train(run_file(tmp_path, **changes), installed=(*installed, *plugins_in(tmp_path / "plugins")))
    assert summary(directory)["groups"]["trained"] == 8
