"""From a run file's data to settings and stack: what is accepted, every error's words, and the resolved file."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from relax_core.config import yaml
from relax_core.config.json_schema import run_schema
from relax_core.config.overrides import apply
from relax_core.config.resolve import load, problems, resolve, resolved, version_problems
from relax_core.config.schema import RunConfig
from relax_core.config.validation import validate
from relax_core.errors import ConfigError, PluginError, RelaxError
from relax_core.interfaces import ComponentConfig
from relax_core.plugins import activate, installed_plugins
from relax_core.testing.errors import refused
from relax_core.testing.plugins import plugins_in, write_plugin

WORDS = ["user", "assistant", "last", "of", "word", "?", "cat", "dog", "sun", "tree", "fish", "book", "rain", "star"]


def data(**changes: Any) -> dict[str, Any]:
    """A run file of built-in parts alone; ``None`` takes a key out."""
    base: dict[str, Any] = {
        "name": "test",
        "steps": 10,
        "groups_per_step": 4,
        "group_size": 4,
        "model": {"id": "text", "tiny": {"words": WORDS}},
        "environments": [{"id": "last-word"}, {"id": "nth-word", "name": "nth"}],
        "rewards": [{"id": "exact", "weight": 0.8}],
        "algorithm": {"id": "grpo"},
        "evaluation": [{"name": "held-out", "environment": "last-word"}],
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def lines(raw: dict[str, Any]) -> tuple[str, ...]:
    """What is wrong with a run file."""
    with pytest.raises(RelaxError) as caught:
        resolve(raw)
    found = problems(caught.value)
    assert all("\n" not in line for line in found)
    return found


def only(raw: dict[str, Any]) -> str:
    (line,) = lines(raw)
    return line


# --- what is accepted -----------------------------------------------------------------------------------------------


def test_a_good_run_file() -> None:
    run, stack = resolve(data())
    assert (run.steps, run.engine.id, run.environments[1].label) == (10, "torch", "nth")
    assert list(stack.versions) == ["core", "modalities", "algorithms", "envs"]


def test_a_section_with_a_default_may_leave_out_its_id() -> None:
    run, _ = resolve(data(engine={"device": "cpu"}, runtime={"overlap": "process"}))
    assert run.engine.id == "torch" and run.engine.settings == {"device": "cpu"}
    assert run.runtime.settings == {"overlap": "process"}
    run, _ = resolve(apply(data(), ["engine.device=cpu"]))
    assert run.engine.settings == {"device": "cpu"}


def test_a_file_with_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.dump(data()))
    run, stack = load(
        file, ["steps=3", "algorithm.clip_low=0.1", "rewards.exact.weight=2", "environments.nth.weight=3"]
    )
    assert (run.steps, run.rewards[0].weight, run.environments[1].weight) == (3, 2.0, 3.0)
    assert stack.config("algorithms", run.algorithm, "algorithm").model_dump()["clip_low"] == 0.1


def test_a_wrong_override_is_reported_at_its_path(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.dump(data()))
    with refused("algorithm.clip_lo: unknown key; did you mean 'clip_low'?", kind=ConfigError):
        load(file, ["algorithm.clip_lo=0.1"])


# --- errors of single fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "steps: found 0; must be greater than 0"),
        ("steps=1e6", "steps: found 1000000.0; must be a valid integer; write 1000000"),
        ("steps=1.5", "steps: found 1.5; must be a valid integer"),
        ("steps='10'", "steps: found '10'; must be a valid integer; leave the quotes out"),
        ("steps=true", "steps: found true; must be a valid integer"),
        ("name=3", 'name: found 3; must be a valid string; write "3"'),
        ("name=a b", "name: found 'a b'; must match pattern"),
        ("order=startd", "order: found 'startd'; allowed are 'started' or 'finished'; did you mean 'started'?"),
        ("plugins=omni", "plugins: found 'omni'; must be a list; write [omni]"),
        ("plugins=[omin]", "plugins: 'omin' is not installed; did you mean 'omni'?"),
        ("algorithm=grpo", "algorithm: found 'grpo'; must be a mapping; write {id: grpo}"),
        ("algorithm={}", "algorithm.id: is missing; it is required: Which component."),
        ("environments=[]", "environments: found a list of 0; must have at least 1 item, not 0"),
        ("environments={id: tone}", "environments: found a mapping of id; must be a list"),
        ("checkpoint.evry=3", "checkpoint.evry: unknown key; did you mean 'every'?"),
        ("evaluation.0.at_start=yes", "evaluation.0.at_start: found 'yes'; must be a valid boolean; write true"),
        ("sampling.temperature=.inf", "sampling.temperature: found Infinity; must be a finite number"),
        ("algorithm.clip_lo=1", "algorithm.clip_lo: unknown key; did you mean 'clip_low'?"),
        ("algorithm.clip_low=-1", "algorithm.clip_low: found -1; must be greater than 0"),
        ("algorithm.entropy.strat=1", "algorithm.entropy.strat: unknown key; did you mean 'start'?"),
        ("algorithm.id=grpoo", "algorithm.id: no algorithm has the id 'grpoo'; did you mean 'grpo'?"),
        ("rewards.0.wieght=2", "rewards.0.wieght: unknown key; did you mean 'weight'?"),
        (
            "environments.0.id=lst-word",
            "environments.0.id: no environment has the id 'lst-word'; did you mean 'last-word'",
        ),
        ("model={id: text}", "model: path and tiny: found neither"),
        ("transport.id=shred", "transport.id: no transport has the id 'shred'; did you mean 'shared'?"),
    ],
)
def test_a_wrong_field(override: str, message: str) -> None:
    assert any(line.startswith(message) for line in lines(apply(data(), [override])))


def test_wrong_and_missing_keys() -> None:
    assert only(data(stpes=3)) == "stpes: unknown key; did you mean 'steps'?"
    assert only(data(zzzz=3)).startswith("zzzz: unknown key; known are name, runs, plugins, seed, steps")
    assert only(data(steps=None)) == "steps: is missing; it is required: Training steps, one policy version each."


def test_all_problems_are_reported_at_once() -> None:
    raw = data(stpes=3, algorithm={"id": "grpo", "clip_lo": 1}, rewards=[{"id": "exakt"}], order="x", epochs=3)
    assert [line.split(":")[0] for line in lines(raw)] == ["order", "stpes", "rewards.0.id", "algorithm.clip_lo"]
    raw = data(epochs=3, algorithm={"id": "grpo", "clip_lo": 1}, sampling={"top_k": 5})
    assert [line.split(":")[0] for line in lines(raw)] == ["algorithm.clip_lo", "sampling.top_k", "epochs"]


def test_data_that_is_not_plain_is_refused() -> None:
    assert "not plain data" in lines(data(name={1, 2}))[0]
    circle: list[Any] = []
    circle.append(circle)
    assert "not plain data" in lines(data(plugins=circle))[0]


class Inner(ComponentConfig):
    rate: float = 1.0


class Circle(ComponentConfig):
    id: Literal["circle"]
    radius: float


class Square(ComponentConfig):
    id: Literal["square"]
    side: float


class Many(ComponentConfig):
    either: int | Literal["auto"] = "auto"
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner] = Field(default_factory=dict)
    model_or_text: Inner | str = ""
    folder: Path = Path("x")
    shapes: tuple[Annotated[Circle | Square, Field(discriminator="id")], ...] = ()


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (
            {"either": "atuo"},
            "x.either: found 'atuo'; must be a valid integer or allowed are 'auto'; did you mean 'auto'",
        ),
        ({"inner": {"rat": 1}}, "x.inner.rat: unknown key; did you mean 'rate'?"),
        ({"several": [{"rate": 1}, {"rate": "a"}]}, "x.several.1.rate: found 'a'; must be a valid number"),
        ({"named": {"a": {"rte": 1}}}, "x.named.a.rte: unknown key; did you mean 'rate'?"),
        ({"model_or_text": {"rate": "b"}}, "x.model_or_text.rate: found 'b'; must be a valid number"),
        ({"folder": 3}, "x.folder: found 3; "),
        (
            {"shapes": [{"id": "sqare"}]},
            "x.shapes.0.id: found 'sqare'; allowed are 'circle', 'square'; did you mean 'squ",
        ),
        ({"shapes": [{"side": 1}]}, "x.shapes.0.id: is missing; it is required"),
        ({"shapes": [{"id": "square", "sid": 1}]}, "x.shapes.0.sid: unknown key; did you mean 'side'?"),
        ({"shapes": [{"id": "circle", "radius": "1"}]}, "x.shapes.0.radius: found '1'; must be a valid number"),
    ],
)
def test_paths_lead_through_unions_lists_and_mappings(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Many, raw, "x")
    assert any(found.startswith(line) for found in caught.value.problems), caught.value.problems


def test_text_becomes_a_path_and_a_list_a_tuple() -> None:
    found = validate(Many, {"folder": "a/b", "several": [{"rate": 2}], "either": 3})
    assert found == Many(folder=Path("a/b"), several=(Inner(rate=2.0),), either=3)


# --- rules that span fields -----------------------------------------------------------------------------------------


TWO_REWARDS = "rewards=[{id: exact, environments: [nth]}, {id: format, words: 1}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["group_size=1"], "algorithm: group_size is 1, but grpo compares the plays"),
        (["sampling.top_p=0.9"], "sampling.top_p: found 0.9; a training rollout must sample from"),
        (["sampling.top_k=5"], "sampling.top_k: found 5; a training rollout must sample from"),
        (["sampling.temperature=0"], "sampling.temperature: found 0; greedy plays of a task are all alike"),
        (["updates_per_step=4", "epochs=3"], "epochs: found 3; it must divide updates_per_step (4)"),
        (["updates_per_step=8"], "updates_per_step: found 8, which cuts a step into 8 mini-batches, but it has only 4"),
        (["environments=[{id: tone}, {id: tone}]"], "environments: 2 are called 'tone'; give one of them a name"),
        (["rewards=[{id: exact}, {id: format, words: 1, name: exact}]"], "rewards: 2 are called 'exact'"),
        (["evaluation=[{name: a, environment: nth}, {name: a, environment: nth}]"], "evaluation: 2 are called 'a'"),
        (["evaluation.0.environment=nht"], "evaluation.held-out.environment: no environment is called 'nht'; did you"),
        (["evaluation.0.environment=nth-word"], "no environment is called 'nth-word'"),  # it has another name
        (
            ["evaluation.0.correct=exat"],
            "evaluation.held-out.correct: no reward is called 'exat'; did you mean 'exact'?",
        ),
        (["evaluation.0.n=4"], "evaluation.held-out.n: found 4 with sampling.temperature 0; greedy plays"),
        (["rewards.0.environments=[nht]"], "rewards.exact.environments: no environment is called 'nht'; did you mean"),
        (["rewards.0.environments=[]"], "rewards.exact.environments: is empty"),
        (["rewards.0.environments=[last-word]"], "environments.nth: no reward scores it"),
        (
            [TWO_REWARDS],
            "evaluation.held-out.correct: reward 'exact', the first reward, which is the default, does not",
        ),
        ([TWO_REWARDS, "evaluation.0.correct=exact"], "reward 'exact' does not score environment 'last-word'"),
        (["bus.max_rows=175"], "(checkpoint.every + max_staleness + 1) x groups_per_step x group_size = 176 or more"),
        (["bus.max_rows=79", "checkpoint.every=2", "max_staleness=2"], "bus.max_rows: found 79; rows are held until"),
    ],
)
def test_a_broken_rule(overrides: list[str], message: str) -> None:
    assert any(message in line for line in lines(apply(data(), overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        ["bus.max_rows=176"],
        ["bus.max_rows=80", "checkpoint.every=2", "max_staleness=2"],
        ["updates_per_step=8", "epochs=2"],
        ["evaluation.0.n=4", "evaluation.0.sampling={temperature: 0.7, top_p: 0.9}"],
        [TWO_REWARDS, "evaluation.0.correct=format"],
        [TWO_REWARDS, "evaluation.0.environment=nth"],
    ],
)
def test_what_only_just_keeps_the_rules(overrides: list[str]) -> None:
    resolve(apply(data(), overrides))


def test_several_broken_rules_are_reported_together() -> None:
    raw = data(sampling={"top_p": 0.5}, group_size=1, updates_per_step=3, epochs=2)
    assert [line.split(":")[0] for line in lines(raw)] == ["sampling.top_p", "epochs", "algorithm"]


# --- components of plugins ------------------------------------------------------------------------------------------

PICKY = """
from relax_core.hookspecs import Callback
from relax_core.interfaces import Component, ComponentConfig, Reward
from relax_core.errors import ConfigError

