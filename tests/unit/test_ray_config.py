"""The settings of the runtime ``ray``: what cannot work is said before any work, and the plan is shown. Without Ray."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from relax_core.check import static_check, static_problems
from relax_core.config import yaml
from relax_core.config.resolve import resolve
from relax_core.errors import ConfigError
from relax_core.run import Run
from relax_core.torch.config import TrainerConfig
from relax_plugin_ray.config import RayConfig
from relax_plugin_ray.plan import LEAST_CPU, Layout, Need, Seat, layout, needed_others, needed_roles

WORDS = ["last", "of", "word", "?", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "star", "rain", "fire"]
KL = {"id": "grpo", "kl": {"coefficient": 0.1}}


def data(runtime: dict[str, Any], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "test",
        "plugins": ["ray"],
        "steps": 10,
        "groups_per_step": 4,
        "model": {"id": "text", "tiny": {"words": WORDS}},
        "environments": [{"id": "last-word"}],
        "rewards": [{"id": "exact"}],
        "algorithm": {"id": "grpo"},
        "runtime": {"id": "ray", **runtime},
    }
    return base | changes


def found(roles: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    """The problems of a run."""
    config, stack = resolve(data((runtime or {}) | ({"roles": roles} if roles else {}), **changes))
    return static_check(config, stack).problems


def plan(tmp_path: Path, **changes: Any) -> tuple[list[str], list[str]]:
    """(lines of the plan and notes, problems)."""
    config, stack = resolve(data(**changes))
    said: list[str] = []
    wrong = static_problems(Run(config, tmp_path, stack), said.append)
    return [" ".join(line.split()) for line in said], wrong


# --- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1.5, 2.25])
def test_parts_of_several_gpus_are_refused(gpus: float) -> None:
    with pytest.raises(ConfigError, match=rf"runtime\.roles\.engine\.gpus: .*found {gpus:g}: a part of a GPU is less"):
        resolve(data({"roles": {"engine": {"gpus": gpus}}}))


def test_a_good_run_has_no_problem() -> None:
    assert found({"engine": {"replicas": 2, "gpus": 0.5}, "trainer": {"ranks": 2, "gpus": 1.0}}) == []
    assert found({"engine": {"gpus": 4.0}, "stages": {"reference": {"gpus": 1.0}}}, algorithm=KL) == []


@pytest.mark.parametrize(
    ("roles", "line"),
    [
        (
            {"stages": {"refrence": {}}},
            "runtime.roles.stages.refrence: no stage has this id; did you mean 'reference'?",
        ),
        ({"bus": {"replicas": 2}}, "runtime.roles.bus.replicas: found 2, but a run has one bus"),
    ],
)
def test_roles_that_cannot_be_had(roles: dict[str, Any], line: str) -> None:
    (problem,) = found(roles)
    assert problem.startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"transport": {"id": "copy"}}, "runtime.id: ray with transport 'copy', which stays in one process"),
        (
            {"engine": {"id": "torch", "device": "cuda"}},
            "runtime.roles.engine.gpus: found 0, but engine.device is cuda",
        ),
        ({"trainer": {"id": "torch", "device": "cuda"}}, "runtime.roles.trainer.gpus: found 0, but trainer.device is"),
    ],
)
def test_sections_that_do_not_fit(changes: dict[str, Any], line: str) -> None:
    (problem,) = found(**changes)
    assert problem.startswith(line)


@pytest.mark.parametrize("address", ["somewhere", "host:port", "http://a:1", "a:99999", ":6379"])
def test_addresses_that_are_none(address: str) -> None:
    (problem,) = found(runtime={"address": address})
    assert problem.startswith(f"runtime.address: found {address!r}: write host:port as `ray start --head` says it")


def test_a_client_is_told_to_run_on_a_node() -> None:
    (problem,) = found(runtime={"address": "ray://head:10001"})
    assert "start the run on one of its nodes" in problem
    for good in ("auto", "10.0.0.1:6379", "head.cluster:6379", "[::1]:6379"):
        assert found(runtime={"address": good}) == []


COLOCATE = {"placement": "colocate"}


def test_colocate_wants_a_rank_for_each_replica() -> None:
    (problem,) = found({"engine": {"replicas": 2, "gpus": 1.0}, "trainer": {"ranks": 4, "gpus": 1.0}}, COLOCATE)
    assert "engine 2 x 1 GPU and trainer 4 x 1 GPU, but a replica and a rank share each device: give both" in problem
    (problem,) = found({"engine": {"gpus": 2.0}, "trainer": {"gpus": 2.0}}, COLOCATE)
    assert "colocate with 2 GPUs for a process, of which two share one: ask for 1 GPU each" in problem
    assert found({"engine": {"replicas": 3, "gpus": 1.0}, "trainer": {"ranks": 3, "gpus": 1.0}}, COLOCATE) == []
    assert found({"engine": {"replicas": 1}, "trainer": {"ranks": 2}}, COLOCATE) == []  # on CPUs any numbers do


def test_colocate_wants_a_rank_of_the_critic_for_each_of_the_trainer() -> None:
    sized = {"engine": {"replicas": 2, "gpus": 1.0}, "trainer": {"ranks": 2, "gpus": 1.0}}
    (problem,) = found(sized, COLOCATE, algorithm={"id": "ppo"})
    assert "trainer 2 x 1 GPU and critic 1 x 0 GPUs, but a rank of each shares each device: give both" in problem
    assert found(sized | {"critic": {"ranks": 2, "gpus": 1.0}}, COLOCATE, algorithm={"id": "ppo"}) == []
    assert found(sized, COLOCATE) == []
    assert found({"critic": {"ranks": 2}}, COLOCATE, algorithm={"id": "ppo"}) == []  # on CPUs any numbers do


def test_hybrid_gives_stages_no_devices_of_their_own() -> None:
    roles = {"trainer": {"gpus": 2.0}, "stages": {"reference": {"gpus": 1.0}}}
    own, parts = found(roles, {"placement": "hybrid"}, algorithm=KL)
    assert own.startswith("runtime.roles.stages.reference.gpus: placement hybrid puts it on the trainer's devices")
    assert parts.startswith("runtime.roles.trainer.gpus: found 2, but in placement hybrid a rank shares its device")


def test_ranks_are_for_trainers_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found({"trainer": {"ranks": 2}}) == []
    monkeypatch.setattr(TrainerConfig, "over_ranks", False)
    (problem,) = found({"trainer": {"ranks": 2}})
    assert problem.startswith("runtime.roles.trainer.ranks: found 2, but trainer 'torch' trains in one process")
    assert found({"trainer": {"ranks": 1}}) == []


# --- what is needed, and where it sits --------------------------------------------------------------------------------


def seats(config: RayConfig, *stages: Need) -> Layout:
    engine, trainer = config.roles.engine, config.roles.trainer
    needs = [
        Need("trainer", trainer.ranks, trainer.cpus, trainer.gpus),
        Need("engine", engine.replicas, engine.cpus, engine.gpus),
        *stages,
    ]
    return layout(config, needs)


def config_of(placement: str, engine: dict[str, Any], trainer: dict[str, Any]) -> RayConfig:
    return RayConfig.model_validate({"placement": placement, "roles": {"engine": engine, "trainer": trainer}})


def test_needed_roles() -> None:
    twice = {"updates_per_step": 2}
    for changes, wanted in (
        ({}, ["advantages"]),
        ({"algorithm": KL}, ["reference", "advantages"]),
        ({"algorithm": {"id": "ppo"}}, ["critic"]),  # it credits whole steps
        ({"algorithm": {"id": "reinforce++"}}, []),
        (twice, ["old_policy", "advantages"]),
        ({**twice, "algorithm": {"id": "ppo"}}, ["old_policy", "critic"]),
        ({**twice, "algorithm": KL}, ["old_policy", "reference", "advantages"]),
        ({**twice, "old": "engine"}, ["advantages"]),
        ({"plugins": ["ray", "algorithms-extra"], "algorithm": {"id": "m2po"}}, ["old_policy", "advantages"]),
    ):
        roles = {"stages": {"reference": {"replicas": 2}}, "old_policy": {"replicas": 2}}
        run, stack = resolve(data({"roles": roles}, **changes))
        built = stack.build("algorithms", run.algorithm, where="algorithm")
        config = stack.config("runtimes", run.runtime, "runtime")
        assert isinstance(config, RayConfig)
        others = needed_others(config, run, stack, built)
        assert others == wanted, changes
        needs = needed_roles(config, run, stack, others)
        assert [need.role for need in needs] == ["trainer", "engine", "environments", "graders", "bus", *others]
        for role in ("reference", "old_policy"):
            assert [(n.processes, n.model) for n in needs if n.role == role] == [(2, True)] * (role in wanted)
        for placement in ("colocate", "hybrid"):  # the trainer is the old policy
            elsewhere = config.model_copy(update={"placement": placement})
            assert needed_others(elsewhere, run, stack, built) == [name for name in wanted if name != "old_policy"]


def test_separate_roles_have_groups_of_their_own() -> None:
    config = config_of("separate", {"replicas": 2, "gpus": 1.0}, {"ranks": 2, "cpus": 2.0, "gpus": 1.0})
    place = seats(config, Need("reference", 1, 0.0, 0.0, model=True))
    assert place.bundles == {"trainer": [(2, 1)] * 2, "engine": [(1, 1)] * 2, "reference": [(LEAST_CPU, 0)]}
    assert place.strategies == {"trainer": "PACK", "engine": "SPREAD", "reference": "PACK"}
    assert place.seats["engine", 1] == Seat("engine", 1, 1, 1)
    assert place.total() == (6 + LEAST_CPU, 4)


def test_colocated_roles_share_every_bundle() -> None:
    place = seats(config_of("colocate", {"replicas": 2, "gpus": 1.0}, {"ranks": 2, "cpus": 4.0, "gpus": 1.0}))
    assert place.bundles == {"trainer+engine": [(4, 1), (4, 1)]}
    for i in range(2):
        assert place.seats["trainer", i] == place.seats["engine", i] == Seat("trainer+engine", i, 2, 0.5)


def test_a_colocated_critic_shares_them_too(tmp_path: Path) -> None:
    config = config_of("colocate", {"replicas": 2, "gpus": 1.0}, {"ranks": 2, "gpus": 1.0})
    place = seats(config, Need("critic", 2, 1.0, 1.0))
    assert place.bundles == {"trainer+engine+critic": [(1, 1)] * 2}
    assert place.seats["critic", 1] == Seat("trainer+engine+critic", 1, 1 / 3, 1 / 3)
    for settings in ({}, {"whiten": False}):  # credit of values is given in the step, whatever they need
        lines, wrong = plan(tmp_path, runtime=COLOCATE, algorithm={"id": "ppo", **settings})
        assert wrong == [] and "role critic 1 rank, 1 CPU, sharing with trainer and engine" in lines
        assert not [line for line in lines if line.startswith("role advantages")]


def test_colocated_on_cpus_with_other_numbers() -> None:
    place = seats(config_of("colocate", {"replicas": 1}, {"ranks": 3}))
    assert place.bundles == {"trainer+engine": [(1, 0)] * 3}
    assert [place.seats["trainer", i].cpus for i in range(3)] == [0.5, 1, 1]
    place = seats(config_of("colocate", {"replicas": 3}, {"ranks": 1}))
    assert [place.seats["engine", i].bundle for i in range(3)] == [0, 1, 2]
    assert place.total() == (3, 0)


def test_hybrid_puts_models_beside_the_trainer() -> None:
    config = config_of("hybrid", {"gpus": 1.0}, {"ranks": 2, "gpus": 1.0})
    place = seats(config, Need("reference", 1, 1.0, 0.0, model=True), Need("advantages", 1, 1.0, 0.0))
    assert place.bundles["trainer+reference"] == [(2, 1), (1, 1)]
    assert place.seats["reference", 0] == Seat("trainer+reference", 0, 1, 0.5)
    assert [place.seats["trainer", i].gpus for i in range(2)] == [0.5, 1]
    assert place.seats["advantages", 0].group == "advantages"


@pytest.mark.parametrize("placement", ["separate", "colocate", "hybrid"])
@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 3])
def test_seats_fit_into_their_bundles(placement: str, replicas: int, ranks: int) -> None:
    config = config_of(placement, {"replicas": replicas, "gpus": 0.5}, {"ranks": ranks, "gpus": 0.5})
    place = seats(config, Need("reference", 4, 0.5, 0.0, model=True), Need("teacher", 1, 3.0, 0.0, model=True))
    assert len(place.seats) == replicas + ranks + 5
    for group, bundles in place.bundles.items():
        for i, (cpus, gpus) in enumerate(bundles):
            inside = [s for s in place.seats.values() if (s.group, s.bundle) == (group, i)]
            assert inside and sum(s.cpus for s in inside) <= cpus + 1e-9 and sum(s.gpus for s in inside) <= gpus + 1e-9


# --- relax check ------------------------------------------------------------------------------------------------------


def test_the_plan_shows_every_role(tmp_path: Path) -> None:
    roles = {"engine": {"replicas": 2, "gpus": 1.0}, "trainer": {"ranks": 2, "gpus": 1.0}, "stages": {"teacher": {}}}
    lines, wrong = plan(tmp_path, runtime={"roles": roles}, algorithm=KL, max_staleness=2)
    assert wrong == []
    for line in (
        "cluster started on this machine, ended with the run; placement separate, 9 CPUs and 4 GPUs in all",
        "role trainer 2 ranks, each 1 CPU and 1 GPU",
        "role engine 2 processes, each 1 CPU and 1 GPU, spread over nodes",
        "role environments 1 process, 1 CPU",
        "role graders 1 process, 1 CPU",
        "role bus 1 process, 1 CPU",
        "role reference 1 process, 1 CPU",
        "role advantages 1 process, 1 CPU",
        "overlap engine and trainer overlap, up to 2 policy versions apart",
        "note: runtime.roles.stages.teacher: grpo with its settings does not need it; it is not started",
    ):
        assert line in lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("runtime", "line"),
    [
        ({}, "overlap engine and trainer take turns, for max_staleness is 0: each waits for the other in every step"),
        (COLOCATE, "overlap engines and trainer take turns on the same devices; the side that waits frees its memory"),
        (COLOCATE, "role engine 1 process, 1 CPU, sharing with trainer"),
        ({"placement": "hybrid"}, "role reference 1 process, 1 CPU, sharing with trainer"),
        ({"address": "head:6379"}, "cluster the one at head:6379; placement separate, 7 CPUs and 0 GPUs in all"),
    ],
)
def test_the_plan_shows_placement_and_overlap(tmp_path: Path, runtime: dict[str, Any], line: str) -> None:
    lines, wrong = plan(tmp_path, runtime=runtime, algorithm=KL)
    assert wrong == []
    assert line in lines, "\n".join(lines)


def test_a_critic_is_a_role(tmp_path: Path) -> None:
    roles: dict[str, Any] = {"critic": {"ranks": 2, "gpus": 1.0}}
    for placement in ("separate", "hybrid"):
        runtime = {"placement": placement, "roles": roles}
        lines, wrong = plan(tmp_path, runtime=runtime, algorithm={"id": "ppo"})
        assert wrong == []
        assert "role critic 2 ranks, each 1 CPU and 1 GPU" in lines, "\n".join(lines)
    lines, _ = plan(tmp_path, runtime={"roles": roles | {"stages": {"critic": {}}}}, algorithm={"id": "ppo"})
    assert "note: runtime.roles.stages.critic: it only asks the role critic, which roles.critic sizes" in lines
    lines, wrong = plan(tmp_path, runtime={"roles": roles}, trainer={"id": "torch", "device": "cpu"})
    assert wrong == [] and not [line for line in lines if line.startswith("role critic")]
    assert "note: runtime.roles.critic: grpo has no critic; it is not started" in lines
    assert [line for line in lines if line.startswith("note: runtime.roles.critic.gpus: torch is told to use the CPU")]


def test_a_critic_is_sized_like_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo, cuda = {"id": "ppo"}, {"id": "torch", "device": "cuda"}
    (problem,) = found({"trainer": {"gpus": 1.0}}, algorithm=ppo, trainer=cuda)
    assert problem.startswith("runtime.roles.critic.gpus: found 0, but trainer.device is cuda")
    assert found({"trainer": {"gpus": 1.0}}, trainer=cuda) == []
    monkeypatch.setattr(TrainerConfig, "over_ranks", False)
    (problem,) = found({"critic": {"ranks": 2}}, algorithm=ppo)
    assert problem.startswith("runtime.roles.critic.ranks: found 2, but trainer 'torch' trains in one process")


OWN = {"gpus": 1.0, "replicas": 2}


def test_the_plan_shows_the_old_policy(tmp_path: Path) -> None:
    lines, wrong = plan(tmp_path, runtime={"roles": {"old_policy": OWN}}, updates_per_step=2)
    assert wrong == [] and not [line for line in lines if line.startswith("note: ")]
    assert "role old_policy 2 processes, each 1 CPU and 1 GPU" in lines
    assert "cluster started on this machine, ended with the run; placement separate, 8 CPUs and 2 GPUs in all" in lines


@pytest.mark.parametrize(
    ("runtime", "changes", "note"),
    [
        (
            {"roles": {"old_policy": OWN}},
            {},
            "grpo with its settings needs no old log-probs; nothing is started for it",
        ),
        (
            {"roles": {"old_policy": OWN}},
            {"updates_per_step": 2, "old": "engine"},
            "grpo with its settings needs no old log-probs; nothing is started for it",
        ),
        (
            {"roles": {"old_policy": OWN}, "placement": "hybrid"},
            {"updates_per_step": 2},
            "in placement hybrid the trainer computes old log-probs; nothing is started for it",
        ),
    ],
)
def test_an_old_policy_that_is_not_started_is_noted(
    tmp_path: Path, runtime: dict[str, Any], changes: dict[str, Any], note: str
) -> None:
    lines, wrong = plan(tmp_path, runtime=runtime, **changes)
    assert wrong == [] and f"note: runtime.roles.old_policy: {note}" in lines, "\n".join(lines)
    assert not [line for line in lines if line.startswith("role old_policy")]


def test_an_old_policy_without_gpus_beside_a_trainer_with_some_is_noted(tmp_path: Path) -> None:
    lines, wrong = plan(tmp_path, runtime={"roles": {"trainer": {"gpus": 1.0}}}, updates_per_step=2)
    (found,) = [line for line in lines if line.startswith("note: runtime.roles.old_policy.gpus: found 0, but")]
    assert wrong == [] and found.endswith("or take placement hybrid, where the trainer computes old log-probs")


def test_idle_gpus_are_noted(tmp_path: Path) -> None:
    runtime = {"roles": {"engine": {"gpus": 1.0}}}
    lines, _ = plan(tmp_path, runtime=runtime, engine={"id": "torch", "device": "cpu"})
    assert (
        "note: runtime.roles.engine.gpus: torch is told to use the CPU (engine.device), so its GPUs are idle" in lines
    )


def test_the_check_needs_neither_ray_nor_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.dump(data({"roles": {"trainer": {"ranks": 2}}}, algorithm=KL)))
    code = f"""
        import sys
        from relax_core.cli import main
        try:
            main(["check", {str(file)!r}])
        except SystemExit as stop:
            assert not stop.code, stop.code
        assert not {{"ray", "torch"}} & set(sys.modules)
    """
    call = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, each 1 CPU" in done.stdout
