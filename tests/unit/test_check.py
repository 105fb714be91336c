"""The static and the deep check: the plan, wrong rows, and a template tried turn by turn."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax_core.bad_rows import sample_problem
from relax_core.check import package_problems, static_problems
from relax_core.check_data import HEAD, RANDOM, sampled
from relax_core.check_deep import deep_problems, encoding_problems, placeholder_problems
from relax_core.check_template import difference
from relax_core.config import yaml
from relax_core.config.resolve import resolve
from relax_core.errors import PluginError
from relax_core.plugins import installed_plugins
from relax_core.run import Run
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.types import Encoded, Image, MediaRef, Task, user

WORDS = ["last", "of", "word", "?", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "star", "rain", "fire"]


def data(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "test",
        "steps": 10,
        "groups_per_step": 4,
        "group_size": 4,
        "model": {"id": "text", "tiny": {"words": WORDS}},
        "environments": [{"id": "last-word"}],
        "rewards": [{"id": "exact"}],
        "algorithm": {"id": "grpo"},
        "evaluation": [{"name": "held-out", "environment": "last-word", "size": 32}],
    }
    return base | changes


Check = Callable[..., tuple[list[str], str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """``check(source, deep=False, **changes)``: (problems, what was reported) of a run with a plugin of that source."""
    built_in = installed_plugins()  # looked up once per process: before there is anything of ours on the path
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_plugin", raising=False)

    def call(source: str = "", deep: bool = False, **changes: Any) -> tuple[list[str], str]:
        write_plugin(tmp_path, "mine", textwrap.dedent(source))
        installed = [*built_in, *plugins_in(tmp_path)]
        config, stack = resolve(data(plugins=["mine"], **changes), installed=installed)
        said: list[str] = []
        run = Run(config, tmp_path / "run", stack)
        return (deep_problems if deep else static_problems)(run, said.append), "\n".join(said)

    return call


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_good_run(check: Check) -> None:
    problems, plan = check(
        max_staleness=2,
        updates_per_step=4,
        epochs=2,
        environments=[{"id": "last-word", "weight": 3}, {"id": "nth-word", "name": "nth"}],
        evaluation=[{"name": "a", "environment": "nth", "every": 1, "at_start": True, "n": 4, "sampling": {}}],
    )
    assert problems == []
    for line in [
        "plugins                built-in (relax-rl",
        "runtime                local, overlap turns",
        "steps                  10, each of 4 groups x 4 = 16 plays",
        "updates                4 a step, in 2 mini-batches x 2 epochs",
        "staleness              up to 2 policy versions behind, order started, interrupt continue",
        "environment last-word  2,048 tasks, 75% of the groups, 0.01 passes over them",
        "environment nth        ",
        "evaluation a           all tasks of nth, 4 plays each, temperature 1, at the start and every 1 step and",
        "checkpoints            every 50 steps and at the end, the newest 3 are kept",
    ]:
        assert any(found.startswith(line) for found in plan.splitlines()), f"{line!r} not in\n{plan}"


def test_the_static_check_works_with_torch_blocked(tmp_path: Path) -> None:
    """As it is where no GPU package is installed: plugins, schema, rows and plan need none."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.dump(data()))
    code = f"""
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "transformers"):
                    raise ModuleNotFoundError(f"{{name}} is blocked")

        sys.meta_path.insert(0, Refuse())
        from relax_core.cli import main
        for call in (["check", {str(file)!r}], ["plugins"], ["plugins", "grpo"], ["schema"], ["--help"]):
            try:
                main(call)
            except SystemExit as stop:
                assert not stop.code, (call, stop.code)
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert f"ok: {file}" in done.stdout
    assert "2,048 tasks, 100% of the groups" in done.stdout


NOTING = """
from relax_algorithms.grpo import Grpo
from relax_core.interfaces import Component

class Noting(Grpo):
    @classmethod
    def notes(cls, config, run):
        {body}

def relax_algorithms():
    return {{"noting": Component("mine_plugin:Noting")}}
