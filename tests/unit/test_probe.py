"""The acceptance probe: a run and ``check --deep`` refuse an engine with a fault, and show the numbers."""

from __future__ import annotations

import asyncio
import copy
import math
import random
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.resolve import resolve
from relax_core.engine_role import engine_setup
from relax_core.errors import ConfigError
from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.plugins import installed_plugins
from relax_core.probe import BFLOAT16, FLOAT16, FLOAT32, Probe, Tolerance, summary, tolerance_of
from relax_core.probe_deep import engine_problems
from relax_core.probe_run import accept_engines
from relax_core.router import Router
from relax_core.run import Run
from relax_core.runtime import LocalRuntime
from relax_core.system import System
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import TEXT_RUN, metrics, run_file, train
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.torch.config import EngineConfig
from relax_core.torch.engine import TorchEngine
from relax_core.turns import Turns
from relax_core.types import Encoded, Stop, Version
from relax_core.weights import WeightUpdate
from tests.unit import wrong_engines

pytestmark = pytest.mark.timeout(60)

PLUGIN = """
from relax_core.interfaces import Component
from tests.unit import wrong_engines
from relax_core.torch.config import EngineConfig

def relax_engines():
    return {
        name.lower(): Component(f"tests.unit.wrong_engines:{name}", EngineConfig)
        for name, kind in vars(wrong_engines).items()
        if isinstance(kind, type) and issubclass(kind, wrong_engines.TorchEngine)
    }
"""
SHORT: dict[str, Any] = {"steps": 1, "evaluation": [], "sampling": {"max_new_tokens": 16, "temperature": 0.8}}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    built_in = installed_plugins()
    monkeypatch.syspath_prepend(tmp_path)
    write_plugin(tmp_path, "wrong", textwrap.dedent(PLUGIN))
    return [*built_in, *plugins_in(tmp_path)]


