"""The Ray cluster of a run: attached to or started, with a place for every role in it, and left or ended."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_core.errors import RelaxError
from relax_plugin_ray.plan import Layout, Need, count, layout, needed_roles, whole_cpus

if TYPE_CHECKING:
    from relax_core.run import Run
    from relax_plugin_ray.config import RayConfig

Note = Callable[[str], None]
_state: Any = ray
"""Its functions without types."""

_CONNECT_S = 5.0
"""For a first sign of life: Ray itself tries for two minutes, then ends the process."""
_QUIET_S = 5.0
"""Waiting for room longer than this is worth a line."""
_LONGEST_TEMP = 30
"""Characters of a folder in which Ray's sockets can be: their paths have 107 at most."""
_QUIET = {"task_events_report_interval_ms": 0, "enable_metrics_collection": False, "event_stats": False}
"""Records that Ray keeps of each call cost time; of a cluster that ends with its run nobody could read them."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of gRPC says first: HTTP/2, and no settings. A server's answer is a frame of the type 4, too."""


@dataclass(slots=True)
class Placements:
    """A placement group for each role, or for those that share devices; and each process's place there."""

    layout: Layout
    groups: dict[str, PlacementGroup] = field(default_factory=dict)

    def options(self, role: str, index: int) -> dict[str, Any]:
        """Of the actor in a place: its resources and scheduling. Not its name: one that is made anew in the place of
        another may come before the other's name is free.

        Nor an environment (see ``worker.confine``): for one Ray starts every process twice, and none beforehand.
        """
        seat = self.layout.seats[role, index]
        strategy = PlacementGroupSchedulingStrategy(self.groups[seat.group], seat.bundle)
        return {"num_cpus": seat.cpus, "num_gpus": seat.gpus, "scheduling_strategy": strategy}

    def remove(self) -> None:
        """Give the room back; whatever still is there is ended."""
        for group in self.groups.values():
            remove_placement_group(group)
        self.groups.clear()


class Cluster:
    """What ``attach`` gives. ``owned``: this process started it, and ends it in ``release``."""

    def __init__(self, owned: bool, folder: Path | None, connected: bool) -> None:
        self.owned, self._folder, self._connected = owned, folder, connected
        self.placements = Placements(Layout())

    @classmethod
    async def attach(cls, config: RayConfig, run: Run, others: Sequence[str], note: Note) -> Cluster:
        """Connect to the cluster or start one, and reserve a place for every role, of these ``others`` too.

        Raises RelaxError when that cannot be done within ``start_s``; then nothing is left behind.
        """
        deadline = time.monotonic() + config.start_s
        needs = needed_roles(config, run.config, run.stack, others)
        seats = layout(config, needs)
        cluster = _join(config.address, config.start_s) if config.address else _start(seats, note)
        try:
            cluster.placements = await place(config, seats, needs, note, deadline, cluster.owned)
        except BaseException:
            await cluster.release()
            raise
        return cluster

    def options(self, role: str, index: int) -> dict[str, Any]:
        """See ``Placements.options``."""
        return self.placements.options(role, index)

    async def release(self) -> None:
        """Give all places back and leave the cluster, or end it. Safe to call twice, and when the cluster is gone."""
        if self._connected and ray.is_initialized():
            await asyncio.to_thread(ray.shutdown)  # ends this job's actors and placement groups, too
        elif ray.is_initialized():
            self.placements.remove()
        self._connected = False
        self.placements.groups.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


# --- attach or start --------------------------------------------------------------------------------------------------


def _join(address: str, start_s: float) -> Cluster:
    """The running cluster at an address. This process may be connected already; then it stays so in the end."""
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in (own, "auto"):
            raise RelaxError(f"runtime.address: found {address}, but this process is connected to the cluster at {own}")
        return Cluster(owned=False, folder=None, connected=False)
    if address != "auto":
        _look(address, min(start_s, _CONNECT_S))
    _init(address, address=address)
    return Cluster(owned=False, folder=None, connected=True)


