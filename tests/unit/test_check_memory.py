"""The estimate of what a run keeps in memory: by hand, and beside what a trainer really keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from relax_core import check_memory
from relax_core.check_deep import deep_problems
from relax_core.check_memory import engine_memory, in_words, memory_problems, sizes_of, trainer_memory, width
from relax_core.config.resolve import resolve
from relax_core.run import Run, build_adapter
from relax_core.setup import TrainerSetup
from relax_core.torch.config import EngineConfig, TrainerConfig
from relax_core.torch.trainer import TorchTrainer

WORDS = ["last", "of", "word", "?", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "star", "rain", "fire"]


def run_of(tmp_path: Path, **changes: Any) -> Run:
    base: dict[str, Any] = {
        "name": "test",
        "steps": 10,
        "groups_per_step": 4,
        "model": {"id": "text", "tiny": {"words": WORDS}},
        "environments": [{"id": "last-word"}],
        "rewards": [{"id": "exact"}],
        "algorithm": {"id": "grpo"},
    }
    config, stack = resolve(base | changes)
    return Run(config, tmp_path, stack)


SIZES = {"visual.weight": 1000, "model.weight": 3000}


def test_by_hand() -> None:
    assert engine_memory(SIZES, 2).total == 8000
    half = trainer_memory(SIZES, TrainerConfig(), 2, ranks=1, critic=False)
    assert half.parts == {"weights": 8000, "masters": 16000, "gradients": 16000, "AdamW": 32000}
    assert str(half) == "72 kB (weights 8 kB, masters 16 kB, gradients 16 kB, AdamW 32 kB)"
    full = trainer_memory(SIZES, TrainerConfig(), 4, ranks=4, critic=False)
    assert full.total == 16000 + 16000 + 32000  # replicated ranks keep everything
    frozen = trainer_memory(SIZES, TrainerConfig(frozen=("visual*",)), 2, ranks=1, critic=False)
    assert frozen.parts == {"weights": 8000, "masters": 12000, "gradients": 12000, "AdamW": 24000}
    divided = trainer_memory(SIZES, TrainerConfig(sharding="fsdp"), 2, ranks=4, critic=False)
    assert divided.parts == {"weights": 4000, "masters": 0, "gradients": 4000, "AdamW": 8000}
    assert trainer_memory(SIZES, TrainerConfig(), 2, ranks=1, critic=True).total == 2 * half.total
    assert [in_words(n) for n in (12, 1500, 2.5e6, 61.2e9, 1.41e12)] == [
        "12 bytes",
        "1.5 kB",
        "2.5 MB",
        "61.2 GB",
        "1.41 TB",
    ]


def test_width_follows_the_settings() -> None:
    assert width(EngineConfig(dtype="bfloat16"), 0.0) == 2
    assert width(EngineConfig(), 0.0) == 4
    assert width(EngineConfig(), 1.0) == 2
    assert width(TrainerConfig(dtype="float32"), 1.0) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen", [(), ("*embed*",)])
def test_a_trainer_keeps_what_is_estimated(tmp_path: Path, dtype: str, frozen: tuple[str, ...]) -> None:
    """After AdamW has made its averages; the trainer forgets a gradient when it is used, so that is left out."""
    trainer = {"id": "torch", "dtype": dtype, "frozen": list(frozen)}
    run = run_of(tmp_path, trainer=trainer)
    adapter, _ = build_adapter(run)
    config = run.stack.config("trainers", run.config.trainer, "trainer")
    assert isinstance(config, TrainerConfig)
    built = TorchTrainer(config, TrainerSetup(adapter, run))
    learner = built.learner
    for parameter in learner.optimizer._masters.values():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer._adamw.step()
    learner.optimizer.clear()
    kept: dict[str, int] = dict.fromkeys(("weights", "masters", "optimizer"), 0)
    for kind, tensor in learner.tensors():
        kept[kind] = kept.get(kind, 0) + tensor.nbytes
    sizes = sizes_of(adapter)
    assert sizes is not None
    wanted = trainer_memory(sizes, config, width(config, 0.0), ranks=1, critic=False).parts
    assert kept["weights"] == pytest.approx(wanted["weights"], rel=0.01)  # and some buffers
    assert kept["masters"] == wanted["masters"]
    assert kept["optimizer"] == pytest.approx(wanted["AdamW"], rel=0.01)  # and the numbers of the steps


def test_a_checkpoint_is_measured_by_its_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"c": torch.zeros((), dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")

    class Adapter:
        class config:
            path, tiny = tmp_path, None

    adapter: Any = Adapter()
    assert sizes_of(adapter) == {"a": 15, "b": 7, "c": 1}
    Adapter.config.path = tmp_path / "none"
    assert sizes_of(adapter) is None


def test_the_deep_check_reports_it(tmp_path: Path) -> None:
    said: list[str] = []
    assert deep_problems(run_of(tmp_path, plugins=["ray"], runtime={"id": "ray"}), said.append) == []
    engine, rank, published, left_out = [line for line in said if line.startswith("memory: ")]
    assert "parameters; each engine keeps" in engine and "(weights " in engine
    assert "each rank of the trainer keeps" in rank and "AdamW" in rank
    assert published.endswith("of main memory for each published version")
    assert left_out.startswith("memory: not included: activations, the engine's cache")


def test_a_critic_of_its_own_has_its_own_line(tmp_path: Path) -> None:
    """As much as the policy, whose ranks keep it too where it has no processes."""

    def told(runtime: dict[str, Any]) -> list[str]:
        said: list[str] = []
        run = run_of(tmp_path, plugins=["ray"], algorithm={"id": "ppo"}, runtime=runtime)
        assert list(memory_problems(run, build_adapter(run)[0], said.append)) == []
        return [line for line in said if "rank of" in line]

    ((both,), (policy, critic)) = told({"id": "local"}), told({"id": "ray", "roles": {"critic": {"ranks": 2}}})
    assert policy.replace("trainer", "critic") == critic
    assert both != policy and both.startswith("memory: each rank of the trainer keeps")


@pytest.mark.parametrize(("room", "wrong"), [(10**12, False), (1_000_000, True)])
@pytest.mark.parametrize("placement", ["resident", "colocate"])
def test_what_cannot_fit_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, room: int, wrong: bool
) -> None:
    monkeypatch.setattr(check_memory, "gpu_bytes", lambda: room)
    run = run_of(tmp_path, runtime={"id": "local", "placement": placement})
    said: list[str] = []
    found = list(memory_problems(run, build_adapter(run)[0], said.append))
    who = "engine and trainer together" if placement == "resident" else "a rank of the trainer"
    assert any(line.startswith(f"memory: {who}: ") for line in said)
    assert [line.startswith(f"memory: {who} would keep ") for line in found] == [True] * wrong


@pytest.mark.parametrize(
    ("placement", "updates", "counted"), [("separate", 2, 1), ("separate", 1, 0), ("hybrid", 2, 0)]
)
def test_an_old_policy_of_its_own_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, updates: int, counted: int
) -> None:
    """Half as much as in the trainer's float32 where it gets a GPU; and that must fit."""
    monkeypatch.setattr(check_memory, "gpu_bytes", lambda: 1000)
    runtime = {"id": "ray", "placement": placement, "roles": {"old_policy": {"gpus": 1.0}}}
    run = run_of(tmp_path, plugins=["ray"], runtime=runtime, updates_per_step=updates)
    adapter, said = build_adapter(run)[0], list[str]()
    wrong = list(memory_problems(run, adapter, said.append))
    keeps = f"memory: each process of the old policy keeps {engine_memory(sizes_of(adapter) or {}, 2)}"
    assert [line for line in said if "old policy keeps" in line] == [keeps] * counted
    assert [line.startswith("memory: a process of the old policy would keep ") for line in wrong] == [True] * counted
