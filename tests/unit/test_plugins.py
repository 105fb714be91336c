"""Plugins: what is activated, in which order hooks run, what is refused, and what errors name."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_core import hookspecs, interfaces
from relax_core.catalog import catalog
from relax_core.errors import ConfigError, PluginError
from relax_core.hook_manager import SPECS, hook_problems, is_chained
from relax_core.hookspecs import API_VERSION, Callback, GroupEvent, StepEnd, StepStart
from relax_core.interfaces import Component, Environment, Reward
from relax_core.plugins import BASES, BUILT_IN, Stack, activate, installed_plugins
from relax_core.testing.errors import refused
from relax_core.testing.plugins import plugins_in, write_empty_suites, write_plugin

ROOT = Path(__file__).resolve().parents[2]
RUN = cast(Any, SimpleNamespace(name="a run"))
GROUP = cast(GroupEvent, SimpleNamespace(group="a group"))

Activate = Callable[..., Stack]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a plugin into a folder that holds empty suites and is on the path; forget its module afterwards."""
    write_empty_suites(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def call(name: str, source: str = "", distribution: str = "", version: str = "1.0", where: str = "") -> Path:
        folder = tmp_path / where
        monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)
        return write_plugin(folder, name, textwrap.dedent(source), distribution, version)

    for name in BUILT_IN:
        monkeypatch.delitem(sys.modules, f"{name}_plugin", raising=False)
    return call


@pytest.fixture
def start(tmp_path: Path, write: Callable[..., Path]) -> Activate:
    """``start("one", "two")``: the stack of these plugins, out of all that were written."""
    return lambda *names, more=(): activate(names, installed=plugins_in(tmp_path, *more))


# --- which plugins are active ---------------------------------------------------------------------------------------


def test_the_built_in_suites_are_always_active_and_first(start: Activate, write: Callable[..., Path]) -> None:
    write("other", version="2.1")
    stack = start("other")
    assert list(stack.versions) == [*BUILT_IN, "other"]
    assert stack.versions["other"] == "dist-other 2.1"


def test_only_named_plugins_are_imported(start: Activate, write: Callable[..., Path]) -> None:
    write("boom", "raise RuntimeError('imported')")
    write("good")
    start("good")
    assert "boom_plugin" not in sys.modules
    with refused("plugin boom (dist-boom 1.0) cannot be imported: RuntimeError: imported", kind=PluginError):
        start("boom")


def test_an_unknown_plugin_names_the_nearest(start: Activate, write: Callable[..., Path]) -> None:
    write("deepeyes")
    with refused("plugins: 'depeyes' is not installed; did you mean 'deepeyes'?", kind=PluginError):
        start("depeyes")
    with refused("plugins: 'zzz' is not installed; installed are deepeyes", kind=PluginError):
        start("zzz")


def test_one_name_from_two_distributions_names_both(
    start: Activate, write: Callable[..., Path], tmp_path: Path
) -> None:
    write("same", distribution="dist-a", version="1.2")
    write("same", distribution="dist-b", version="0.3", where="elsewhere")
    with refused("'same' is provided by dist-a 1.2 and by dist-b 0.3; uninstall one", kind=PluginError):
        start("same", more=[tmp_path / "elsewhere"])


def test_a_plugin_is_listed_once_and_never_a_suite(start: Activate, write: Callable[..., Path]) -> None:
    write("one")
    with refused("plugins: 'one' is listed twice", kind=PluginError):
        start("one", "one")
    with refused("plugins: 'envs' is built in", kind=PluginError):
        start("envs")


def test_another_hook_api_is_refused(start: Activate, write: Callable[..., Path]) -> None:
    write("now", f"relax_api = {API_VERSION}")
    start("now")
    write("later", f"relax_api = {API_VERSION + 1}", version="3.0")
    with refused(f"plugin later (dist-later 3.0) is written for hook API {API_VERSION + 1}", kind=PluginError):
        start("later")


def test_the_installed_suites_are_found_by_their_entry_points() -> None:
    found = {entry.name: entry.dist for entry in installed_plugins() if entry.name in BUILT_IN}
    assert set(found) == set(BUILT_IN)
    assert {dist.name for dist in found.values() if dist} == {"relax-rl"}
    assert installed_plugins() is installed_plugins()  # looked up once


def test_two_run_files_that_differ_in_plugins_give_two_stacks(start: Activate, write: Callable[..., Path]) -> None:
    for name in ("one", "two"):
        write(
            name,
            f"""
            from relax_core.interfaces import Component
            def relax_rewards():
                return {{"{name}": Component("x:Y")}}
            """,
        )
    assert list(start("one").components("rewards")) == ["one"]
    assert list(start("two").components("rewards")) == ["two"]
    assert list(start("two", "one").components("rewards")) == ["two", "one"]


