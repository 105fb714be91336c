"""What every process of a role does first: its devices, its log, the run rebuilt from the resolved file, the adapter.

Nothing here imports torch: that is left to what a role builds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from relax_core.errors import ConfigError
from relax_plugin_ray.logs import to_role_log
from relax_plugin_ray.media import SharedMedia

if TYPE_CHECKING:
    from relax_core.config.schema import ComponentSection
    from relax_core.interfaces import ModelAdapter
    from relax_core.run import Run


def confine() -> None:
    """An actor without a GPU of its own sees none, and torch computes in one thread there, whatever the machine has.

    To be called before torch is imported.
    """
    here = ray.get_runtime_context()
    if here.get_actor_id() is not None and not here.get_accelerator_ids()["GPU"]:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def node_address() -> str:
    """Where the other nodes of the cluster reach this one."""
    here: Callable[[], str] = ray.util.get_node_ip_address
    return here()


def keep_to(cores: Sequence[int], role: str) -> None:
    """Run on these cores alone, with all threads of this process; on any without some.

    Raises ConfigError for cores that this machine has not, and where processes cannot be kept to cores.
    """
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"runtime.roles: cores of {role}: only Linux keeps processes to cores; leave them out")
    last = (os.cpu_count() or 1) - 1
    if max(cores) > last:
        raise ConfigError(f"runtime.roles: cores of {role}: found {max(cores)}; its machine has 0 to {last}")
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def run_of(resolved: Mapping[str, Any], role: str) -> Run:
    """The run in this process, with its callbacks: hooks that fire here fire on instances of this process's own."""
    from relax_core.run import rebuild

    confine()
    run = rebuild(resolved)
    to_role_log(role, run.directory)
    # Arrays from the object store are read-only. Torch warns of that wherever it looks at one; nobody writes there.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    for i, section in enumerate(run.config.callbacks):
        run.stack.add_callback(run.stack.build("callbacks", section, where=f"callbacks.{i}"), f"callbacks.{i}")
    return run


def imported(run: Run, kind: str, section: ComponentSection) -> None:
    """Import what a component that computes brings along, some three thousand modules, before it is built.

    They stay, so Python's cycle collector need not walk them: not meanwhile, which takes a fifth of the time, nor ever.
    """
    gc.disable()
    try:
        run.stack.load(kind, section.id)
    finally:
        gc.freeze()
        gc.enable()


def adapter_of(run: Run) -> tuple[ModelAdapter, SharedMedia]:
    """The model adapter of a process, with a store that shares media with other processes."""
    from relax_core.run import build_modalities

    config, stack = run.config, run.stack
    media = SharedMedia(build_modalities(stack, config.modalities), max_bytes=config.data.media_bytes)
    adapter: ModelAdapter = stack.build("models", config.model, media, config.seed, where="model")
    return adapter, media
