"""One Ray cluster for all tests of this folder: to start one takes longer than most of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.plugins import installed_plugins
from relax_core.testing.plugins import write_plugin

PLUGIN = '''
"""Plays whose length and duration are keyed by the task: long ones take long."""
import asyncio

from relax_core.interfaces import Component
from relax_core.keys import stream, uniform
from relax_envs.toy.words import LastWord


class Uneven(LastWord):
    """A quarter of the tasks is answered by up to three words and ends late, the others by one."""

    async def play(self, task, chat):
        long = uniform(stream(0, "long", task.id), 0) < 1 / 4
        await chat(*task.messages, max_new_tokens=3 if long else 1)
        if long:
            await asyncio.sleep(2.0)


def relax_environments():
    return {"uneven": Component("cluster_tests_plugin:Uneven")}
'''


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where installed plugins lie, for this process and for all of the cluster's.

    Ray can also give actors an environment of their own, but then it starts each of their processes twice.
    """
    folder = tmp_path_factory.mktemp("plugins")
    sys.path.append(str(folder))
    return folder


@pytest.fixture(scope="session")
def install(folder: Path) -> Callable[[str, str], None]:
    """Installs a plugin, of which it takes the name and the source."""

    def add(name: str, source: str) -> None:
        write_plugin(folder, name, source)
        installed_plugins.cache_clear()

    return add


@pytest.fixture(scope="session")
def cluster(folder: Path, install: Callable[[str, str], None]) -> Iterator[str]:
    """A local cluster with 16 logical CPUs, to which this process is attached; its address.

    The plugin ``cluster_tests`` is installed.
    """
    import ray

    install("cluster_tests", PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        context: Any = ray.init(
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=2 * 10**9,
            log_to_driver=False,
        )
    yield str(context.address_info["gcs_address"])
    ray.shutdown()
