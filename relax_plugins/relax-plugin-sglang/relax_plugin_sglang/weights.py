"""How weights that were received and verified here get into the running server."""

from __future__ import annotations

import base64
import io
import shutil
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from relax_core.errors import EngineError, WeightsError
from relax_plugin_sglang.client import ServerUnreachable
from relax_plugin_sglang.release import Release, installed

if TYPE_CHECKING:
    from torch import Tensor

    from relax_plugin_sglang.client import Client
    from relax_plugin_sglang.config import SglangConfig
    from relax_plugin_sglang.names import Checkpoint, Named
    from relax_plugin_sglang.readback import Readback

Way = Literal["ipc", "group", "files"]
SHARED_MEMORY = Path("/dev/shm")
BEGIN, END = "/begin_weight_update", "/end_weight_update"
"""Routes of a session, in which a server takes weights."""


class Sender(ABC):
    """Of one life of a server: close it before the server is started again.

    ``checkpoint``: of the folder with which the server was started. ``ranks``: processes that share its model.
    ``sessions``: whether the server takes weights only in a session (see ``Release``).
    """

    def __init__(
        self,
        client: Client,
        checkpoint: Checkpoint,
        readback: Readback | None = None,
        ranks: int = 1,
        sessions: bool = False,
    ) -> None:
        self.client, self.checkpoint, self.readback, self.ranks = client, checkpoint, readback, ranks
        self.sessions = sessions

    device: str = "cpu"
    """Where the memory should lie into which the weights are received."""

    def check(self, named: Named) -> None:
        """Raises WeightsError for tensors that the server's model does not have, or not with this shape."""
        self.checkpoint.named(named)

    async def send(self, named: Named, label: str) -> None:
        """Replace these tensors in the server, whose weights are called ``label`` from then on. They must stay as they
        are until this returns. Its prefix cache stays: an update that empties it ends a server that is not idle, and
        it may not be for a moment after its last answer.

        Raises WeightsError for tensors that it does not know (before anything is sent), that it refuses, or that it
        has not afterwards, and EngineError when it is gone. After all but the first its weights are mixed.
        """
        known = self.checkpoint.named(named)
        if not known:
            raise WeightsError("weights: there is nothing to send")
        async with self._session():
            await self._send(known, {"weight_version": label})
        if self.readback is not None:
            await self.readback.check(known, label)

    @abstractmethod
    async def _send(self, named: Named, last: Mapping[str, Any]) -> None:
        """``last``: what the last request for an update says besides."""

    async def close(self) -> None:
        """Give back what it holds, here and in the server."""

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """What goes wrong within leaves it open: that server is of no use any more; the next ``Life`` ends it."""
        if self.sessions:
            await self._ask(BEGIN, {})
        yield
        if self.sessions:
            await self._ask(END, {})

    async def _update(self, route: str, body: Mapping[str, Any]) -> None:
        """Ask for an update, or a part of one."""
        await self._ask(route, {"flush_cache": False, **body})

    async def _ask(self, route: str, body: Mapping[str, Any]) -> None:
        """Raises WeightsError with the server's words when it refuses."""
        try:
            answer = await self.client.post(route, body)
        except ServerUnreachable:
            raise
        except EngineError as error:
            raise WeightsError(f"weights: the server refused them, and may hold a mixture now: {error}") from error
        if not (isinstance(answer, dict) and answer.get("success")):
            raise WeightsError(f"weights: the server refused them, and may hold a mixture now: {answer}")


def sender(config: SglangConfig, client: Client, folder: Path, device: str, about: Mapping[str, Any]) -> Sender:
    """The one that the settings ask for, for a server that computes on ``device`` (``cpu``, ``cuda``, ``cuda:1``), was
    started with this model folder and says this ``about`` itself. Raises WeightsError for a folder without safetensors.
    """
    from relax_plugin_sglang.names import Checkpoint
    from relax_plugin_sglang.readback import Readback

    readback = Readback(client, config.readback) if config.readback else None
    sessions = Release.of(str(about.get("version", ""))).sessions
    given = (client, Checkpoint.of(folder), readback, int(about["tp_size"]), sessions)
    here = config.url is None or _is_here(config.url)
    way = chosen(config.weights, here, device, device != "cpu" and _same_torch(config.python))
    if way == "files":
        return FilesSender(*given)
    if way == "group":
        from relax_plugin_sglang.weights_group import GroupSender

        return GroupSender(*given)
    found = IpcSender(*given)
    found.device = "cuda:0" if device == "cuda" else device
    return found


