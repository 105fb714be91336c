"""The pluggy manager: marks hooks by their names, refuses what only looks like one, and says whose hook failed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_tb
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

import pluggy

from relax_core.errors import PluginError, RelaxError, nearest
from relax_core.hookspecs import Callback, Providers

T = TypeVar("T")

PREFIXES = ("on_", "before_", "after_", "filter_", "shape_", "sampling_", "setup", "teardown", "relax_")
"""A public function of a plugin that begins like this must be a hook: a misspelt one would never be called."""

SPECS: Mapping[str, Any] = {
    name: function
    for family in (Providers, Callback)
    for name, function in vars(family).items()
    if hasattr(function, "relax_spec")
}
"""Every hook of ``hookspecs.py``, by name, in the order of a run."""

MAY_RETURN_NONE = frozenset(hook for hook, spec in SPECS.items() if spec.__annotations__["return"].endswith("| None"))
"""Chained hooks of which None is a value; from another one it means that ``return`` was forgotten."""


class HookError(PluginError):
    """A hook that raised; the error it raised is the ``__cause__``."""


def arguments(hook: str) -> list[str]:
    """The argument names of a hook, without ``self``."""
    return list(inspect.signature(SPECS[hook]).parameters)[1:]


def is_chained(hook: str) -> bool:
    """Whether the hook transforms a value, and so is called through ``pipe``."""
    return "value" in arguments(hook)


class Manager(pluggy.PluginManager):
    """Listed first runs first: plugins in the order in which they were added."""

    def __init__(self) -> None:
        super().__init__("relax")
        self.add_hookspecs(Providers)
        self.add_hookspecs(Callback)
        self.add_hookcall_monitoring(lambda *_: None, self._blame)
        self.who: dict[str, str] = {}
        """What errors call a plugin: ``plugin omni (relax-plugin-omni 0.1.0)``."""
        self._listed: list[tuple[str, object]] = []

    def add(self, plugin: object, name: str, who: str) -> None:
        """Register a plugin module or object after those already there. Raises PluginError."""
        if name in self.who:
            raise PluginError(f"{who}: {name!r} is already registered by {self.who[name]}")
        for problem in hook_problems(plugin):
            raise PluginError(f"{who}: {problem}")
        self.who[name] = who
        self._listed.append((name, plugin))
        # pluggy calls the last registered first, so all are registered again, from the last to the first.
        for _, other in self._listed[:-1]:
            self.unregister(other)
        try:
            for other_name, other in reversed(self._listed):
                self.register(other, other_name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"{who}: {one_line(error)}") from error

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """A function implements a hook by having its name; the marker ``impl`` is needed only for options."""
        if isinstance(inspect.getattr_static(plugin, name, None), property):
            return None
        method = getattr(plugin, name, None)
        if is_no_op(method, name):
            return None
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and name in SPECS and callable(method):
            return pluggy.HookimplOpts(
                wrapper=False, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False, specname=None
            )
        return options

    def implementations(self, hook: str) -> Iterator[pluggy.HookImpl]:
        """In the order in which they are called, wrappers last."""
        caller: pluggy.HookCaller = getattr(self.hook, hook)
        return reversed(caller.get_hookimpls())

    def pipe(self, hook: str, run: Any, value: T, event: Any) -> T:
        """Call the implementations of a transforming hook one after the other, each on the former's result."""
        for implementation in self.implementations(hook):
            known = {"run": run, "value": value, "event": event}
            try:
                value = cast(T, implementation.function(*(known[name] for name in implementation.argnames)))
            except Exception as error:
                raise self._error(implementation, hook, error) from error
            if value is None and hook not in MAY_RETURN_NONE:
                who = self.who[implementation.plugin_name]
                raise HookError(f"{who}: {hook} returned None; return the value, changed or not")
        return value

    def _error(self, implementation: pluggy.HookImpl | None, hook: str, error: Exception) -> Exception:
        if isinstance(error, HookError):
            return error
        who = self.who[implementation.plugin_name] if implementation else "a plugin"
        return HookError(f"{who}: {hook} failed: {describe(error)}")

    def _blame(
        self, outcome: pluggy.Result[Any], hook: str, implementations: Sequence[pluggy.HookImpl], _: Mapping[str, Any]
    ) -> None:
        """After each call of a hook: turn a plugin's error into one that names plugin, distribution and version."""
        error = outcome.exception
        if isinstance(error, Exception) and not isinstance(error, HookError):
            blamed = self._error(_failed(error, implementations), hook, error)
            blamed.__cause__ = error
            outcome.force_exception(blamed)