class Picky(Reward):
    class Config(ComponentConfig):
        steps: int = 10

    @classmethod
    def check(cls, config, run):
        if config.steps < 0:
            raise ValueError("negative")
        if run.steps != config.steps:
            yield f"steps is {run.steps}, wants {config.steps}: set it"

    async def __call__(self, trajectory):
        return 0.0

class Misspelt(Callback):
    def on_step_strat(self, run, event): ...

def relax_rewards():
    return {"picky": Component("picky_plugin:Picky")}

def relax_callbacks():
    return {"misspelt": Component("picky_plugin:Misspelt")}

class HeavyConfig(ComponentConfig):
    size: int = 1

def relax_engines():
    return {"heavy": Component("does_not_exist:Heavy", HeavyConfig)}
"""


@pytest.fixture
def picky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunConfig, Any]]:
    built_in = installed_plugins()  # looked up once per process: before there is anything of ours on the path
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "picky_plugin", raising=False)
    write_plugin(tmp_path, "picky", PICKY, version="4.2")
    installed = [*built_in, *plugins_in(tmp_path)]
    return lambda **changes: resolve(data(plugins=["picky"], **changes), installed=installed)


def test_a_component_may_refuse_the_whole_run_file(picky: Callable[..., tuple[RunConfig, Any]]) -> None:
    picky(rewards=[{"id": "picky"}])
    with refused("rewards.0: steps is 10, wants 3: set it", kind=ConfigError):
        picky(rewards=[{"id": "picky", "steps": 3}])
    with pytest.raises(
        PluginError, match=r"rewards.0: check of 'picky' \(plugin picky \(dist-picky 4.2\)\) failed: Value"
    ):
        picky(rewards=[{"id": "picky", "steps": -1}])


def test_a_misspelt_hook_of_a_listed_callback_is_found_before_it_is_built(
    picky: Callable[..., tuple[RunConfig, Any]],
) -> None:
    with refused("callbacks.0: misspelt: no hook is named on_step_strat; did you mean", kind=ConfigError):
        picky(callbacks=[{"id": "misspelt"}])


def test_a_heavy_component_is_validated_but_not_imported(picky: Callable[..., tuple[RunConfig, Any]]) -> None:
    run, stack = picky(engine={"id": "heavy", "size": 2})
    assert resolved(run, stack)["engine"] == {"id": "heavy", "size": 2}
    with refused("engine.sze: unknown key; did you mean 'size'?", kind=ConfigError):
        picky(engine={"id": "heavy", "sze": 2})


# --- the resolved file ----------------------------------------------------------------------------------------------


def test_the_resolved_file_has_every_default_and_is_a_run_file() -> None:
    run, stack = resolve(data())
    written = resolved(run, stack)
    assert written["algorithm"]["clip_low"] == 0.2 and written["engine"]["device"] == "auto"
    assert written["rewards"][0]["weight"] == 0.8 and written["rewards"][0]["name"] is None
    assert written["checkpoint"] == {"every": 50, "keep": 3}
    assert set(written["versions"]) == {"core", "modalities", "algorithms", "envs"}

    again, other = resolve(yaml.load(yaml.dump(written)))
    assert resolved(again, other) == written
    assert resolved(*resolve(json.loads(json.dumps(written)))) == written


def test_other_plugin_versions_are_refused_with_both_named() -> None:
    run, stack = resolve(data())
    installed = stack.versions["envs"]
    pinned = resolved(run, stack)
    pinned["versions"]["envs"] = "relax-rl 9.9"
    assert only(pinned) == (
        f"versions.envs: the run was made with relax-rl 9.9, installed is {installed}; "
        "install relax-rl 9.9, or take envs out of versions to go on with the other"
    )
    pinned["versions"] = {"omni": "relax-plugin-omni 0.1"}
    assert only(pinned).startswith(
        "versions.omni: the run was made with relax-plugin-omni 0.1, but plugin 'omni' is not"
    )
    assert not list(version_problems({}, stack))


# --- the JSON Schema ------------------------------------------------------------------------------------------------


def fits(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether ``value`` satisfies the part of JSON Schema that the schema of run files uses."""
    if schema is False:  # type: ignore[comparison-overlap]
        return False
    if "$ref" in schema:
        return fits(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "oneOf" in schema and sum(fits(option, value, root) for option in schema["oneOf"]) != 1:
        return False
    if "anyOf" in schema and not any(fits(option, value, root) for option in schema["anyOf"]):
        return False
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int}
    kind = schema.get("type")
    if kind == "number" and (isinstance(value, bool) or not isinstance(value, int | float)):
        return False
    if kind in kinds and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if not set(schema.get("required", ())) <= set(value):
            return False
        if schema.get("additionalProperties") is False and not set(value) <= set(known):
            return False
        return all(fits(known[key], item, root) for key, item in value.items() if key in known)
    if isinstance(value, list):
        return all(fits(schema.get("items", {}), item, root) for item in value)
    return not (isinstance(value, int | float) and value <= schema.get("exclusiveMinimum", float("-inf")))


