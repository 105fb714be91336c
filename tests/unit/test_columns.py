"""Which stages a run gets from what its algorithm needs, and what ``relax check`` says of those that cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_core.check import static_problems
from relax_core.check_deep import deep_problems
from relax_core.config.columns import StagePlan, planned_stages
from relax_core.config.resolve import problems, resolve, resolved
from relax_core.config.schema import ComponentSection
from relax_core.errors import RelaxError
from relax_core.interfaces import Component
from relax_core.plugins import Provided, Stack, activate
from relax_core.run import Run
from relax_core.testing.runs import TEXT_RUN
from relax_core.testing.training import tiny_run

KL = {"id": "grpo", "kl": {"coefficient": 0.01}}
MODEL = {"id": "text", "tiny": {"words": ["last", "of"]}}
DISTILLED = {"teacher_logprobs", "topk_ids", "teacher_topk_logprobs"}


def section(**settings: Any) -> ComponentSection:
    return ComponentSection.model_validate(settings)


def planned(needs: set[str], *stages: ComponentSection, **more: Component) -> tuple[list[StagePlan], list[str]]:
    """Of an algorithm ``none`` that needs these; ``more`` are stages of a plugin."""
    run = tiny_run(stages=stages)
    stack = activate(())
    components = {kind: dict(found) for kind, found in stack._components.items()}
    components["stages"] |= {id: Provided(component, "mine", "plugin mine") for id, component in more.items()}
    stack = Stack(stack._manager, stack.versions, components)
    return planned_stages(run.config, stack, cast(Any, SimpleNamespace(needs=frozenset(needs))))


def run_data(**changes: Any) -> dict[str, Any]:
    return TEXT_RUN | changes


def refused(**changes: Any) -> list[str]:
    with pytest.raises(RelaxError) as error:
        resolve(run_data(**changes))
    return list(problems(error.value))


# --- plans ------------------------------------------------------------------------------------------------------------


def test_nothing_is_needed_beyond_what_the_trainer_makes() -> None:
    assert planned(set()) == ([], [])
    assert planned({"old_logprobs"}) == ([], [])


def test_a_stage_that_is_needed_and_not_listed_has_its_defaults() -> None:
    plans, found = planned({"ref_logprobs", "old_logprobs"})
    assert found == []
    assert plans == [StagePlan("stages.reference", section(id="reference"), frozenset({"ref_logprobs"}))]


def test_a_listed_stage_keeps_its_settings_and_makes_what_was_asked() -> None:
    listed = section(id="teacher", model=MODEL, top_k=4)
    plans, found = planned({*DISTILLED, "ref_logprobs"}, section(id="reference", refresh=3), listed)
    assert found == []
    assert plans == [
        StagePlan("stages.0", section(id="reference", refresh=3), frozenset({"ref_logprobs"})),
        StagePlan("stages.1", listed, frozenset(DISTILLED)),
    ]


def test_a_listed_stage_that_nothing_needs() -> None:
    plans, found = planned(set(), section(id="reference"))
    assert plans == [] and found == [
        "stages.0: reference makes ref_logprobs, which none with its settings does not need: remove it, or set what "
        "needs it"
    ]


def test_a_stage_that_is_listed_twice() -> None:
    _, found = planned({"ref_logprobs"}, section(id="reference"), section(id="reference", refresh=3))
    assert found == ["stages.1: reference is listed already, as stages.0: leave one out"]


def test_a_column_that_nobody_makes() -> None:
    assert planned({"ref_logprob"})[1] == [
        "algorithm: none needs the column 'ref_logprob', which no stage makes; did you mean 'ref_logprobs'?: list its "
        "plugin"
    ]


def test_a_column_that_two_make_comes_from_the_listed_one() -> None:
    other = Component("relax_core.torch.reference:Reference", makes=frozenset({"ref_logprobs"}), config=None)
    plans, found = planned({"ref_logprobs"}, section(id="reference"), other=other)
    assert [plan.section.id for plan in plans] == ["reference"] and found == []
    assert planned({"ref_logprobs"}, other=other)[1] == [
        "algorithm: none needs the column 'ref_logprobs': reference and other make it; list one of them under stages"
    ]
    _, found = planned({"ref_logprobs"}, section(id="reference"), section(id="other"), other=other)
    assert found[0].endswith("reference and other make it; keep one of them")


# --- settings of the settings -----------------------------------------------------------------------------------------


def test_a_teacher_needs_a_model() -> None:
    assert planned({"teacher_logprobs", "topk_ids"})[1] == [
        "stages: none needs teacher_logprobs and topk_ids of the stage 'teacher', whose model must be given: write "
        "stages: [{id: teacher, model: {...}}]"
    ]
    assert planned({"teacher_logprobs"}, section(id="teacher", model=MODEL))[1] == []


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"id": "txt", "tiny": {}}, "stages.0.model.id: no model has the id 'txt'; did you mean 'text'?"),
        (
            {"id": "text", "tiny": {"words": ["a"], "hiden": 3}},
            "stages.0.model.tiny.hiden: unknown key; did you mean 'hidden'?",
        ),
        ({"id": "text", "path": "/no/such"}, "/no/such holds no config.json"),
        ({"tiny": {"words": ["a"]}}, "stages.0.model.id: is missing"),
        ("text", "stages.0.model: found 'text'; must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_stages_model_is_said_by_path(model: object, line: str) -> None:
    (found,) = refused(algorithm=KL, stages=[{"id": "reference", "model": model}])
    assert line in found and "\n" not in found and found.startswith("stages.0.model")


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"id": "referense"}, "stages.0.id: no stage has the id 'referense'; did you mean 'reference'?"),
        ({"id": "reference", "refresh": 0}, "stages.0.refresh: found 0; must be greater than 0"),
        ({"id": "reference", "every": 2}, "stages.0.every: unknown key"),
        ({"id": "teacher", "model": MODEL}, "stages.0: teacher makes"),
    ],
)
def test_what_is_wrong_with_a_stage_is_said_by_path(stage: dict[str, Any], line: str) -> None:
    (found,) = refused(algorithm=KL, stages=[stage])
    assert found.startswith(line)


def test_a_stage_without_a_need_is_refused_in_one_line() -> None:
    (found,) = refused(stages=[{"id": "reference"}])
    assert found.startswith("stages.0: reference makes ref_logprobs, which grpo with its settings does not need")


# --- relax check ------------------------------------------------------------------------------------------------------


def checked(deep: bool = False, **changes: Any) -> tuple[list[str], str]:
    config, stack = resolve(run_data(**changes))
    said: list[str] = []
    found = (deep_problems if deep else static_problems)(Run(config, Path("run"), stack), said.append)
    return found, "\n".join(said)


def test_the_plan_names_the_stages() -> None:
    def lines(**changes: Any) -> list[str]:
        found, plan = checked(**changes)
        assert found == []
        return [" ".join(line.split()) for line in plan.splitlines() if line.startswith("stage ")]

    listed: list[dict[str, Any]] = [{"id": "reference", "refresh": 2}]
    initial = "stage reference makes ref_logprobs with the run's own model and its initial weights"
    assert lines(algorithm=KL, stages=listed) == [f"{initial} (refresh: 2)"]
    assert lines(algorithm=KL) == [initial]
    listed = [{"id": "reference", "model": MODEL}]
    assert lines(algorithm=KL, stages=listed) == [
        "stage reference makes ref_logprobs with a model of its own (model: {id: text, tiny: {words: [last, of]}})"
    ]
    assert lines(algorithm={"id": "ppo"}) == ["stage critic makes values"]
    assert lines() == []


@pytest.mark.parametrize(("refresh", "noted"), [(5, False), (6, True), (50, True), (None, False)])
def test_a_reference_that_is_never_refreshed_is_worth_a_note(refresh: int | None, noted: bool) -> None:
    found, said = checked(algorithm=KL, stages=[{"id": "reference", "refresh": refresh}])
    assert found == []
    line = f"note: stages.0.refresh is {refresh} and steps is 6: no step sees a refreshed reference; it stays what it"
    assert (line in said) is noted and said.count("note: stages") == noted


def test_the_deep_check_compares_vocabularies() -> None:
    words = TEXT_RUN["model"]["tiny"]["words"]
    other = {"id": "text", "tiny": {"words": words[:-1]}}
    (found,), _ = checked(deep=True, algorithm=KL, stages=[{"id": "reference", "model": other}])
    assert found.startswith("stages.0.model: has a vocabulary of 19 tokens, the run's model one of 20")
    own = {"id": "text", "tiny": {"words": words, "hidden": 16, "heads": 2, "seed": 9}}
    assert checked(deep=True, algorithm=KL, stages=[{"id": "reference", "model": own}])[0] == []


def test_a_resolved_run_with_a_nested_model_is_a_run_file_again() -> None:
    config, stack = resolve(run_data(algorithm=KL, stages=[{"id": "reference", "model": TEXT_RUN["model"]}]))
    data = resolved(config, stack)
    assert data["stages"][0]["model"] == TEXT_RUN["model"] and data["stages"][0]["refresh"] is None
    assert resolve(data)[0].stages[0].settings["model"] == TEXT_RUN["model"]


def test_nothing_heavy_is_imported_to_check_stages() -> None:
    code = f"""
import sys
from relax_core.config.resolve import resolve
from relax_core.check import static_problems
from relax_core.run import Run
from pathlib import Path
data = {run_data(algorithm=KL, stages=[{"id": "reference", "model": TEXT_RUN["model"]}])!r}
config, stack = resolve(data)
print(static_problems(Run(config, Path("run"), stack), lambda line: None), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["[]", "False"], done.stderr
