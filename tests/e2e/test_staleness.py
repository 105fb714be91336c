"""Asynchronous runs: the bound on lag, the account of every group, and steady speed when groups are lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.schema import ComponentSection
from relax_core.journal import Journal
from relax_core.plugins import activate, installed_plugins
from relax_core.stages import scored_groups
from relax_core.testing.plugins import plugins_in, write_plugin
from relax_core.testing.runs import accounted, metrics, run_file, summary, train

LOSSES = '''
"""Filters 30 % of the groups and lets every play of 10 % of the tasks fail; which ones is keyed by the task."""
import asyncio

from relax_core.hookspecs import Callback
from relax_core.interfaces import Component, ComponentConfig
from relax_core.keys import stream, uniform
from relax_envs.toy.words import LastWord


def chance(name, group):
    return uniform(stream(0, name, group), 0)


def filter_group(run, value, event):
    return "at random" if chance("filter", event.group.id) < 0.3 else value


class Failing(LastWord):
    async def play(self, task, chat):
        if chance("fail", task.id) < 0.1:
            raise RuntimeError("the tool is down")
        await super().play(task, chat)


published = 0


def on_weights_published(run, event):
    global published
    published += 1


class Slow(LastWord):
    """Some plays begin two versions after the others of their groups have sampled; or late, where too many wait."""

    async def play(self, task, chat):
        if chat.random("slow") < 0.06:
            late = published + 2
            for _ in range(100):
                await asyncio.sleep(0.02)
                if published >= late:
                    break
        await super().play(task, chat)


def relax_environments():
    return {"failing": Component("losses_plugin:Failing"), "slow": Component("losses_plugin:Slow")}
'''


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Sequence[EntryPoint]:
    installed = installed_plugins()  # before the folder is on the path, where they would be found as well
    folder = tmp_path_factory.mktemp("plugins")
    write_plugin(folder, "losses", LOSSES)
    sys.path.insert(0, str(folder))
    return (*installed, *plugins_in(folder))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_lost_groups_do_not_slow_a_run_down(losses: Sequence[EntryPoint], tmp_path: Path, staleness: int) -> None:
    steps = 40
    path = run_file(
        tmp_path,
        steps=steps,
        plugins=["losses"],
        max_staleness=staleness,
        environments=[{"id": "failing"}],
        evaluation=[],
    )
    directory = train(path, installed=losses)
    groups = summary(directory)["groups"]
    assert accounted(groups) and groups["trained"] == steps * 4 and groups["dropped"] == groups["evicted"] == 0
    lost = groups["filtered"] / (groups["issued"] - groups["failed"])
    assert 0.15 < lost < 0.45 and 0.03 < groups["failed"] / groups["issued"] < 0.2
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    plays = [line["groups/issued"] for line in lines]
    quarter = steps // 4
    first, last = plays[quarter - 1], plays[-1] - plays[-1 - quarter]
    assert last < 1.5 * first  # work a step does not grow: starts per step at the end are those of the beginning
    seconds = [line["time/step"] for line in lines]
    middle = sorted(seconds[-quarter:])[quarter // 2], sorted(seconds[:quarter])[quarter // 2]
    assert middle[0] < 2 * middle[1]  # generous: machines are shared


@pytest.mark.parametrize("staleness", range(5))
def test_lag_is_bounded_and_happens_and_nothing_is_evicted(tmp_path: Path, staleness: int) -> None:
    directory = train(run_file(tmp_path, steps=20, max_staleness=staleness, evaluation=[]))
    found = summary(directory)
    assert found["max_lag"] <= staleness and (found["max_lag"] > 0) == (staleness > 0)
    assert found["groups"]["evicted"] == 0
    lines = metrics(directory)
    assert all(line["lag/max"] <= staleness for line in lines)
    by_lag = [sum(line[f"lag/tokens/{lag}"] for line in lines) for lag in range(staleness + 1)]
    assert by_lag == [found["lag_tokens"].get(str(lag), 0) for lag in range(staleness + 1)]
    assert found["mean_length"]["trained"] == pytest.approx(found["mean_length"]["played"], rel=0.05)


def test_finished_order_accounts_for_what_it_evicts(tmp_path: Path) -> None:
    directory = train(run_file(tmp_path, steps=20, max_staleness=1, order="finished", evaluation=[]))
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] == 80 and found["max_lag"] <= 1
    assert found["mean_length"]["trained"] and found["mean_length"]["played"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("algorithm", [{"id": "grpo", "whiten": True}, {"id": "ppo"}], ids=str)
def test_evicted_groups_do_not_stop_a_run(
    losses: Sequence[EntryPoint], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """An algorithm that needs the whole step gets exactly the groups that the step trains, evictions or not."""
    changes: dict[str, Any] = {"max_staleness": 1, "order": "finished", "environments": [{"id": "slow"}]}
    path = run_file(tmp_path, steps=8, plugins=["losses"], evaluation=[], algorithm=algorithm, **changes)
    directory = train(path, installed=losses)
    found = summary(directory)
    assert accounted(found["groups"]) and found["groups"]["trained"] == 32 and found["groups"]["evicted"] > 0
    for step in (4, 7):
        entry = Journal(directory / "journal", 100).read(step)
        credited = {row.id: row.columns["advantages"] for row in entry.rows}
        built = activate(()).build("algorithms", ComponentSection(**algorithm))
        again = built.advantages(scored_groups(list(entry.rows)))
        assert all((again[id]["advantages"] == values).all() for id, values in credited.items())


@pytest.mark.parametrize("interrupt", ["continue", "abort", "drain"])
def test_every_interrupt_mode_trains(tmp_path: Path, interrupt: str) -> None:
    directory = train(run_file(tmp_path, steps=8, max_staleness=2, interrupt=interrupt, evaluation=[]))
    assert accounted(summary(directory)["groups"]) and summary(directory)["max_lag"] <= 2