def test_the_schema_accepts_run_files_and_refuses_misspelt_ones() -> None:
    schema = run_schema(activate([]))
    assert fits(schema, data(), schema)
    assert fits(schema, resolved(*resolve(data())), schema)
    assert fits(schema, data(engine={"device": "cpu"}), schema)  # the default engine needs no id
    for wrong in [
        data(stpes=3),
        data(steps=0),
        data(algorithm={"id": "gpro"}),
        data(algorithm={}),
        data(algorithm={"id": "grpo", "clip_lo": 1}),
        data(algorithm={"id": "grpo", "entropy": {"strat": 1, "end": 0, "steps": 3}}),
        data(rewards=[{"id": "exact", "wieght": 1}]),
        data(engine={"devcie": "cpu"}),
    ]:
        assert not fits(schema, wrong, schema), wrong


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    schema = run_schema(activate([]))
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    assert references and references <= set(schema["$defs"])
    for section in ("ComponentSection", "EnvironmentSection", "RewardSection"):
        assert section not in references


def test_the_schema_names_every_component_with_its_documentation() -> None:
    stack = activate([])
    algorithm = run_schema(stack)["$defs"]["algorithms component"]["oneOf"][0]
    assert algorithm["title"] == "grpo"
    assert algorithm["properties"]["clip_low"]["description"] == "The ratio is kept above 1 - clip_low."
    environments = run_schema(stack)["$defs"]["environments component"]["oneOf"]
    assert {option["title"] for option in environments} == set(stack.components("environments"))
    assert all("weight" in option["properties"] for option in environments)


def test_the_schema_leaves_the_models_as_they_were() -> None:
    before = copy.deepcopy(RunConfig.model_json_schema())
    run_schema(activate([]))
    assert RunConfig.model_json_schema() == before
