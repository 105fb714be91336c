"""Finding, activating and asking plugins: entry points in, one ``Stack`` of hooks and components out.

Order of hooks: the built-in suites, then the plugins in the order of the run file, then the callbacks in theirs.
Functions of a plugin's module run in the plugin's place; a callback runs in its own place of ``callbacks``, wherever
its class comes from.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar, cast

from relax_core import interfaces
from relax_core._version import __version__
from relax_core.config.validation import validate
from relax_core.errors import PluginError, RelaxError, nearest
from relax_core.hook_manager import Manager, describe
from relax_core.hookspecs import API_VERSION, Callback
from relax_core.interfaces import Component, ComponentConfig

if TYPE_CHECKING:
    from relax_core.config.schema import ComponentSection

T = TypeVar("T")

GROUP = "relax.plugins"
"""The entry point group: ``name = "package.module"``."""

BUILT_IN = ("core", "modalities", "algorithms", "envs")
"""Always active, in this order, before the plugins that a run file names."""

BASES: Mapping[str, type] = {
    "modalities": interfaces.Modality,
    "environments": interfaces.Environment,
    "rewards": interfaces.Reward,
    "algorithms": interfaces.Algorithm,
    "models": interfaces.ModelAdapter,
    "engines": interfaces.Engine,
    "trainers": interfaces.Trainer,
    "runtimes": object,
    "transports": interfaces.Transport,
    "stages": interfaces.Stage,
    "callbacks": Callback,
}
"""The kinds of components, each with the class that it must derive from."""


@dataclass(frozen=True, slots=True)
class Provided:
    """A component, the plugin that provides it, and what errors call that plugin."""

    component: Component
    plugin: str
    who: str


@cache
def installed_plugins() -> tuple[EntryPoint, ...]:
    """Every installed plugin's entry point; looked up once per process."""
    return tuple(entry_points(group=GROUP))


def activate(names: Iterable[str], *, installed: Sequence[EntryPoint] | None = None) -> Stack:
    """Import the named plugins and the built-in suites, and no others. Raises PluginError.

    ``installed`` replaces the look-up of entry points (the built-in suites must be among them).
    """
    found = installed_plugins() if installed is None else tuple(installed)
    manager = Manager()
    versions: dict[str, str] = {}
    for name in [*BUILT_IN, *_checked(names)]:
        entry = find_plugin(name, found)
        versions[name] = distribution(entry)
        manager.add(load_plugin(entry), name, who(entry))
    components = {kind: _collect(manager, kind) for kind in BASES}
    inactive = sorted({entry.name for entry in found} - versions.keys())
    stack = Stack(manager, versions, components, inactive)
    stack.callbacks.update((n, plugin) for n, plugin in manager.list_name_plugin() if isinstance(plugin, Callback))
    return stack


def _checked(names: Iterable[str]) -> list[str]:
    listed = list(names)
    for name in listed:
        if name in BUILT_IN:
            raise PluginError(f"plugins: {name!r} is built in and always active; leave it out")
        if listed.count(name) > 1:
            raise PluginError(f"plugins: {name!r} is listed twice; leave one out")
    return listed