def _start(seats: Layout, note: Note) -> Cluster:
    """A cluster on this machine, for this run alone."""
    if ray.is_initialized():
        return Cluster(owned=False, folder=None, connected=False)
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="relax-", dir=base if len(base) <= _LONGEST_TEMP else "/tmp"))
    cpus = max(os.cpu_count() or 1, whole_cpus(seats))
    options: dict[str, Any] = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    options |= {"_temp_dir": str(folder), "_system_config": _QUIET}
    try:
        try:
            _init("this machine", **options)
        except RelaxError as error:
            if "timed out during startup" not in str(error):
                raise
            note("Ray did not start within its 30 s: this machine is busy; trying once more")
            _init("this machine", **options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Cluster(owned=True, folder=folder, connected=True)


def _init(where: str, **options: Any) -> None:
    """``ray.init`` without its greetings, and with one line for what goes wrong."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # worker.confine hides GPUs itself
    try:
        ray.init(**options, logging_level=logging.ERROR, log_to_driver=True)
    except (Exception, SystemExit) as error:
        ray.shutdown()
        said = " ".join(str(error).split())
        if said.startswith("Version mismatch"):
            said += " Install the cluster's versions here, or these on the cluster."
        elif _refused(error):
            said = (
                "the cluster wants a token (RAY_AUTH_MODE=token): give this process the settings of the cluster's own, "
                "RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"
            )
        elif isinstance(error, SystemExit):
            said = "it does not answer"
        elif options["address"] == "auto":
            said = "this machine is a node of no running cluster: start one with `ray start`, or leave address out"
        place = "runtime.address" if options["address"] != "local" else "runtime"
        raise RelaxError(f"{place}: no connection to Ray at {where}: {said[:500]}") from error


def _refused(error: BaseException | None) -> bool:
    """Whether an error comes from a missing or a wrong token."""
    while error is not None and not isinstance(error, ray.exceptions.AuthenticationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _look(address: str, seconds: float) -> None:
    """Raise RelaxError unless something that speaks Ray's protocol answers at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            if os.environ.get("RAY_USE_TLS") in (None, "0"):
                connection.sendall(_HELLO)
                answer = connection.recv(9)
                if len(answer) < 4 or answer[3] != 4:
                    raise ConnectionError("what listens there is not Ray")
    except OSError as error:
        said = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise RelaxError(
            f"runtime.address: found {address}, no Ray cluster can be reached there ({said}): write what "
            "`ray start --head` said, or leave address out for a cluster on this machine"
        ) from error


# --- places -----------------------------------------------------------------------------------------------------------


async def place(
    config: RayConfig, seats: Layout, needs: Sequence[Need], note: Note, deadline: float, alone: bool
) -> Placements:
    """Reserve every bundle. Raises RelaxError, naming the role, when there is no room until ``deadline``.

    ``alone``: the cluster is this run's own: what it lacks now will not come.
    """
    if alone:
        _check_total(seats, needs)
    found = Placements(seats)
    try:
        for name, bundles in seats.bundles.items():
            free = _state.available_resources()
            wanted = [{k: v for k, v in (("CPU", cpus), ("GPU", gpus)) if v} for cpus, gpus in bundles]
            found.groups[name] = placement_group(wanted, strategy=seats.strategies[name])
            if not await _ready(found.groups[name], min(_QUIET_S, deadline - time.monotonic())):
                note(f"waiting for room in the cluster for {name}: {_asked(bundles)}")
                if not await _ready(found.groups[name], deadline - time.monotonic()):
                    raise RelaxError(_no_room(name, bundles, free, config))
    except BaseException:
        found.remove()
        raise
    return found


async def _ready(group: PlacementGroup, seconds: float) -> bool:
    return bool(await asyncio.to_thread(group.wait, max(0.1, seconds)))


def _check_total(seats: Layout, needs: Sequence[Need]) -> None:
    """Raise RelaxError for the role at which the GPUs of all nodes together are used up; CPUs are only numbers here."""
    left = has = _state.cluster_resources().get("GPU", 0.0)
    for name, bundles in seats.bundles.items():
        left -= (asked := sum(gpus for _, gpus in bundles))
        if left < 0:
            said = {need.role: str(need) for need in needs}
            raise RelaxError(
                f"runtime.roles.{name}: asks for {said.get(name, _asked(bundles))}; this machine has "
                f"{count(has, 'GPU')}, of which other roles take {has - left - asked:g}: ask for less, or give the "
                "runtime the address of a cluster that has more"
            )


def _asked(bundles: Sequence[tuple[float, float]]) -> str:
    return ", ".join(
        f"{bundles.count(bundle)} x ({count(bundle[0], 'CPU')}, {count(bundle[1], 'GPU')})"
        for bundle in dict.fromkeys(bundles)
    )


def _no_room(name: str, bundles: Sequence[tuple[float, float]], free: dict[str, float], config: RayConfig) -> str:
    nodes = [node["Resources"] for node in _state.nodes() if node["Alive"]]
    largest: dict[str, float] = max(nodes, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)), default={})

    def has(what: dict[str, float]) -> str:
        return f"{count(what.get('CPU', 0.0), 'CPU')} and {count(what.get('GPU', 0.0), 'GPU')}"

    return (
        f"runtime.roles.{name}: asks for {_asked(bundles)}; after {config.start_s:g} s the cluster had {has(free)} "
        f"free (its {count(len(nodes), 'node')}: {has(_state.cluster_resources())}, the largest {has(largest)}): ask "
        "for less, add nodes, or raise runtime.start_s"
    )