def _is_here(url: str) -> bool:
    """Whether the server's address is one of this machine's: then we can listen on it."""
    host = str(urlsplit(url).hostname)
    try:
        with socket.create_server((socket.gethostbyname(host), 0)):
            return True
    except OSError:
        return False


def _same_torch(python: Path | None) -> bool:
    """Whether an environment's torch is of our release, as 2.11; of one that we do not see it is not known."""
    if python is None:
        return False
    theirs = installed(python, "torch")
    return theirs.split(".")[:2] == version("torch").split(".")[:2]


def chosen(wanted: Literal["auto"] | Way, here: bool, device: str, torch_fits: bool) -> Way:
    """The way for a server on this machine or elsewhere, and the device on which it computes.

    ``torch_fits``: whether both sides' torch is known to be of one release (as 2.11): handles of GPU memory are its own
    format. Memory of the processor is shared by name, which every release reads.
    """
    if wanted != "auto":
        return wanted
    if not here:
        return "group"
    return "ipc" if device == "cpu" or torch_fits else "files"


class IpcSender(Sender):
    """The server maps the very memory in which the weights lie: shared memory, or that of a GPU.

    A request has a tensor of bytes and says where in it each weight lies. All weights of a ``Receiver`` lie in one
    buffer, or two.
    """

    async def _send(self, named: Named, last: Mapping[str, Any]) -> None:
        buffers = _buffers(named)
        for number, bucket in enumerate(buffers, 1):
            # One entry for each rank, made anew: the memory of a GPU counts its readers.
            entries = [_pickled(bucket) for _ in range(self.ranks)]
            body: dict[str, Any] = {"serialized_named_tensors": entries, "load_format": "flattened_bucket"}
            if number == len(buffers):
                body |= last
            await self._update("/update_weights_from_tensor", body)
        if named[0][1].is_cuda:
            import torch

            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what the server has closed may be freed


def _buffers(named: Named) -> list[dict[str, Any]]:
    """By storage: its bytes, and what lies where."""
    import torch

    found: dict[int, dict[str, Any]] = {}
    for name, given in named:
        tensor = given.detach().contiguous()
        storage = tensor.untyped_storage()
        at = tensor.storage_offset() * tensor.element_size()
        if (place := storage.data_ptr()) not in found:
            flat: Tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found[place] = {"flattened_tensor": flat, "metadata": []}
        found[place]["metadata"].append(
            # The server reads these attributes and makes an object of its own class.
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=at,
                end_idx=at + tensor.nbytes,
                numel=tensor.nbytes,
            )
        )
    return list(found.values())


def _pickled(value: Mapping[str, Any]) -> str:
    """Handles instead of the tensors' bytes. The server unpickles only what torch's own sharing needs."""
    import torch

    data = io.BytesIO()
    pickler = ForkingPickler(data)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: _reduced}
    with _shared_by_name():
        pickler.dump(value)
    return base64.b64encode(data.getvalue()).decode()


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    """As torch does it, but with the GPU's name for its number, which is another one in the server."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, about = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        about = (*about[:_DEVICE], uuid, *about[_DEVICE + 1 :])
    return rebuild, about


_DEVICE = 6
"""The place of the device's number among what torch sends of a GPU's tensor; SGLang takes the GPU's name there."""
_strategy = threading.Lock()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Torch's default hands descriptors over, which only a process of our own tree could take: the server would end."""
    from torch import multiprocessing

    with _strategy:
        before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


class FilesSender(Sender):
    """A safetensors file for the server to read: any release of torch, any machine that sees the folder.

    ``folder``: where; default: in shared memory where that has room, else where temporary files are.
    """

    folder: Path | None = None

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """A file is an update of its own."""
        yield

    async def _send(self, named: Named, last: Mapping[str, Any]) -> None:
        import asyncio

        size = sum(tensor.nbytes for _, tensor in named)
        folder = Path(tempfile.mkdtemp(prefix="relax-weights-", dir=self.folder or _roomy(size)))
        try:
            await asyncio.to_thread(_written, folder / "model.safetensors", named)
            body = {"model_path": str(folder), "load_format": "safetensors", **last}
            await self._update("/update_weights_from_disk", body)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _written(file: Path, named: Named) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in named}, file)


def _roomy(size: int) -> Path | None:
    try:
        return SHARED_MEMORY if shutil.disk_usage(SHARED_MEMORY).free > 1.1 * size else None
    except OSError:
        return None
