"""Settings of the local runtime, apart from its code so that reading a run file imports nothing heavy.

Settings of any runtime may have these methods, all of them light, which ``relax check`` asks: ``problems(run, stack)``,
a line for each thing that cannot work, which begins with a setting's name; ``notes(run, stack)``, what is worth knowing
though it works; ``deployment(run, stack)``, (what, how) of where roles are and what overlaps; ``deployed()``, the
numbers for an estimate of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from relax_core.interfaces import ComponentConfig

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig
    from relax_core.plugins import Stack
    from relax_core.run import Run


@dataclass(frozen=True, slots=True)
class Deployed:
    """How many processes hold a copy of the policy, for an estimate of their memory."""

    engines: int = 1
    ranks: int = 1
    """Of the trainer."""
    together: Literal["resident", "turns", "apart"] = "resident"
    """Engine and trainer on one device: both keep their memory, or one at a time; or on devices of their own."""
    engine_gpus: float | None = None
    """Of each engine; None: what the engine's own settings take."""
    trainer_gpus: float | None = None
    """Of each rank."""
    here: bool = True
    """Whether they run on this machine."""
    old_policy_gpus: float | None = None
    """Of each process of the old policy, in a run that needs one; None: the trainer is the old policy."""
    critic_ranks: int | None = None
    """Where the critic has processes of its own; None: it is in the trainer's."""
    critic_gpus: float | None = None
    """Of each of these."""


class LocalConfig(ComponentConfig):
    overlap: Literal["turns", "process"] = "turns"
    """``turns``: engine and trainer take turns in one process (exact, debuggable). ``process``: the engine has its own
    process, and samples while the trainer computes (for speed)."""
    placement: Literal["resident", "colocate"] = "resident"
    """``resident``: engine and trainer keep their memory. ``colocate``: they take turns on the device; the trainer
    waits for the whole step's rollout, and the one that waits frees its memory for the other."""

    def deployment(self, run: RunConfig, stack: Stack) -> Iterator[tuple[str, str]]:
        """Where the roles are, and what overlaps."""
        apart = self.overlap == "process"
        yield "roles", "the engine in a process of its own, all others in this one" if apart else "all in this process"
        if self.placement == "colocate":
            yield "overlap", "engine and trainer take turns on the device; the one that waits frees its memory"
        elif not apart:
            yield "overlap", "none: engine and trainer take turns in one process"
        else:
            yield "overlap", overlap_of(run)

    def deployed(self) -> Deployed:
        return Deployed(together="turns" if self.placement == "colocate" else "resident")


def deployed_of(run: Run) -> Deployed:
    """As the run's runtime says; the default where it says nothing."""
    runtime: Any = run.stack.config("runtimes", run.config.runtime, "runtime")
    found: Deployed = runtime.deployed() if hasattr(runtime, "deployed") else Deployed()
    return found


def overlap_of(run: RunConfig) -> str:
    """What an engine and a trainer that could work at the same time do."""
    if run.max_staleness == 0:
        return "engine and trainer take turns, for max_staleness is 0: each waits for the other in every step"
    versions = f"{run.max_staleness} policy version{'' if run.max_staleness == 1 else 's'}"
    return f"engine and trainer overlap, up to {versions} apart"
