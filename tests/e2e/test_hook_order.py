"""The order and the place of every hook in one run, as docs/run-order.md shows it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from relax_core.hookspecs import Callback
from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import run_file, train

RECORDER = '''
"""Writes down every hook that fires."""
import inspect

from relax_core.hookspecs import Callback
from relax_core.interfaces import Component

CALLS = []


def recorded(name, spec):
    transforms = "value" in inspect.signature(spec).parameters

    if transforms:
        def hook(self, run, value, event):
            CALLS.append((name, event))
            return value
    elif "event" in inspect.signature(spec).parameters:
        def hook(self, run, event):
            CALLS.append((name, event))
    else:
        def hook(self, run):
            CALLS.append((name, None))
    return hook


def hooks():
    return {n: f for n, f in vars(Callback).items() if callable(f) and not n.startswith("_") and "state_dict" not in n}


Recorder = type("Recorder", (Callback,), {name: recorded(name, spec) for name, spec in hooks().items()})


def relax_callbacks():
    return {"recorder": Component("recorder_plugin:Recorder")}
'''

RUN = {
    "steps": 2,
    "groups_per_step": 1,
    "group_size": 2,
    "plugins": ["recorder"],
    "callbacks": [{"id": "recorder"}],
    "evaluation": [{"name": "held-out", "environment": "last-word", "size": 1}],
    "checkpoint": {"every": 2},
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "run-order.md"


def documented() -> list[tuple[str, str]]:
    """(hook, where) of the page's block, one for each call."""
    block = re.search(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    lines = [line for line in block[1].splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split("  ")[-1].strip()) for line in lines]


def test_the_order_of_a_run_is_the_documented_one(tmp_path: Path) -> None:
    write_plugin(tmp_path, "recorder", RECORDER)
    installed = (*installed_plugins(), *plugins_in(tmp_path))
    sys.path.insert(0, str(tmp_path))
    try:
        train(run_file(tmp_path / "run", **RUN), installed=installed)
        import recorder_plugin  # type: ignore[import-not-found]

        names = [name for name, _ in recorder_plugin.CALLS]
    finally:
        sys.path.remove(str(tmp_path))
    assert names == [name for name, _ in documented()]


def test_the_page_says_where_each_hook_fires() -> None:
    for name, where in documented():
        doc = getattr(Callback, name).__doc__ or ""
        said = re.search(r"Where: ([a-z0-9 ]+)\.", doc)
        assert said and said[1] == where, name


def test_the_page_names_every_hook() -> None:
    hooks = {n for n, f in vars(Callback).items() if callable(f) and not n.startswith("_") and "state_dict" not in n}
    text = PAGE.read_text()
    assert {name for name in hooks if name not in text} == set()