"""


def test_what_an_algorithm_notes_is_said(check: Check) -> None:
    source = NOTING.format(body='yield f"{run.steps} steps with clip_low {config.clip_low}"')
    problems, said = check(source, algorithm={"id": "noting", "clip_low": 0.1})
    assert problems == []
    assert "note: algorithm: 10 steps with clip_low 0.1" in said.splitlines()


@pytest.mark.parametrize("staleness", [0, 2])
def test_stale_samples_without_a_correction_are_worth_a_note(check: Check, staleness: int) -> None:
    problems, said = check(max_staleness=staleness)
    assert problems == []
    assert (f"note: algorithm: max_staleness is {staleness}, and nothing corrects for" in said) is (staleness > 0)


def test_notes_that_fail_name_the_plugin(check: Check) -> None:
    with pytest.raises(PluginError, match=r"^algorithm: notes of 'noting' \(plugin mine .*\) failed: KeyError: 'x'$"):
        check(NOTING.format(body='raise KeyError("x")'), algorithm={"id": "noting"})


# --- packages and rows ----------------------------------------------------------------------------------------------


def test_both_decord_distributions_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    assert list(package_problems()) == []
    for name, version in (("decord", "0.6.0"), ("decord2", "3.4.0")):
        info = tmp_path / "site" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    problems, _ = check()
    assert problems == [
        "environment: decord 0.6.0 and decord2 3.4.0 are both installed; "
        "they install the same module: uninstall decord, decord2 is the maintained one"
    ]


ENVIRONMENT = """
from pathlib import Path
from relax_core.interfaces import Component, ComponentConfig, Environment
from relax_core.types import Image, Message, Task, user

GOOD = Task("good", (user("last of cat ?"),), "cat")

def tasks_of(split):
    {body}

class Odd(Environment):
    class Config(ComponentConfig): ...

    def tasks(self, split):
        return tasks_of(split)

def relax_environments():
    return {{"odd": Component("mine_plugin:Odd")}}
"""

ODD: dict[str, Any] = {"environments": [{"id": "odd"}], "evaluation": []}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return []", "environments.odd: the train split has no task: check its path and split"),
        (
            "return None",
            "environments.odd: the train split cannot be read: TypeError: object of type 'NoneType' has no",
        ),
        ("raise OSError('disk\\nfull')", "environments.odd: the train split cannot be read: OSError: disk full"),
        (
            "return [GOOD, 'text']",
            "environments.odd: 1 of 2 train tasks looked at are wrong, first: task 1 is a str; tasks() must give",
        ),
        ("return [Task('', GOOD.messages)]", "first: task 0 has the id ''; an id is text that is unique"),
        ("return [Task('a', ())]", "first: task 0 'a' has no message"),
        ("return [Task('a', (Message('user', ()),))]", "first: task 0 'a' has only empty messages"),
        ("return [GOOD, GOOD]", "first: task 1 has the id 'good' of task 0: ids must be unique"),
        (
            "return [GOOD, Task('a', (user(Image(Path('no.png'))),))]",
            "image no.png: no such file: 1 of 2 rows are bad",
        ),
    ],
)
def test_wrong_rows_are_found(check: Check, body: str, problem: str) -> None:
    (found,), plan = check(ENVIRONMENT.format(body=body), **ODD)
    assert problem in found
    assert "\n" not in found
    assert all(line.startswith("note: ") for line in plan.splitlines())  # no plan for what cannot run


def test_a_row_that_raises_is_named(check: Check) -> None:
    body = "return type('Lazy', (), {'__len__': lambda s: 3, '__getitem__': lambda s, i: [GOOD][i]})()"
    (found,), _ = check(ENVIRONMENT.format(body=body), **ODD)
    assert "2 of 3 train tasks looked at are wrong, first: task 1: IndexError: list index out of range" in found


def test_an_evaluation_needs_its_split_and_enough_of_it(check: Check) -> None:
    body = "return [GOOD] if split == 'train' else [GOOD] * 0"
    evaluation = [{"name": "a", "environment": "odd", "size": 2}]
    (found,), _ = check(ENVIRONMENT.format(body=body), environments=ODD["environments"], evaluation=evaluation)
    assert found == "environments.odd: the eval split has no task: check its path and split"


def test_an_evaluation_larger_than_its_split_is_refused(check: Check) -> None:
    (found,), _ = check(evaluation=[{"name": "a", "environment": "last-word", "size": 100_000}])
    assert found.startswith("evaluation.a.size: found 100000, the eval split of last-word has ")


def test_a_reward_that_cannot_be_built_is_found(check: Check) -> None:
    source = """
        from relax_core.interfaces import Component, Reward
        class Broken(Reward):
            def __init__(self, config):
                raise ImportError("pip install judge")
            async def __call__(self, trajectory): ...
        def relax_rewards():
            return {"broken": Component("mine_plugin:Broken")}
        """
    (found,), _ = check(source, rewards=[{"id": "broken"}])
    assert found == (
        "rewards.0: plugin mine (dist-mine 1.0): reward 'broken' cannot be built: ImportError: pip install judge"
    )


def test_places_that_are_looked_at() -> None:
    assert sampled(5, seed=0) == [0, 1, 2, 3, 4]
    assert sampled(HEAD + RANDOM, seed=0) == list(range(HEAD + RANDOM))
    for size in (HEAD + RANDOM + 1, 1000, 10**9):
        places = sampled(size, seed=0)
        assert places == sorted(set(places)) and places[:HEAD] == list(range(HEAD))
        assert HEAD + RANDOM // 2 < len(places) <= HEAD + RANDOM and places[-1] < size
    assert places[-1] > 10**8 and places != sampled(size, seed=1)


# --- the deep check -------------------------------------------------------------------------------------------------


def test_the_deep_check_of_a_good_run(check: Check) -> None:
    problems, said = check(deep=True)
    assert problems == []
    assert "environments.last-word: train: 64 tasks encoded, prompts of 9 to 9 tokens" in said
    assert "a prompt as the model reads it: 'user last of " in said
    assert "a new sample starts" not in said
    assert "environments.last-word: template: same sample: user after answer, tool result after call, two tool" in said


ADAPTER = """
from dataclasses import replace
from relax_core.interfaces import Component, Extended
from relax_core.models.config import TextConfig

