"""The cluster of a run: started, attached to and left; places for roles; what goes wrong."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.resolve import resolve
from relax_core.errors import RelaxError
from relax_core.run import Run
from relax_plugin_ray.config import RayConfig

WORDS = ["last", "of", "word", "?", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "star", "rain", "fire"]


def run_of(runtime: dict[str, Any]) -> tuple[RayConfig, Run]:
    """A run that has the stages reference and advantages."""
    config, stack = resolve(
        {
            "name": "test",
            "plugins": ["ray"],
            "steps": 1,
            "groups_per_step": 1,
            "model": {"id": "text", "tiny": {"words": WORDS}},
            "environments": [{"id": "last-word"}],
            "rewards": [{"id": "exact"}],
            "algorithm": {"id": "grpo", "kl": {"coefficient": 0.1}},
            "runtime": {"id": "ray", **runtime},
        }
    )
    runtime_config = stack.config("runtimes", config.runtime, "runtime")
    assert isinstance(runtime_config, RayConfig)
    return runtime_config, Run(config, Path("nowhere"), stack)


STAGES = ("reference", "advantages")


@contextmanager
def attached(runtime: dict[str, Any]) -> Iterator[tuple[Any, list[str]]]:
    """(cluster, notes), in this process, which is connected already."""
    from relax_plugin_ray.cluster import Cluster

    notes: list[str] = []
    config, run = run_of(runtime)
    cluster = asyncio.run(Cluster.attach(config, run, STAGES, notes.append))
    try:
        yield cluster, notes
    finally:
        asyncio.run(cluster.release())


def script(source: str, *values: object, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with a hard limit."""
    program = textwrap.dedent(source)
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent), *map(str, values)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment,
    )


PROLOGUE = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_ray_cluster import STAGES, attached, run_of
"""


def looked(cluster: Any, *places: tuple[str, int]) -> list[dict[str, Any]]:
    """Where actors in these places are."""
    import ray

    class Where:  # local, so that it is sent to processes that cannot import this file
        def look(self) -> dict[str, Any]:
            from relax_plugin_ray.worker import confine

            confine()
            context = ray.get_runtime_context()
            names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
            return {"group": context.get_placement_group_id(), **{name: os.environ.get(name) for name in names}}

    remote: Any = ray.remote(Where)
    made: list[Any] = [remote.options(**cluster.options(*place)).remote() for place in places]
    try:
        return list(ray.get([actor.look.remote() for actor in made], timeout=100))
    finally:
        for actor in made:
            ray.kill(actor)


def free_cpus() -> float:
    import ray

    found: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return found.get("CPU", 0.0)


def quiet() -> float:
    """Free CPUs, once what earlier tests gave back has been counted."""
    found, since, deadline = free_cpus(), time.monotonic(), time.monotonic() + 20
    while time.monotonic() < min(since + 1.5, deadline):
        time.sleep(0.1)
        if (now := free_cpus()) != found:
            found, since = now, time.monotonic()
    return found


def settled(cpus: float) -> bool:
    """Whether so many CPUs become free: Ray hears of it a moment later."""
    deadline = time.monotonic() + 20
    while free_cpus() != cpus and time.monotonic() < deadline:
        time.sleep(0.1)
    return free_cpus() == cpus


# --- start, attach, leave ---------------------------------------------------------------------------------------------

OWN = (
    PROLOGUE
    + """
from pathlib import Path
import ray

with attached({"roles": {"engine": {"replicas": 9}}}) as (cluster, notes):
    assert cluster.owned
    folder = cluster._folder
    assert folder.exists() and len(str(folder)) < 40, folder
    cpus = ray.cluster_resources()["CPU"]
    assert cpus == 15, cpus  # 9 engines, 4 other roles, 2 stages: more than there are processors
    pid = ray.get(ray.remote(lambda: __import__("os").getppid()).options(num_cpus=0).remote(), timeout=60)
assert not folder.exists()
assert not ray.is_initialized()
assert not Path(f"/proc/{pid}").exists() or "raylet" not in Path(f"/proc/{pid}/cmdline").read_text()
assert notes == []
"""
)


@pytest.mark.slow
def test_a_cluster_of_its_own_is_silent_and_ends() -> None:
    done = script(OWN)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


LACKING = (
    PROLOGUE
    + """
from relax_core.errors import RelaxError
import ray
try:
    with attached({"roles": {"trainer": {"ranks": 2, "gpus": 1000}}}):
        raise SystemExit("it started")
except RelaxError as error:
    print(error)
assert not ray.is_initialized()
"""
)


@pytest.mark.slow
def test_gpus_that_this_machine_lacks_are_named_at_once() -> None:
    done = script(LACKING)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"runtime\.roles\.trainer: asks for 2 ranks, each 1 CPU and 1000 GPUs; this machine has \d+ GPUs?, of which "
        r"other roles take 0: ask for less, or give the runtime the address of a cluster that has more\n",
        done.stdout,
    ), done.stdout


JOINED = (
    PROLOGUE
    + """
import ray
with attached({"address": sys.argv[2]}) as (cluster, notes):
    assert not cluster.owned
    assert ray.get_runtime_context().gcs_address == sys.argv[2]
