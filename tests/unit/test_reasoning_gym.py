"""Environment ``reasoning-gym``: tasks of the package, and one-line errors. Most need the extra ``gym``."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from relax_core.errors import ConfigError
from relax_envs.reasoning_gym import ReasoningGym


def environment(**settings: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGym.Config.model_validate_json(json.dumps({"dataset": "gcd", **settings})))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'relax-rl\[gym\]'"):
        environment().tasks("train")


def test_splits_differ_and_repeat() -> None:
    pytest.importorskip("reasoning_gym")
    one, other = environment(size=20, eval_size=5), environment(size=20, eval_size=5)
    train, held_out = one.tasks("train"), one.tasks("eval")
    assert (len(train), len(held_out)) == (20, 5)
    assert [t.messages for t in train] == [t.messages for t in other.tasks("train")]
    assert [t.messages for t in train][:5] != [t.messages for t in held_out]
    assert all(str(t.answer).isdigit() for t in train)


def test_an_instruction_is_appended() -> None:
    pytest.importorskip("reasoning_gym")
    assert environment(instruction="Be brief.").tasks("train")[0].messages[0].text.endswith("\nBe brief.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"dataset": "gcdd"}, "did you mean 'gcd'"), ({"options": {"no_such": 1}}, "options of 'gcd'")],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=said):
        environment(**settings).tasks("train")