NUMBER = r"-?\d+\.\d{4}"
APART = (
    rf"log-prob {NUMBER}, the (trainer|model in memory) has {NUMBER}: {NUMBER} apart, float32 allows 0.001; so it is"
)
UNEQUAL = r"blank weights, token \d+ \(id \d+\): log-prob -\d\.\d{6}, but all 18 allowed ids \(20 less 2 banned\) are"
FAULTS = {
    "WrongTemperature": rf"sampled at temperature 0.8, the .*{APART} .*, as if the temperature were about 0\.[56]",
    "Untempered": rf"sampled at temperature 0.8, the .*{APART} .*, as if the temperature were about (1|0.9\d) and",
    "MissingBan": rf"{UNEQUAL}.*: as if it drew from 19.0 ids",
    "NoBan": rf"{UNEQUAL}.*: as if nothing were banned",
    "Stale": rf"{UNEQUAL}.*: these are no blank weights",
    "StaleLater": rf"greedy, the (trainer|model)'s weights, .*{APART}|sampled at .*, the trainer's weights, .*{APART}",
    "StuckVersion": r"blank weights, token 0: version \(0, 0\), but \(0, -?\d\) was loaded before",
    "SampledGreedy": r"greedy, the .*: temperature 0 must take the most likely allowed id",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_is_refused_before_anything_is_played(fault: str, tmp_path: Path, installed: list[EntryPoint]) -> None:
    engine = {"engine": {"id": fault.lower()}, "plugins": ["wrong"]}
    with pytest.raises(ConfigError) as caught:
        train(run_file(tmp_path, **engine, **SHORT), installed=installed)
    lines = caught.value.problems
    assert all(line.startswith("engine probe: engine: ") and "\n" not in line for line in lines)
    assert any(re.search(FAULTS[fault], line) for line in lines), lines
    assert not list(tmp_path.glob("runs/tiny/trajectories/*"))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_deep_check_refuses(fault: str, installed: list[EntryPoint]) -> None:
    problems, said = deep(fault, installed)
    assert not said
    assert any(re.search(FAULTS[fault], line) for line in problems), problems


def deep(
    id: str, installed: Sequence[EntryPoint] | None = None, run: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[list[str], list[str]]:
    own = {"engine": {"id": id.lower(), **settings}, "plugins": ["wrong"] if installed else [], **(run or {})}
    config, stack = resolve(copy.deepcopy(TEXT_RUN) | SHORT | own, installed=installed)
    said: list[str] = []
    return engine_problems(Run(config, Path("run"), stack), said.append), said


def test_the_deep_check_of_a_good_engine_says_what_was_tried() -> None:
    problems, said = deep("torch")
    assert not problems
    assert re.fullmatch(
        r"engine probe: 18 replies, \d+ tokens: log-probs differ by at most \S+ \(float32 allows 0.001\); "
        r"weights move; 2 ids banned",
        said[0],
    )
    problems, said = deep("torch", dtype="bfloat16")
    assert not problems and "(bfloat16 allows 0.5)" in said[0]


def test_an_engine_that_cannot_start_is_a_problem_of_one_line() -> None:
    problems, said = deep("torch", device="cuda")
    assert not said and problems == [
        "engine probe: engine.device: 'cuda', but torch sees no GPU here; use 'cpu' or 'auto'"
    ]


def test_an_engine_of_a_cluster_need_not_start_here() -> None:
    problems, said = deep("torch", device="cuda", run={"plugins": ["ray"], "runtime": {"id": "ray"}})
    assert not problems
    (line,) = said
    assert line.startswith("engine probe: left out: an engine cannot start on this machine (engine.device: 'cuda', but")


def test_a_model_that_does_not_fit_beside_the_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_core import probe_deep

    def too_big(*arguments: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(probe_deep, "_model", too_big)
    problems, said = deep("torch")
    assert not problems
    assert said == [
        "engine probe: left out: the model does not fit beside the engine (MemoryError); a run probes its engines "
        "by its trainer when it starts"
    ]


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_the_probe_changes_no_bit_of_a_run_and_leaves_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    took: list[float] = []
    probe = System.probe

    async def timed(self: System) -> None:
        began = time.process_time()
        monkeypatch.setattr(self.screen, "note", said.append)
        await probe(self)
        took.append(time.process_time() - began)

    async def skipped(self: System) -> None: ...

    monkeypatch.setattr(System, "probe", timed)
    probed = metrics(train(run_file(tmp_path / "probed", sampling={"max_new_tokens": 16})))
    monkeypatch.setattr(System, "probe", skipped)
    assert metrics(train(run_file(tmp_path / "skipped", sampling={"max_new_tokens": 16}))) == probed
    (line, *_) = said
    assert line.startswith("engine probe: 8 replies, ") and line.endswith("; weights move; 2 ids banned")
    assert took[0] < 0.3, f"{took[0]:.2f} s of a run's start"


def test_every_replica_is_probed_and_the_wrong_one_is_named(tmp_path: Path) -> None:
    config, stack = resolve(copy.deepcopy(TEXT_RUN) | SHORT)
    run = Run(config, tmp_path, stack)

    async def main() -> str:
        runtime = LocalRuntime(LocalRuntime.Config())
        roles = await runtime.start(run, print)
        kinds = (TorchEngine, wrong_engines.NoBan) if wrong else (TorchEngine, TorchEngine)
        setup = replace(engine_setup(run, roles.adapter), deterministic=False)
        router = Router([kind(EngineConfig(device="cpu"), setup) for kind in kinds], print)
        try:
            await router.start()
            roles = replace(roles, engine=router)
            return await accept_engines(run, roles, Turns(router, roles.trainer, False), 0, 0)
        finally:
            await router.stop()
            await runtime.stop()

    wrong = True
    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    assert all(line.startswith("engine probe: engine 1: ") for line in caught.value.problems)
    wrong = False
    assert asyncio.run(main()).startswith("engine probe: 2 engines, 16 replies, ")


def test_an_engine_that_answers_nobody_is_refused_in_time() -> None:
    adapter = tiny_adapter()
    engine = wrong_engines.Silent(EngineConfig(device="cpu"), engine_setup_of(adapter))

    async def main() -> list[str]:
        await engine.start()
        probe = Probe(engine, adapter, Encoded([3, 4]), (1.0,), FLOAT32, limit_s=0.2)
        await probe.ask(Version(0, 0), "the first weights")
        await engine.stop()
        return probe.findings

    assert asyncio.run(main()) == ["engine: the first weights: generate: no answer within 0.2 s"]


def engine_setup_of(adapter: TinyAdapter) -> Any:
    from relax_core.setup import EngineSetup

    return EngineSetup(adapter, 0, False)


# --- models that are nearly uniform -----------------------------------------------------------------------------------


class Numbers(Engine):
    """Draws from fixed logits, the same at every place, as an engine of a coarse dtype would: with noise."""

    def __init__(self, spread: float, noise: float, wrong: float = 1.0) -> None:
        super().__init__(None)
        rng = random.Random(0)
        self.logits = [rng.gauss(0, spread) for _ in range(29)]
        self.noise, self.wrong, self.rng = noise, wrong, rng

    def logprobs(self, heat: float) -> list[float]:
        total = math.log(sum(math.exp(x / heat) for x in self.logits))
        return [x / heat - total for x in self.logits]

    async def generate(self, request: Request) -> Completion:
        heat = request.sampling.temperature
        table = self.logprobs((heat or 1.0) * (self.wrong if heat else 1.0))
        best = max(range(29), key=table.__getitem__)
        picked = self.rng.choices(range(29), [math.exp(x) for x in table], k=16) if heat else [best] * 16
        found = [table[i] + self.rng.gauss(0, self.noise) for i in picked]
        return Completion([3 + i for i in picked], found, [Version(0, 1)] * 16, Stop.LENGTH)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


class NumbersTruth:
    who, temperature = "the table", None

    def __init__(self, engine: Numbers) -> None:
        self.engine = engine

    async def __call__(
        self, prompt: Encoded, replies: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        table = self.engine.logprobs(temperature)
        return [[table[i - 3] for i in ids] for ids in replies]


def asked(engine: Numbers, tolerance: Tolerance) -> Probe:
    adapter = tiny_adapter()
    adapter.banned_token_ids = (0, 1, 2)

    async def main() -> Probe:
        probe = Probe(engine, adapter, Encoded([3]), (0.7,), tolerance)
        await probe.compare(await probe.ask(Version(0, 1), "weights"), NumbersTruth(engine))
        return probe

    return asyncio.run(main())


@pytest.mark.parametrize(("spread", "noise", "tolerance"), [(2e-4, 1e-6, FLOAT32), (0.05, 1e-3, BFLOAT16)])
def test_a_wrong_temperature_is_seen_below_the_tolerance_too(spread: float, noise: float, tolerance: Tolerance) -> None:
    assert not asked(Numbers(spread, noise), tolerance).findings
    (finding,) = asked(Numbers(spread, noise, wrong=1 / 0.7), tolerance).findings
    assert "as if the temperature were about 1 and not 0.7" in finding


def test_a_model_too_uniform_to_tell_is_said_to_be() -> None:
    probe = asked(Numbers(1e-3, 8e-3, wrong=1 / 0.7), BFLOAT16)
    assert not probe.findings
    assert summary([probe]).endswith("; the model is too uniform to tell a wrong temperature")
    assert "uniform" not in summary([asked(Numbers(1.0, 8e-3), BFLOAT16)])


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    assert tolerance_of("float32") == FLOAT32
    assert tolerance_of("float32", "bfloat16", "float16") == BFLOAT16
    assert tolerance_of("float16", "float32") == FLOAT16
    assert tolerance_of("fp8") == BFLOAT16