def distribution(entry: EntryPoint) -> str:
    """Name and version of what was installed: ``relax-plugin-omni 0.1.0``."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def who(entry: EntryPoint) -> str:
    """What errors call a plugin."""
    return f"plugin {entry.name} ({distribution(entry)})"


def find_plugin(name: str, installed: Sequence[EntryPoint]) -> EntryPoint:
    """The one entry point of that name."""
    found = [entry for entry in installed if entry.name == name]
    if len(found) > 1:
        raise PluginError(
            f"plugins: {name!r} is provided by {' and by '.join(map(distribution, found))}; uninstall one"
        )
    if not found:
        known = sorted({entry.name for entry in installed} - set(BUILT_IN))
        near = nearest(name, known) or f"; installed are {', '.join(known) or 'none'}"
        raise PluginError(f"plugins: {name!r} is not installed{near}")
    return found[0]


def load_plugin(entry: EntryPoint) -> object:
    """Import what the entry point names: a module, or an object in one."""
    try:
        plugin: object = entry.load()
    except Exception as error:
        raise PluginError(f"{who(entry)} cannot be imported: {describe(error)}") from error
    if inspect.isclass(plugin):
        raise PluginError(f"{who(entry)}: {entry.value} is a class; name a module or an instance")
    api = getattr(plugin, "relax_api", API_VERSION)
    if api != API_VERSION:
        raise PluginError(
            f"{who(entry)} is written for hook API {api!r}; relax-rl {__version__} has {API_VERSION}: "
            "install versions of the two that fit"
        )
    return plugin


def _collect(manager: Manager, kind: str) -> dict[str, Provided]:
    """Call a provider hook of every plugin and merge what they return; two of one id are an error."""
    merged: dict[str, Provided] = {}
    for implementation in manager.implementations(f"relax_{kind}"):
        name = implementation.plugin_name
        for key, component in provided_by(implementation.function, f"relax_{kind}", manager.who[name]).items():
            if key in merged:
                raise PluginError(
                    f"relax_{kind}: {key!r} is provided by {merged[key].who} and by {manager.who[name]}; "
                    "name only one of them under plugins"
                )
            merged[key] = Provided(component, name, manager.who[name])
    return merged


def provided_by(function: Any, hook: str, who: str) -> Mapping[str, Component]:
    """What one provider function returns, checked."""
    try:
        components = function()
    except Exception as error:
        raise PluginError(f"{who}: {hook} failed: {describe(error)}") from error
    if not isinstance(components, Mapping):
        raise PluginError(f"{who}: {hook} returned {type(components).__name__}; return {{id: Component(...)}}")
    for key, component in components.items():
        if not isinstance(key, str) or not isinstance(component, Component):
            raise PluginError(f"{who}: {hook} returned {key!r}: {component!r}; return {{id: Component(...)}}")
        if component.target.count(":") != 1:
            raise PluginError(f"{who}: {hook}: target {component.target!r} of {key!r} is not 'package.module:Class'")
    return components


class Stack:
    """The active plugins of one process: their hooks and their components."""

    def __init__(
        self,
        manager: Manager,
        versions: dict[str, str],
        components: Mapping[str, Mapping[str, Provided]],
        inactive: Sequence[str] = (),
    ) -> None:
        self._manager = manager
        self._components = components
        self._inactive = inactive
        self.versions = versions
        """Active plugin -> distribution and version, in the order of their hooks."""
        self.hook = cast(Callback, manager.hook)
        """The life cycle, typed: ``stack.hook.on_step_start(run=run, event=StepStart(3))``."""
        self.callbacks: dict[str, Callback] = {}
        """Those that are plugins themselves and those of ``add_callback``, by name: checkpoints save their state."""

    def pipe(self, name: str, run: Any, value: T, event: Any) -> T:
        """Call a transforming hook: each implementation gets the former's result, listed first runs first."""
        return self._manager.pipe(name, run, value, event)

    def add_callback(self, instance: Callback, name: str) -> None:
        """Let a callback take part after everything already there. ``name`` is unique, such as ``callbacks.0``."""
        self._manager.add(instance, name, f"{name} ({self._home(type(instance))})")
        self.callbacks[name] = instance

    def _home(self, cls: type) -> str:
        target = f"{cls.__module__}:{cls.__qualname__}"
        for key, provided in self._components["callbacks"].items():
            if provided.component.target == target:
                return f"{key} of {provided.who}"
        return target

    # --- components ---------------------------------------------------------------------------------------------

    def components(self, kind: str) -> Mapping[str, Component]:
        """By id."""
        return {key: provided.component for key, provided in self._components[kind].items()}

    def provided(self, kind: str, id: str, where: str = "") -> Provided:
        """A component and where it comes from. Raises PluginError for an unknown id."""
        known = self._components[kind]
        if id in known:
            return known[id]
        hint = nearest(id, known)
        if not hint:
            hint = f"; known are {', '.join(known) or 'none'}"
            if self._inactive:
                hint += f" (installed plugins that are not listed under plugins: {', '.join(self._inactive)})"
        raise PluginError(f"{where or kind}: no {_singular(kind)} has the id {id!r}{hint}")

    def is_light(self, kind: str, id: str) -> bool:
        """Whether importing the class costs little and needs no heavy package: it gives its Config itself."""
        return self.provided(kind, id).component.config is None

    def load(self, kind: str, id: str, where: str = "") -> type[Any]:
        """Import a component's class. Raises PluginError, naming the plugin, when that fails or it is none."""
        provided = self.provided(kind, id, where)
        module, _, name = provided.component.target.partition(":")
        label = f"{provided.who}: {_singular(kind)} {id!r}: {provided.component.target}"
        try:
            cls: Any = importlib.import_module(module)
            for part in name.split("."):
                cls = getattr(cls, part)
        except Exception as error:
            raise PluginError(f"{label} cannot be imported: {describe(error)}") from error
        base = BASES[kind]
        if not inspect.isclass(cls) or not issubclass(cls, base):
            raise PluginError(f"{label} is not a subclass of {public_name(base)}")
        return cls

    def config_class(self, kind: str, id: str, where: str = "") -> type[ComponentConfig]:
        """The model of a component's settings. Imports the class only when that is light."""
        provided = self.provided(kind, id, where)
        model = provided.component.config or getattr(self.load(kind, id, where), "Config", ComponentConfig)
        if not (inspect.isclass(model) and issubclass(model, ComponentConfig)):
            raise PluginError(f"{provided.who}: the Config of {_singular(kind)} {id!r} is not a ComponentConfig")
        return model

    def config(self, kind: str, section: ComponentSection, where: str) -> ComponentConfig:
        """The settings of a section, validated by the Config that its id selects. Errors begin with ``where``."""
        return self.settings(kind, section.id, section.settings, where, tuple(type(section).model_fields))

    def settings(
        self, kind: str, id: str, raw: Mapping[str, Any], where: str, reserved: Sequence[str] = ("id",)
    ) -> ComponentConfig:
        """Like ``config``, of raw fields. ``reserved`` are the section's own fields."""
        model = self.config_class(kind, id, f"{where}.id")
        clash = [name for name in reserved if name in model.model_fields]
        if clash:
            label = f"{self.provided(kind, id).who}: {_singular(kind)} {id!r}"
            raise PluginError(f"{label}: the setting {clash[0]!r} has the name of a field of the section; rename it")
        return validate(model, dict(raw), where, also=reserved)

    def build(self, kind: str, section: ComponentSection, *args: Any, where: str = "") -> Any:
        """An instance: the class called with its validated settings and ``args``; without Config, with these alone."""
        where = where or _singular(kind)
        config = self.config(kind, section, where)
        provided = self.provided(kind, section.id, where)
        cls = self.load(kind, section.id, where)
        first = (config,) if provided.component.config or hasattr(cls, "Config") else ()
        try:
            return cls(*first, *args)
        except RelaxError:
            raise
        except Exception as error:
            label = f"{provided.who}: {_singular(kind)} {section.id!r}"
            raise PluginError(f"{where}: {label} cannot be built: {describe(error)}") from error

    def build_default(self, kind: str, id: str, *args: Any) -> Any:
        """An instance with its default settings."""
        from relax_core.config.schema import ComponentSection

        return self.build(kind, ComponentSection(id=id), *args, where=f"{kind}.{id}")


def public_name(base: type) -> str:
    """Where users import a base class from."""
    package = interfaces.__name__ if hasattr(interfaces, base.__name__) else base.__module__
    return f"{package}.{base.__qualname__}"


def _singular(kind: str) -> str:
    return {"modalities": "modality"}.get(kind, kind.removesuffix("s"))
