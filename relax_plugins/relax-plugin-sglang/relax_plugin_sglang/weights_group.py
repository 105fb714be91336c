"""Weights broadcast into the server over a process group: NCCL between GPUs, else gloo."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from relax_core.errors import EngineError
from relax_core.transports.group import new_store
from relax_plugin_sglang.weights import Sender

if TYPE_CHECKING:
    from torch import Tensor

    from relax_plugin_sglang.names import Named

_BUCKET = 1 << 30
"""Bytes of one request and broadcast: both sides pack so much."""


class GroupSender(Sender):
    """Rank 0 of a group with the server's ranks, which is made by the first ``send``.

    Weights on a GPU go by NCCL: that GPU must be none of the server's. ``timeout_s``: how long one bucket may take, and
    the server's coming. A group that broke is made anew by the next ``send``.
    """

    timeout_s = 120.0
    bucket_bytes = _BUCKET
    _name = ""
    _group: Any = None

    async def _send(self, named: Named, last: Mapping[str, Any]) -> None:
        buckets = list(_buckets(named, self.bucket_bytes))
        if self._group is None:
            await self._join("nccl" if named[0][1].is_cuda else "gloo")
        for number, bucket in enumerate(buckets, 1):
            body = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self._name,
                "load_format": "flattened_bucket",
            }
            if number == len(buckets):
                body |= last
            packed = _packed(bucket)
            group = self._group
            await self._both(
                self._update("/update_weights_from_distributed", body),
                lambda group=group, packed=packed: self._broadcast(group, packed),  # type: ignore[misc]
            )

    async def _join(self, backend: str) -> None:
        host = _own_address(self.client.url)
        store, port = new_store(host)
        self._name = f"relax-{secrets.token_hex(6)}"
        about = {"master_address": host, "master_port": port, "group_name": self._name, "backend": backend}
        about |= {"rank_offset": 1, "world_size": 1 + self.ranks}
        found: list[Any] = []

        def make() -> None:
            found.append(_member(store, self._name, 1 + self.ranks, backend, self.timeout_s))

        await self._both(self.client.post("/init_weights_update_group", about), make)
        self._group = found[0]

    async def _both(self, asked: Any, work: Callable[[], None]) -> None:
        """The request, and our part of it in a thread. What fails first is raised, and then the group is given up."""
        request, ours = asyncio.ensure_future(asked), _in_thread(work)
        try:
            async with asyncio.timeout(self.timeout_s):
                done, _ = await asyncio.wait({request, ours}, return_when=asyncio.FIRST_EXCEPTION)
                for task in sorted(done, key=lambda task: task is ours):  # the server's own words rather than ours
                    task.result()
        except BaseException as error:
            self._give_up()
            ours.add_done_callback(
                lambda failed: failed.cancelled() or failed.exception()
            )  # nobody asks for it any more
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"engine sglang: weights: the group with the server took more than {self.timeout_s:g} s: the "
                    "server hangs, or does not reach this machine; start it again"
                ) from None
            if isinstance(error, RuntimeError):
                raise EngineError(f"engine sglang: weights: the group with the server broke: {error}") from error
            raise

    def _broadcast(self, group: Any, packed: Tensor) -> None:
        work = group.broadcast(packed, 0)
        end = time.monotonic() + self.timeout_s
        # Looked at rather than waited for: NCCL would let the host go on, and a dead server would never show.
        while not work.is_completed():
            if time.monotonic() > end or self._group is not group:
                raise RuntimeError("a bucket did not arrive in time")
            time.sleep(0.0002)
        work.wait()

    def _give_up(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=_abort, args=(group,), name="weights group end", daemon=True).start()

    async def close(self) -> None:
        """Leave the group, and have the server leave it."""
        if self._group is not None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await self.client.post("/destroy_weights_update_group", {"group_name": self._name})
            self._give_up()


def _buckets(named: Named, size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, each of one dtype: the server views the packed bytes, which must be aligned."""
    bucket: list[tuple[str, Tensor]] = []
    room = size
    for name, tensor in named:
        if bucket and (tensor.nbytes > room or tensor.dtype != bucket[-1][1].dtype):
            yield bucket
            bucket, room = [], size
        bucket.append((name, tensor))
        room -= tensor.nbytes
    yield bucket


def _packed(bucket: Named) -> Tensor:
    import torch

    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket])


def _member(store: Any, name: str, size: int, backend: str, timeout_s: float) -> Any:
    """Rank 0. The server makes its own with torch's default settings, under these prefixes of the store's keys."""
    from torch._C._distributed_c10d import PrefixStore

    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = PrefixStore(prefix, store)
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, 0, size, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, 0, size, timeout)


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Of a thread that nobody waits for when the interpreter ends: a group may hang on a dead server."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(None)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as failed:
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="weights group", daemon=True).start()
    return future


def _own_address(url: str) -> str:
    """The address under which the server's machine sees this one."""
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 80), timeout=10.0) as probe:
        return str(probe.getsockname()[0])
