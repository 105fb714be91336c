"""A process group for one publisher (rank 0) and its receivers: broadcasts in buckets, and ends when a member dies."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

_AHEAD = 4
"""Buckets on their way at once."""
_CONNECTIONS = 2
"""Of gloo from the publisher to a member; buckets take them in turn. Each has a thread of its own on both sides: one
copies while the other waits."""

_END_S = 3.0
"""How long ``close`` waits."""


class Group:
    """One generation. It is made by the first broadcast or receive, when all of its members come.

    ``broken``: it failed, for whatever reason, and can do no more.
    """

    def __init__(self, store: Store, generation: int, rank: int, size: int, backend: str, timeout_s: float) -> None:
        self.generation, self.broken = generation, False
        self._store, self._rank, self._size = store, rank, size
        self._backend, self._timeout_s = backend, timeout_s
        self._group: Any = None
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None

    def broadcast(self, buffer: Tensor, bucket: int) -> None:
        """The publisher's side. Publications of one group follow each other."""
        with self._lock:
            for _ in self._buckets(buffer, bucket):
                pass

    def receive(self, out: Tensor, bucket: int) -> Iterator[int]:
        """How many bytes are there; ends early when the group breaks."""
        return self._buckets(out, bucket)

    def leave(self) -> None:
        """End it; others see it broken."""
        self.broken = True
        group, self._group = self._group, None
        if group is not None:
            # Its threads may hang on a dead member until they time out: nobody waits for that.
            self._ending = threading.Thread(target=_abort, args=(group,), name="weights group end", daemon=True)
            self._ending.start()

    def close(self) -> None:
        """Leave it, and wait a little until it has ended: a process that exits in the middle of that is aborted."""
        self.leave()
        if self._ending is not None:
            self._ending.join(_END_S)

    def _buckets(self, buffer: Tensor, bucket: int) -> Iterator[int]:
        waiting: deque[tuple[Work, int]] = deque()
        try:
            if self.broken:
                return
            group = self._made(buffer)
            for at in range(0, buffer.numel(), bucket):
                stop = min(at + bucket, buffer.numel())
                waiting.append((self._send(group, buffer[at:stop]), stop))
                if len(waiting) > _AHEAD:
                    yield self._finish(*waiting.popleft())
            while waiting:
                yield self._finish(*waiting.popleft())
        except RuntimeError:
            if self._rank == 0:
                self._store.set(f"broken/{self.generation}", "1")
            self.leave()

    def _made(self, buffer: Tensor) -> Any:
        if self._group is None:
            from torch._C._distributed_c10d import PrefixStore

            if self._rank and self._store.check([f"broken/{self.generation}"]):
                raise RuntimeError("it broke before this member came")
            store = PrefixStore(f"group/{self.generation}", self._store)
            if self._backend == "nccl":
                self._group = self._nccl(store)
            else:
                self._group = self._gloo(store)
        return self._group

    def _gloo(self, store: Store) -> Any:
        from torch.distributed import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        address = _own_address(self._store)
        options._devices = [gloo.create_device(hostname=address) for _ in range(_CONNECTIONS)]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = _AHEAD
        return gloo(store, self._rank, self._size, options)

    def _nccl(self, store: Store) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        return ProcessGroupNCCL(store, self._rank, self._size, options)

    def _send(self, group: Any, piece: Tensor) -> Work:
        work: Work = group.broadcast(piece, 0)
        return work

    def _finish(self, work: Work, stop: int) -> int:
        if self._backend != "nccl":
            work.wait(timedelta(seconds=self._timeout_s))
            return stop
        # NCCL would let the host go on, and a dead member would show in a later call that never returns.
        end = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > end or self.broken:
                raise RuntimeError("a member did not come")
            time.sleep(0.0002)
        work.wait()
        return stop


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # what it waited for failed as well
        group.abort()


def group_name(host: str, port: int) -> str:
    return f"group {host}:{port}"


def new_store(host: str, port: int | None = None) -> tuple[Store, int]:
    """Where the members of a group find each other, and its port: made here if no port is given."""
    from torch._C._distributed_c10d import TCPStore

    patience = timedelta(seconds=30)
    if port is not None:
        return TCPStore(host, port, is_master=False, timeout=patience), port
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    # The store would listen on every address; it takes over a socket that listens on this one.
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=listener.detach()
    )
    return store, port


def _own_address(store: Any) -> str:
    """The address by which this machine reaches the store, which is one that the others reach."""
    with socket.create_connection((store.host, store.port), timeout=30.0) as probe:
        return str(probe.getsockname()[0])