# --- order, chains --------------------------------------------------------------------------------------------------

NOTES = """
def on_step_end(run, event): event.metrics.append("{0}")
def filter_group(value, event): return (value or "") + "{0}"
"""


class Note(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, run: Any, event: Any) -> None:
        event.metrics.append(self.name)

    def filter_group(self, run: Any, value: str | None, event: Any) -> str | None:
        return (value or "") + self.name


def test_listed_first_runs_first(start: Activate, write: Callable[..., Path]) -> None:
    write("a", NOTES.format("a"))
    write("b", NOTES.format("b"))
    stack = start("b", "a")
    stack.add_callback(Note("1"), "callbacks.0")
    stack.add_callback(Note("2"), "callbacks.1")

    said: list[str] = []
    stack.hook.on_step_end(run=RUN, event=StepEnd(0, cast(Any, said)))
    assert said == ["b", "a", "1", "2"]
    assert stack.pipe("filter_group", RUN, None, GROUP) == "ba12"
    assert list(stack.callbacks) == ["callbacks.0", "callbacks.1"]


def test_options_of_pluggy_still_hold_after_callbacks_were_added(start: Activate, write: Callable[..., Path]) -> None:
    write(
        "last",
        """
        from relax_core.hookspecs import impl
        @impl(trylast=True)
        def on_step_end(event): event.metrics.append("last")
        """,
    )
    write("first", "from relax_core.hookspecs import impl\n@impl(tryfirst=True)" + NOTES.format("first"))
    stack = start("last", "first")
    stack.add_callback(Note("callback"), "callbacks.0")
    said: list[str] = []
    stack.hook.on_step_end(run=RUN, event=StepEnd(0, cast(Any, said)))
    assert said == ["first", "callback", "last"]


def test_wrappers_surround_an_event(start: Activate, write: Callable[..., Path]) -> None:
    write(
        "timer",
        """
        from relax_core.hookspecs import impl
        @impl(wrapper=True)
        def on_step_end(event):
            event.metrics.append("before")
            result = yield
            event.metrics.append("after")
            return result
        """,
    )
    stack = start("timer")
    stack.add_callback(Note("x"), "callbacks.0")
    said: list[str] = []
    stack.hook.on_step_end(run=RUN, event=StepEnd(0, cast(Any, said)))
    assert said == ["before", "x", "after"]


def test_a_pipe_without_implementations_returns_its_value(start: Activate) -> None:
    assert start().pipe("shape_rewards", RUN, [1.0, None], GROUP) == [1.0, None]


def test_a_chained_hook_must_return_the_value(start: Activate, write: Callable[..., Path]) -> None:
    write("forgot", "def shape_rewards(value): value.append(1)\ndef filter_group(value): return None")
    stack = start("forgot")
    with refused("plugin forgot (dist-forgot 1.0): shape_rewards returned None; return the", kind=PluginError):
        stack.pipe("shape_rewards", RUN, [1.0], GROUP)
    assert stack.pipe("filter_group", RUN, "a reason", GROUP) is None  # None is a value of this one


def test_methods_that_are_not_overridden_are_never_called(start: Activate) -> None:
    stack = start()
    stack.add_callback(Note("x"), "callbacks.0")
    assert not stack.hook.on_step_start.get_hookimpls()  # type: ignore[attr-defined]
    assert len(stack.hook.on_step_end.get_hookimpls()) == 1  # type: ignore[attr-defined]


def test_inherited_overrides_count_and_names_are_unique(start: Activate) -> None:
    class Louder(Note): ...

    stack = start()
    stack.add_callback(Louder("loud"), "callbacks.0")
    assert stack.pipe("filter_group", RUN, None, GROUP) == "loud"
    with refused("'callbacks.0' is already registered", kind=PluginError):
        stack.add_callback(Note("x"), "callbacks.0")