def _failed(error: BaseException, implementations: Sequence[pluggy.HookImpl]) -> pluggy.HookImpl | None:
    """The implementation whose frame is in the traceback."""
    for frame, _ in walk_tb(error.__traceback__):
        for implementation in implementations:
            function = implementation.function
            if frame.f_code is not _code(function):
                continue
            owner = getattr(function, "__self__", None)
            # Two callbacks of one class share their code: the frame's self tells them apart.
            if owner is None or frame.f_locals.get(frame.f_code.co_varnames[0]) is owner:
                return implementation
    return None


def _code(function: Any) -> CodeType | None:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def is_no_op(method: object, name: str) -> bool:
    """Whether this is the base class's own method, which does nothing and is not worth a call."""
    function = getattr(method, "__func__", method)
    return function is not None and function is vars(Callback).get(name)


# --- what is refused ------------------------------------------------------------------------------------------------


def hook_problems(plugin: object) -> Iterator[str]:
    """What is wrong with the functions of a plugin module, a callback or a callback's class: one line each."""
    for name in dir(plugin):
        static = inspect.getattr_static(plugin, name, None)
        if name.startswith("_") or isinstance(static, property):
            continue
        member = getattr(plugin, name, None)
        if is_no_op(member, name):
            continue
        marked = getattr(member, "relax_impl", None)
        marks: Mapping[str, Any] = marked if isinstance(marked, Mapping) else {}
        hook = marks.get("specname") or name
        if hook in SPECS:
            yield from _signature_problems(plugin, member, hook, marks)
        elif marks or (name.startswith(PREFIXES) and _is_own_function(plugin, member)):
            near = nearest(hook, SPECS) or f"; hooks are {', '.join(SPECS)}"
            yield f"no hook is named {hook}{near} (a helper's name begins with an underscore)"


def _is_own_function(plugin: object, member: object) -> bool:
    """Modules may import functions of any name from other packages."""
    if not inspect.isroutine(member):
        return False
    if not isinstance(plugin, ModuleType):
        return True
    home = getattr(member, "__module__", None) or ""
    return home.split(".")[0] == plugin.__name__.split(".")[0]


def _signature_problems(plugin: object, member: Any, hook: str, marks: Mapping[str, Any]) -> Iterator[str]:
    allowed = arguments(hook)
    if not callable(member) or inspect.isclass(member):
        yield f"{hook} is a hook's name and must be a function"
        return
    is_wrapper = bool(marks.get("wrapper") or marks.get("hookwrapper"))
    if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member):
        yield f"{hook} is async; hooks are plain functions"
    elif inspect.isgeneratorfunction(member) and not is_wrapper:
        yield f"{hook} yields; a hook returns, only one marked impl(wrapper=True) yields"
    elif is_wrapper and is_chained(hook):
        yield f"{hook} is marked as a wrapper, but is chained: take value and return it"
    parameters = list(inspect.signature(member).parameters.values())
    if inspect.isclass(plugin) and inspect.isfunction(inspect.getattr_static(plugin, hook, None)):
        parameters = parameters[1:]  # self
    takes = f"it takes ({', '.join(allowed)})"
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            yield f"{hook}: argument {parameter} would never be filled; {takes}, by name"
        elif parameter.name not in allowed:
            yield f"{hook} has no argument {parameter.name!r}{nearest(parameter.name, allowed)}; {takes}"
        elif parameter.default is not parameter.empty:
            yield f"{hook}: argument {parameter.name!r} with a default would never be filled; leave the default out"


# --- words of errors ------------------------------------------------------------------------------------------------


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def describe(error: BaseException) -> str:
    """An error's text in one line; its type too unless it is one of ours."""
    if isinstance(error, RelaxError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
