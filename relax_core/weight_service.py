"""Who holds which weights: the coordinator of the trainer's group and of all that receive from it. No I/O.

Members report what they hold; from that the coordinator names a living source for whoever lacks weights. It keeps
nothing that its members do not know: after its own restart it is rebuilt from their reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relax_core.errors import WeightsError
from relax_core.types import Version


@dataclass(frozen=True, slots=True)
class Holding:
    """What a member holds. ``base`` is the id of the frozen tensors' publication; ``source``: others may ask it."""

    member: str
    version: Version
    base: str | None = None
    source: bool = True


@dataclass(frozen=True, slots=True)
class Transfer:
    """One receiver's time for one version; ``source`` is the member that gave it."""

    version: Version
    member: str
    source: str
    seconds: float
    nbytes: int

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def row(self) -> dict[str, float | str]:
        """For ``metrics.jsonl``."""
        return {
            "lineage": self.version.lineage,
            "version": self.version.number,
            "member": self.member,
            "source": self.source,
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "gb_per_s": self.gb_per_s,
        }


class Coordinator:
    """Plain and synchronous: call it from one thread, or host it in an actor. ``kept`` transfers stay in its log.

    A version of a later lineage is newer than all of an earlier one.
    """

    def __init__(self, kept: int = 10_000) -> None:
        self._holdings: dict[str, Holding] = {}
        self._serving: dict[str, str] = {}
        self._transfers: deque[Transfer] = deque(maxlen=kept)
        self._logged = 0

    # --- who holds what -----------------------------------------------------------------------------------------------

    def report(self, holding: Holding) -> None:
        """A member says what it holds; again whenever that changes. What it was receiving, it has received."""
        self._holdings[holding.member] = holding
        self._serving.pop(holding.member, None)

    def rebuild(self, reports: Iterable[Holding]) -> None:
        """Begin anew with what the living members say. Earlier transfers are in the metrics, and not repeated."""
        self._holdings = {holding.member: holding for holding in reports}
        self._serving.clear()

    def lost(self, member: str) -> None:
        """It is gone: it holds nothing, and serves nobody."""
        self._holdings.pop(member, None)
        self._serving.pop(member, None)
        for receiver in [r for r, source in self._serving.items() if source == member]:
            del self._serving[receiver]

    def newest(self) -> Version | None:
        """The newest version that a living member holds."""
        return max((holding.version for holding in self._holdings.values()), default=None)

    def holders(self, version: Version) -> list[str]:
        """Living members that hold it, by name."""
        return sorted(h.member for h in self._holdings.values() if h.version == version)

    def held(self, member: str) -> Holding | None:
        return self._holdings.get(member)

    # --- who gives ----------------------------------------------------------------------------------------------------

    def source_for(self, member: str) -> Holding:
        """Who should give the newest version to a member: of those that hold it the one that serves the fewest.

        It counts as serving until the member reports, is lost, or asks again. Raises WeightsError when nobody can.
        """
        self._serving.pop(member, None)
        givers = [h for h in self._holdings.values() if h.source and h.member != member]
        if not givers:
            raise WeightsError(
                f"weights for {member}: no living member holds any; load the trainer's newest snapshot and publish it"
            )
        newest = max(holding.version for holding in givers)
        load = {h.member: 0 for h in givers if h.version == newest}
        for source in self._serving.values():
            if source in load:
                load[source] += 1
        chosen = min(load, key=lambda name: (load[name], name))
        self._serving[member] = chosen
        return self._holdings[chosen]

    # --- the log ------------------------------------------------------------------------------------------------------

    def record(self, transfer: Transfer) -> None:
        self._transfers.append(transfer)
        self._logged += 1

    def log(self) -> list[dict[str, float | str]]:
        """Rows for the metrics that were not given before, oldest first."""
        count, self._logged = min(self._logged, len(self._transfers)), 0
        return [transfer.row() for transfer in list(self._transfers)[len(self._transfers) - count :]]

    def summary(self, version: Version) -> Mapping[str, float]:
        """Of one version: receivers, bytes of them all, seconds of the slowest, and GB/s of each by name."""
        some = [transfer for transfer in self._transfers if transfer.version == version]
        totals = {
            "receivers": float(len(some)),
            "bytes": float(sum(t.nbytes for t in some)),
            "seconds": max((t.seconds for t in some), default=0.0),
        }
        return totals | {f"gb_per_s/{t.member}": t.gb_per_s for t in some}