def test_an_entry_point_may_name_a_callback(start: Activate, write: Callable[..., Path], tmp_path: Path) -> None:
    write(
        "counter",
        """
        from relax_core.hookspecs import Callback
        class Counter(Callback):
            count = 0
            def on_step_end(self, run, event): self.count += 1
            def state_dict(self): return {"count": self.count}
        counter = Counter()
        """,
    )
    entry = tmp_path / "dist_counter-1.0.dist-info" / "entry_points.txt"
    entry.write_text(entry.read_text().replace("counter_plugin", "counter_plugin:counter"))
    stack = start("counter")
    stack.hook.on_step_end(run=RUN, event=StepEnd(0, {}))
    assert {name: callback.state_dict() for name, callback in stack.callbacks.items()} == {"counter": {"count": 1}}

    entry.write_text(entry.read_text().replace(":counter", ":Counter"))
    with refused("plugin counter (dist-counter 1.0): counter_plugin:Counter is a class; name a module or an instance"):
        start("counter")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def on_step_ned(run, event): ...", "no hook is named on_step_ned; did you mean 'on_step_end'?"),
        ("def relax_rewrads(): return {}", "no hook is named relax_rewrads; did you mean 'relax_rewards'?"),
        ("def filter_groups(value): ...", "no hook is named filter_groups; did you mean 'filter_group'?"),
        ("def sampling_requests(value): ...", "did you mean 'sampling_request'?"),
        ("def setup_run(run): ...", "no hook is named setup_run"),
        ("def teardowns(run): ...", "did you mean 'teardown'?"),
        (
            "from relax_core.hookspecs import impl\n@impl\ndef step_end(event): ...",
            "no hook is named step_end; did you mean 'on_step_end'?",
        ),
        (
            "from relax_core.hookspecs import impl\n@impl(specname='on_stepend')\ndef mine(event): ...",
            "no hook is named on_stepend; did you mean 'on_step_end'?",
        ),
        (
            "def on_step_end(run, evnt): ...",
            "on_step_end has no argument 'evnt'; did you mean 'event'?; it takes",
        ),
        ("def on_step_end(run, event=None): ...", "argument 'event' with a default would never be filled"),
        ("def on_step_end(**kwargs): ...", "argument **kwargs would never be filled; it takes (run, event), by name"),
        ("def on_step_end(*, event): ...", "argument event would never be filled"),
        ("async def on_step_end(event): ...", "on_step_end is async; hooks are plain functions"),
        ("def on_step_end(event): yield", "on_step_end yields"),
        ("on_step_end = 3", "on_step_end is a hook's name and must be a function"),
        (
            "from relax_core.hookspecs import impl\n@impl(wrapper=True)\ndef filter_group(value): yield",
            "filter_group is marked as a wrapper, but is chained",
        ),
    ],
)
def test_what_only_looks_like_a_hook_is_refused(
    start: Activate, write: Callable[..., Path], source: str, message: str
) -> None:
    write("odd", source, version="1.4")
    with pytest.raises(PluginError) as caught:
        start("odd")
    assert str(caught.value).startswith("plugin odd (dist-odd 1.4): ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_hook_of_a_callback_is_refused(start: Activate) -> None:
    class Wrong(Callback):
        def on_step_strat(self, run: Any, event: Any) -> None: ...

    with refused("callbacks.0 (", "Wrong): no hook is named on_step_strat; did you mean 'on_step_start'?"):
        start().add_callback(Wrong(), "callbacks.0")
    assert list(hook_problems(Wrong))  # seen in the class already: relax check builds no callback


def test_a_wrong_argument_of_a_callback_is_refused(start: Activate) -> None:
    class Wrong(Callback):
        def on_step_start(self, run: Any, step: Any) -> None: ...

    with refused("on_step_start has no argument 'step'", kind=PluginError):
        start().add_callback(Wrong(), "callbacks.0")
    assert [line for line in hook_problems(Wrong) if "has no argument 'step'" in line]


def test_helpers_properties_and_imported_functions_are_no_hooks(start: Activate, write: Callable[..., Path]) -> None:
    class Fine(Callback):
        def _on_anything(self) -> None: ...

        @property
        def on_call(self) -> int:
            raise AssertionError("must not be read")

        def on_step_end(self, run: Any, event: Any) -> None: ...

    start().add_callback(Fine(), "callbacks.0")
    assert not list(hook_problems(Fine))
    write("imports", "from logging import shutdown as on_shutdown\nfrom enum import Enum as on_enum")
    start("imports")


# --- errors inside hooks --------------------------------------------------------------------------------------------


def test_an_error_in_a_hook_names_plugin_distribution_and_hook(start: Activate, write: Callable[..., Path]) -> None:
    write("fine", NOTES.format("f"))
    write("bad", "def on_step_start(event): raise KeyError('x')\ndef shape_rewards(value): return 1 / 0", version="2.0")
    stack = start("fine", "bad")
    with pytest.raises(
        PluginError, match=r"plugin bad \(dist-bad 2.0\): on_step_start failed: KeyError: 'x'"
    ) as caught:
        stack.hook.on_step_start(run=RUN, event=StepStart(0))
    assert isinstance(caught.value.__cause__, KeyError)
    with refused("plugin bad (dist-bad 2.0): shape_rewards failed: ZeroDivisionError", kind=PluginError):
        stack.pipe("shape_rewards", RUN, [1.0], GROUP)


def test_of_two_callbacks_of_one_class_the_right_one_is_blamed(start: Activate) -> None:
    class Fragile(Callback):
        def __init__(self, breaks: bool) -> None:
            self.breaks = breaks

        def on_step_start(self, run: Any, event: Any) -> None:
            if self.breaks:
                raise ValueError("two\nlines")

    stack = start()
    stack.add_callback(Fragile(False), "callbacks.0")
    stack.add_callback(Fragile(True), "callbacks.1")
    with refused("callbacks.1 (", "Fragile): on_step_start failed: ValueError: two lines"):
        stack.hook.on_step_start(run=RUN, event=StepStart(0))


def test_an_error_of_ours_keeps_its_words_and_ctrl_c_is_no_error_of_a_plugin(start: Activate) -> None:
    class Raises(Callback):
        error: BaseException = ConfigError("out of disk")

        def on_step_start(self, run: Any, event: Any) -> None:
            raise self.error

    stack, callback = start(), Raises()
    stack.add_callback(callback, "callbacks.0")
    with refused("on_step_start failed: out of disk", kind=PluginError):
        stack.hook.on_step_start(run=RUN, event=StepStart(0))
    callback.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stack.hook.on_step_start(run=RUN, event=StepStart(0))


# --- components -----------------------------------------------------------------------------------------------------

LENGTH = """
from relax_core.interfaces import Component, ComponentConfig, Reward

class Length(Reward):
    class Config(ComponentConfig):
        limit: int
        weight: float = 1.0

    async def __call__(self, trajectory):
        return float(self.config.limit)

class Limited(Length):
    class Config(ComponentConfig):
        limit: int = 3

    def __init__(self, config, more=0):
        super().__init__(config)
        self.more = 10 // more if more else 0

class NoReward: ...

def relax_rewards():
    return {
        "clash": Component("length_plugin:Length"),
        "length": Component("length_plugin:Limited"),
        "gone": Component("length_plugin:Gone"),
        "none": Component("length_plugin:NoReward"),
    }
"""


@pytest.fixture
def length(start: Activate, write: Callable[..., Path]) -> Stack:
    write("length", LENGTH)
    write("idle")
    return start("length")


def section(id: str, **settings: Any) -> Any:
    from relax_core.config.schema import ComponentSection

    return ComponentSection(id=id, **settings)


def test_a_component_is_built_from_its_section(length: Stack) -> None:
    built = length.build("rewards", section("length", limit=5), 2, where="rewards.0")
    assert isinstance(built, Reward) and built.config.limit == 5 and vars(built)["more"] == 5
    assert length.build_default("rewards", "length").config.limit == 3
    assert length.is_light("rewards", "length")


def test_wrong_settings_say_where(length: Stack) -> None:
    with refused("rewards.0.limt: unknown key; did you mean 'limit'?", kind=ConfigError):
        length.config("rewards", section("length", limt=5), "rewards.0")
    with refused("rewards.0.limit: found 1000000.0; must be a valid integer; write 1000000", kind=ConfigError):
        length.config("rewards", section("length", limit=1e6), "rewards.0")


def test_an_unknown_id_names_the_nearest(length: Stack) -> None:
    with refused("rewards.0.id: no reward has the id 'lenght'; did you mean 'length'?", kind=PluginError):
        length.config("rewards", section("lenght"), "rewards.0")
    with refused("known are", "length", "(installed plugins that are not listed under plugins: idle)"):
        length.load("rewards", "zzzzzz")
    with refused("no engine has the id 'x'; known are none", kind=PluginError):
        length.load("engines", "x")


def test_a_class_that_cannot_be_used_names_its_plugin(length: Stack) -> None:
    who = "plugin length (dist-length 1.0): reward "
    with refused(who + "'gone': length_plugin:Gone cannot be imported: AttributeError"):
        length.load("rewards", "gone")
    with refused(who + "'none': length_plugin:NoReward is not a subclass of relax_core.interfaces.Reward"):
        length.load("rewards", "none")
    with refused("rewards.0: " + who + "'length' cannot be built: TypeError"):
        length.build("rewards", section("length"), "ten", where="rewards.0")


def test_a_setting_may_not_have_the_name_of_a_field_of_the_section(length: Stack) -> None:
    with refused("'clash': the setting 'weight' has the name of a field of the section; rename it"):
        length.settings("rewards", "clash", {"limit": 1}, "rewards.0", ("id", "name", "weight"))


def test_two_providers_of_one_id_name_both(start: Activate, write: Callable[..., Path]) -> None:
    source = "from relax_core.interfaces import Component\ndef relax_engines(): return {'fast': Component('a:B')}"
    write("one", source, version="1.1")
    write("two", source, version="1.2")
    start("one")
    with refused("relax_engines: 'fast' is provided by plugin one (dist-one 1.1) and by plugin two (dist-two 1.2)"):
        start("one", "two")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def relax_engines(): return [1]", "relax_engines returned list; return {id: Component(...)}"),
        ("def relax_engines(): return {'a': 'b:C'}", "relax_engines returned 'a': 'b:C'; return {id: Component(...)}"),
        ("def relax_engines(): raise OSError('no disk')", "relax_engines failed: OSError: no disk"),
        (
            "from relax_core.interfaces import Component\ndef relax_engines(): return {'a': Component('b.C')}",
            "target 'b.C' of 'a' is not 'package.module:Class'",
        ),
    ],
)
def test_a_provider_that_returns_nonsense_is_named(
    start: Activate, write: Callable[..., Path], source: str, message: str
) -> None:
    write("odd", source)
    with pytest.raises(PluginError) as caught:
        start("odd")
    assert str(caught.value).startswith("plugin odd (dist-odd 1.0): ") and message in str(caught.value)