assert not ray.is_initialized()
"""
)


def test_a_running_cluster_is_joined_and_left(cluster: str) -> None:
    before = quiet()
    done = script(JOINED, cluster)
    assert done.returncode == 0, done.stderr
    assert settled(before)


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_separate_roles_sit_in_groups_of_their_own(cluster: str) -> None:
    before = quiet()
    with attached({"address": cluster, "roles": {"engine": {"replicas": 2}, "trainer": {"ranks": 2}}}) as (own, notes):
        assert settled(before - 9)
        places = [("trainer", 0), ("trainer", 1), ("engine", 0), ("engine", 1), ("reference", 0), ("advantages", 0)]
        found = looked(own, *places)
        groups = [seen["group"] for seen in found]
        assert groups[0] == groups[1] and groups[2] == groups[3] and len(set(groups)) == 4
        assert all(seen["OMP_NUM_THREADS"] == "1" and seen["CUDA_VISIBLE_DEVICES"] == "" for seen in found)
    assert notes == []
    assert settled(before)


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "guest"), [("colocate", "engine"), ("hybrid", "reference")])
def test_who_shares_devices_sits_with_the_trainer(cluster: str, placement: str, guest: str) -> None:
    before = quiet()
    with attached({"address": cluster, "placement": placement}) as (own, _):
        other = {"engine": "reference", "reference": "engine"}[guest]
        trainer, shared, apart = looked(own, ("trainer", 0), (guest, 0), (other, 0))
        assert trainer["group"] == shared["group"] != apart["group"]
        assert own.placements.layout.seats["trainer", 0].bundle == own.placements.layout.seats[guest, 0].bundle
    assert settled(before)


def test_a_bus_that_asks_for_nothing_has_a_place_too(cluster: str) -> None:
    with attached({"address": cluster, "roles": {"bus": {"cpus": 0}}}) as (own, _):
        (found,) = looked(own, ("bus", 0))
        assert found["group"]


GPUS = (
    PROLOGUE
    + """
import logging, ray
from test_ray_cluster import looked
temp = sys.argv[2]
ray.init(address="local", num_cpus=12, num_gpus=2, include_dashboard=False, object_store_memory=10**8, _temp_dir=temp,
         logging_level=logging.ERROR)
roles = {"engine": {"replicas": 2, "gpus": 1}, "trainer": {"ranks": 2, "gpus": 1}}
with attached({"placement": "colocate", "roles": roles}) as (cluster, _):
    made = [(role, i) for role in ("engine", "trainer") for i in range(2)]
    devices = [seen["CUDA_VISIBLE_DEVICES"] for seen in looked(cluster, *made)]
    assert devices[:2] == devices[2:] and sorted(devices[:2]) == ["0", "1"], devices
    (stage,) = looked(cluster, ("reference", 0))
    assert stage["CUDA_VISIBLE_DEVICES"] == "", stage
ray.shutdown()
"""
)


@pytest.fixture
def short() -> Iterator[str]:
    """A folder for Ray with a short name."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="rx-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_colocated_roles_see_the_same_device(short: str) -> None:
    """Ray believes in two GPUs; what it hands out is looked at."""
    done = script(GPUS, short)
    assert done.returncode == 0, done.stderr


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_no_room_is_said_in_time(cluster: str) -> None:
    before, start = quiet(), time.monotonic()
    with (
        pytest.raises(
            RelaxError, match=r"^runtime\.roles\.engine: asks for 2 x \(50 CPUs, 0 GPUs\); after 2 s the"
        ) as e,
        attached({"address": cluster, "start_s": 2.0, "roles": {"engine": {"replicas": 2, "cpus": 50}}}),
    ):
        pass
    assert time.monotonic() - start < 10
    assert "its 1 node: 16 CPUs and 0 GPUs" in str(e.value) and "\n" not in str(e.value)
    assert settled(before)


@pytest.mark.slow
def test_who_waits_for_room_hears_of_it_and_gets_it(cluster: str) -> None:
    import ray

    from relax_plugin_ray import cluster as module

    taken = ray.util.placement_group([{"CPU": quiet()}])
    assert taken.wait(30)
    threading.Timer(module._QUIET_S + 1, ray.util.remove_placement_group, [taken]).start()
    with attached({"address": cluster, "start_s": 60.0}) as (_, notes):
        assert notes[0] == "waiting for room in the cluster for trainer: 1 x (1 CPU, 0 GPUs)"


def test_another_cluster_than_the_connected_one_is_refused(cluster: str) -> None:
    with pytest.raises(RelaxError, match=r"^runtime\.address: found elsewhere:1, but this process is connected"):
        with attached({"address": "elsewhere:1"}):
            pass


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """The address of a server that is not Ray: it gives this answer, or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = []

        def serve() -> None:
            connection, _ = server.accept()
            taken.append(connection)
            if answer is not None:
                connection.recv(100)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for connection in taken:
            connection.close()


def test_an_address_without_a_cluster() -> None:
    from relax_plugin_ray.cluster import _look

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(
        RelaxError, match=rf"^runtime\.address: found {address}, no Ray .* \(Connection refused\): write"
    ):
        _look(address, 5)
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(RelaxError, match="is not Ray"):
        _look(address, 5)
    start = time.monotonic()
    with listening(None) as address, pytest.raises(RelaxError, match=r"\(no answer\)"):
        _look(address, 0.5)
    assert time.monotonic() - start < 5


VERSIONS = (
    PROLOGUE
    + """
import ray
from relax_core.errors import RelaxError
ray.__version__ = "1.2.3"
try:
    with attached({"address": sys.argv[2]}):
        raise SystemExit("it started")
except RelaxError as error:
    print(error)
"""
)


def test_other_versions_of_ray_are_named(cluster: str) -> None:
    done = script(VERSIONS, cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"runtime.address: no connection to Ray at {cluster}: Version mismatch: The cluster")
    assert "1.2.3" in done.stdout and done.stdout.count("\n") == 1