def relax_models():
    return {{"odd": Component("mine_adapter:Odd", TextConfig)}}
"""


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "def extend(self, history, past, new):\n"
            "        found = super().extend(history, past, new)\n"
            "        return Extended(Encoded(found.new.ids[1:]))",
            "environments.last-word: train: 8 of 64 tasks tried fail, first: task '",
        ),
        ("def encode(self, history):\n        raise ValueError('no')", "cannot be encoded: ValueError: no"),
        ("def encode(self, history):\n        return Encoded([])", "is encoded to no token"),
        (
            "def encode(self, history):\n        return Encoded([*super().encode(history).ids, self.vocab_size])",
            "the vocabulary has ",
        ),
        (
            "def forward_inputs(self, segments, width):\n        return super().forward_inputs(segments, width + 1)",
            "forward_inputs gives input_ids of shape (1, 10), not (1, 9)",
        ),
    ],
)
def test_an_adapter_that_is_wrong_is_found(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, problem: str
) -> None:
    monkeypatch.delitem(sys.modules, "mine_adapter", raising=False)
    (tmp_path / "mine_adapter.py").write_text(
        "from relax_core.interfaces import Extended\nfrom relax_core.models.text import TextAdapter\n"
        f"from relax_core.types import Encoded\n\nclass Odd(TextAdapter):\n    {body}\n"
    )
    problems, _ = check(ADAPTER.format(), deep=True, model={"id": "odd", "tiny": {"words": WORDS}})
    assert problems and all("\n" not in line for line in problems)
    assert problem in problems[0]


def test_tokens_that_differ_from_the_template_are_shown(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mine_adapter", raising=False)
    (tmp_path / "mine_adapter.py").write_text(
        "from relax_core.interfaces import Extended\nfrom relax_core.models.text import TextAdapter\n"
        "from relax_core.types import Encoded\n\nclass Odd(TextAdapter):\n"
        "    def extend(self, history, past, new):\n"
        "        return Extended(Encoded(super().extend(history, past, new).new.ids[::-1]))\n"
    )
    problems, _ = check(ADAPTER.format(), deep=True, model={"id": "odd", "tiny": {"words": WORDS}})
    assert "turn 1: tokens differ from the template's at " in problems[0]
    assert "extend() must go on as it does, or say Rewritten" in problems[0]


FORGETFUL = """
{%- for m in messages -%}
{%- if m.role == 'user' and not loop.last %}{% set shown = 'cat' %}{% else %}{% set shown = m.content %}{% endif -%}
{{ m.role }} {{ shown }}{% if m.role == 'assistant' %}<|im_end|>{% endif %} {% endfor -%}
{%- if add_generation_prompt %}assistant{% endif -%}
"""


def test_a_template_that_rewrites_the_past_is_reported_and_no_error(check: Check, tmp_path: Path) -> None:
    """It forgets all user messages but the last: each turn of such a model is a sample of its own."""
    template = tmp_path / "template.jinja"
    template.write_text(FORGETFUL.strip().replace("\n", ""))
    model = {"id": "text", "tiny": {"words": WORDS}, "chat_template": str(template)}
    problems, said = check(deep=True, model=model)
    assert problems == []
    assert "a new sample starts at 16 of 16 later turns, first: the template changes what came before the last" in said
    assert "template: new sample: user after answer, tool result after call, two tool results after two calls" in said


def test_placeholders_are_exactly_the_spans_of_media() -> None:
    def problems(ids: list[int], *media: MediaRef, banned: tuple[int, ...] = (9, 8)) -> list[str]:
        return list(placeholder_problems(Encoded(ids, media), banned))

    image, audio = MediaRef("image", "a", 1, 2), MediaRef("audio", "b", 4, 1)
    assert problems([1, 9, 9, 2, 8, 3], image, audio) == []
    assert problems([1, 2, 3]) == []
    assert problems([1, 9, 9, 9, 8, 3], image, audio) == ["4 placeholders are in the tokens, 3 belong to media"]
    assert problems([1, 9, 5, 2, 8, 3], image, audio) == [
        "placeholder ids [5] are not banned: the policy could sample them"
    ]
    for wrong in [(audio, image), (image, image), (MediaRef("image", "a", 5, 2),), (MediaRef("image", "a", 1, 0),)]:
        (line,) = problems([1, 9, 9, 2, 8, 3], *wrong)
        assert "overlaps another, or is empty or outside of the 6 tokens" in line


def test_media_tokens_and_positions_must_fit_the_task() -> None:
    features = {"a": {"pixels": np.zeros(1)}}
    media: Any = SimpleNamespace(get=features.__getitem__)
    adapter: Any = SimpleNamespace(
        vocab_size=10,
        banned_token_ids=(9,),
        forward_inputs=lambda segments, width: {"input_ids": np.array([segments[0].ids])},
    )
    task = Task("t", (user(Image(b"..."), "what?"),))

    def problems(ids: list[int], refs: tuple[MediaRef, ...], positions: Any = None) -> list[str]:
        return list(encoding_problems(adapter, media, task, Encoded(ids, refs, positions)))

    image = MediaRef("image", "a", 1, 2)
    assert problems([1, 9, 9, 2], (image,), np.zeros((3, 4), np.int32)) == []
    assert problems([1, 9, 9, 2], (image,), np.zeros((3, 3), np.int32)) == [
        "positions have the shape (3, 3), not (3, 4)"
    ]
    assert problems([1, 2], ()) == ["media are 1 image, in the tokens are none"]
    assert problems([1, 9, 9, 12], (image,)) == ["ids run from 1 to 12, the vocabulary has 10"]
    with pytest.raises(KeyError):  # reported by the caller, with the task's id
        problems([1, 9, 9, 2], (replace(image, key="gone"),))


def test_how_a_conversation_differs_from_the_template() -> None:
    image = MediaRef("image", "a", 0, 1)
    axes = np.zeros((3, 2), np.int32)
    same = Encoded([1, 2], (image,), axes)
    assert list(difference(same, Encoded([1, 2], (image,), axes.copy()))) == []
    assert "at 1: [2] of 2, the template has [3, 4] of 3" in next(difference(same, Encoded([1, 3, 4])))
    assert "at 2: [] of 2, the template has [5] of 3" in next(difference(same, Encoded([1, 2, 5])))
    moved = Encoded([1, 2], (replace(image, start=1),), axes)
    assert list(difference(same, moved)) == [
        "media are at ['image at tokens 0 to 1'], the template has ['image at tokens 1 to 2']"
    ]
    assert list(difference(same, Encoded([1, 2], (image,), axes + 1))) == [
        "positions differ from those of the whole history"
    ]
    assert list(difference(same, Encoded([1, 2], (image,)))) == ["positions differ from those of the whole history"]


# --- how many bad rows are too many -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "size", "fraction", "problem"),
    [
        (range(2), 20, 0.1, None),
        (range(3), 20, 0.1, "3 of 20 rows are bad"),
        (range(5), 10, 0.5, None),
        (range(10), 10, 0.9, "10 of 10 rows are bad"),
        (range(10), 10_000, 0.001, None),  # all at the beginning: a thousandth of the whole
        (range(11), 10_000, 0.001, "11 of 10000 rows are bad"),
        (range(100, 256), 10_000, 0.1, None),
        (range(10_000), 10_000, 0.5, "rows chosen at random are bad"),
        (range(0, 10_000, 2), 10_000, 0.1, "rows chosen at random are bad"),
        (range(0, 10_000, 20), 10_000, 0.1, None),
    ],
)
def test_when_a_sample_tells_of_too_many_bad_rows(bad: range, size: int, fraction: float, problem: str | None) -> None:
    places = sampled(size, 0)
    found = sample_problem(set(bad) & set(places), places, size, HEAD, fraction)
    assert found is None if problem is None else found is not None and problem in found
