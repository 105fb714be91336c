"""Overrides of a run file's values from the command line."""

from __future__ import annotations

from typing import Any

import pytest

from relax_core.config.overrides import apply
from relax_core.errors import ConfigError


def data() -> dict[str, Any]:
    return {
        "name": "test",
        "steps": 10,
        "model": {"id": "text", "path": "here"},
        "environments": [{"id": "colour", "name": "image"}, {"id": "tone"}],
        "rewards": [{"id": "exact", "weight": 1.0}, {"id": "exact", "name": "v1.5"}, {"id": "same"}, {"id": "same"}],
        "evaluation": [{"name": "text", "environment": "tone"}],
    }


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("steps=20", ["steps"], 20),
        ("model.path=there", ["model", "path"], "there"),
        ("model.lr=1e-6", ["model", "lr"], 1e-6),
        ("model.path=a=b", ["model", "path"], "a=b"),
        ("model.path=", ["model", "path"], None),
        ("model.tiny.words=[a, b]", ["model", "tiny"], {"words": ["a", "b"]}),
        ("checkpoint.every=5", ["checkpoint"], {"every": 5}),
        ("rewards.0.weight=0.5", ["rewards", 0, "weight"], 0.5),
        ("rewards.exact.weight=0.5", ["rewards", 0, "weight"], 0.5),
        ("rewards.v1.5.weight=2", ["rewards", 1, "weight"], 2),
        ("environments.image.weight=2", ["environments", 0, "weight"], 2),
        ("environments.tone.weight=2", ["environments", 1, "weight"], 2),
        ("environments.1={id: motion}", ["environments", 1], {"id": "motion"}),
        ("evaluation.text.size=64", ["evaluation", 0, "size"], 64),
        ("evaluation.text.sampling.temperature=1", ["evaluation", 0, "sampling"], {"temperature": 1}),
        ("plugins=[omni]", ["plugins"], ["omni"]),
        (" steps =3", ["steps"], 3),
    ],
)
def test_an_override_sets_one_value(override: str, place: list[Any], value: Any) -> None:
    before: Any = data()
    after: Any = apply(data(), [override])
    found = after
    for part in place:
        found = found[part]
    assert found == value

    # Nothing else has changed: put the old value back, or take the new one out again.
    holder, old = after, before
    for part in place[:-1]:
        holder, old = holder[part], old[part]
    if isinstance(old, list) or place[-1] in old:
        holder[place[-1]] = old[place[-1]]
    else:
        del holder[place[-1]]
    assert after == before


def test_the_data_itself_stays_as_it_was() -> None:
    before = data()
    apply(before, ["rewards.0.weight=3", "steps=1"])
    assert before == data()


def test_the_last_of_two_overrides_holds() -> None:
    assert apply(data(), ["steps=1", "steps=2"])["steps"] == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "override 'steps': write it as path=value"),
        ("=3", "override '=3': write it as path=value"),
        ("stpes=3", "override stpes: a run file has no 'stpes'; did you mean 'steps'?"),
        ("evaluaton.text.size=3", "a run file has no 'evaluaton'; did you mean 'evaluation'?"),
        ("evaluation.txt.size=3", "override evaluation.txt.size: evaluation has no item 'txt'; did you mean 'text'?"),
        ("environments.7.weight=3", "environments has no item '7'; there are image, tone, 0 to 1"),
        ("environments.-1.weight=3", "environments has no item '-1'"),
        ("rewards.same.weight=3", "rewards has 2 items named 'same'; use an index"),
        ("steps.x=3", "override steps.x: steps is 10 and has nothing inside"),
        ("model.path.x=3", "override model.path.x: model.path is 'here' and has nothing inside"),
        ("steps=[1", "override 'steps=[1': line 1: while parsing a flow sequence"),
        ("steps={a: 1, a: 2}", "'a' is already set in line 1"),
        ("model..path=1", "override model..path: a part of the path is empty"),
        ("model.=1", "override model.: a part of the path is empty"),
    ],
)
def test_an_override_that_fits_nowhere_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(data(), [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