def test_the_catalog_lists_a_broken_plugin_and_goes_on(
    tmp_path: Path, write: Callable[..., Path], start: Activate
) -> None:
    write("boom", "1 / 0")
    write("odd", "def on_nothing(): ...")
    write("length", LENGTH, version="0.9")
    listed = catalog(plugins_in(tmp_path))
    assert [e.error for e in listed if e.plugin == "boom"] == [
        "plugin boom (dist-boom 1.0) cannot be imported: ZeroDivisionError: division by zero"
    ]
    assert "no hook is named on_nothing" in next(e.error for e in listed if e.plugin == "odd")
    found = next(e for e in listed if e.id == "length")
    assert (found.kind, found.plugin, found.distribution) == ("rewards", "length", "dist-length 0.9")


def test_every_installed_component_is_what_its_kind_says() -> None:
    """Of the light ones: their classes can be imported, and their settings described, at any time."""
    stack = activate([])
    for kind in BASES:
        for key in stack.components(kind):
            assert stack.config_class(kind, key).model_json_schema()["type"] == "object"
    assert {"nth-word", "last-word", "colour", "tone", "motion", "single_turn"} <= set(stack.components("environments"))
    assert issubclass(stack.load("environments", "last-word"), Environment)


# --- docs/hooks.md --------------------------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    """Heading -> text of every hook in the page."""
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    parts = re.split(r"^### `(.*)`$", page.split("## Providers", 1)[1], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def heading(hook: str) -> str:
    parameters = list(inspect.signature(SPECS[hook]).parameters.values())[1:]
    shown = [p.name if p.name == "run" else f"{p.name}: {p.annotation}" for p in parameters]
    return f"{hook}({', '.join(shown)})"


def test_every_hook_has_its_entry_in_the_order_of_the_specs() -> None:
    assert list(entries()) == [heading(hook) for hook in SPECS]


@pytest.mark.parametrize("hook", [hook for hook in SPECS if not hook.startswith("relax_")])
def test_an_entry_says_where_how_often_and_what_it_returns(hook: str) -> None:
    text = entries()[heading(hook)]
    where = re.search(r"Where: (.*)\.", inspect.getdoc(SPECS[hook]) or "")
    assert where, f"the docstring of {hook} does not say where it fires"
    assert f"- **Where**: {where[1]}." in text
    assert "- **How often**: " in text
    assert ("- **Returns**: nothing." in text) != is_chained(hook)


@pytest.mark.parametrize("hook", SPECS)
def test_an_example_is_an_implementation(hook: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", entries()[heading(hook)], flags=re.DOTALL)
    known = {**vars(hookspecs), **vars(interfaces)}
    if hook.startswith("relax_"):
        exec(compile("from __future__ import annotations\n" + code, hook, "exec"), known)
        if "my_plugin.config" not in code:
            assert all(isinstance(component, Component) for component in known[hook]().values())
        return
    body = textwrap.indent(code, "    ")
    exec(compile(f"from __future__ import annotations\nclass Example(Callback):\n{body}", hook, "exec"), known)
    assert hook in vars(known["Example"])
    assert not list(hook_problems(known["Example"]))
