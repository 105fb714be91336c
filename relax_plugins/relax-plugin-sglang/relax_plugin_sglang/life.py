"""One life of a server, from its start to its end: its process where it is ours, its client, and who is with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from relax_core.errors import EngineError
from relax_plugin_sglang import media
from relax_plugin_sglang.client import Client, ServerUnreachable
from relax_plugin_sglang.folder import model_config, model_folder, routing
from relax_plugin_sglang.gate import Gate
from relax_plugin_sglang.release import Release, installed
from relax_plugin_sglang.server import Server
from relax_plugin_sglang.weights import END, Sender, sender
from relax_plugin_sglang.wire import Wire

if TYPE_CHECKING:
    from relax_core.setup import EngineSetup
    from relax_core.types import Version
    from relax_plugin_sglang.config import SglangConfig

_AGAIN_S = 0.1
"""Between two attempts to abort what is running, or to find the server idle."""
_DEATH_S = 2.0
"""How long the end of a process may take to be noticed after its connections broke."""
_ANSWER_S = 10.0
"""In which a server that lives says who it is."""


class Life:
    """Made by ``begin``. ``end`` it: nothing of it is left then."""

    def __init__(self, config: SglangConfig, setup: EngineSetup) -> None:
        self.config, self.setup = config, setup
        self._ends = contextlib.AsyncExitStack()
        self._scratch = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="relax-sglang-")))
        self.gate = Gate(config.in_flight)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Has the reason as its result once the server is of no use any more."""
        self.loading = asyncio.Lock()
        self.aborts = 0
        """How often everything that was running has been aborted."""
        self.server: Server | None = None
        self.client: Client
        self.sender: Sender
        self.wire: Wire
        self._frozen: set[str] = set()
        self._aborting: set[asyncio.Task[None]] = set()
        self._name, self._serial = uuid4().hex[:8], count()

    @classmethod
    async def begin(cls, config: SglangConfig, setup: EngineSetup) -> Self:
        """Start a server, or find the one that runs. Raises EngineError."""
        life = cls(config, setup)
        try:
            await life._begin()
        except BaseException:
            await life.end("it did not start")
            raise
        return life

    async def _begin(self) -> None:
        config, adapter = self.config, self.setup.adapter
        media.check_adapter(adapter)
        folder = await asyncio.to_thread(model_folder, config, adapter, self._scratch)
        media.check_model(adapter, str(model_config(folder).get("model_type")))
        experts = routing(folder) if config.routed_experts else None
        device = _device(config.device)
        if config.python is not None:
            installed_there = await asyncio.to_thread(installed, config.python, "sglang")
            self._accept(Release.of(installed_there), f"engine.python: {config.python}")
            log = (self.setup.directory or self._scratch) / "logs" / f"{self.setup.role}-server.log"
            self.server = server = Server(config, folder, device, log, bool(adapter.kinds))
            self._ends.push_async_callback(server.stop)
            self.client = self._client(server.url, server.key)
            await server.start(self.client)
            about = await self.client.get("/server_info")
            server.died.add_done_callback(lambda died: self.die(died.result()))
            if server.died.done():
                self.die(server.died.result())
        else:
            self.client = self._client(str(config.url), _key(config))
            about = await self._find()
            if adapter.kinds:
                await media.check_server(self.client)
            self._ends.push_async_callback(self._leave)
        self.sender = sender(config, self.client, folder, device, about)
        self._ends.push_async_callback(self.sender.close)
        self.wire = Wire.of(adapter, self.setup.seed if config.deterministic else None, experts)

    def _accept(self, release: Release, where: str) -> None:
        release.check(where)
        if line := release.note():
            self.setup.note(line)

    def _client(self, url: str, key: str | None) -> Client:
        config = self.config
        client = Client(url, key, config.request_s, config.control_s)
        self._ends.push_async_callback(client.close)
        self.ended.add_done_callback(lambda _: client.cut())
        return client

    async def _find(self) -> Mapping[str, Any]:
        """Wait for a server elsewhere, refuse one that was started without what is needed, and have it load the weights
        with which it was started. What it says about itself."""
        try:
            async with asyncio.timeout(self.config.start_s):
                await self._until("/model_info")
                await self.client.post("/continue_generation", {})  # one that a killed run left frozen is not healthy
                await self._until("/health")
        except TimeoutError:
            raise EngineError(
                f"engine.url: no server answers at {self.config.url} after {self.config.start_s:g} s; start it, or "
                "correct url and key_env"
            ) from None
        found: Mapping[str, Any] = await self.client.get("/server_info")
        release = Release.of(str(found.get("version", "")))
        self._accept(release, f"engine.url: the server at {self.config.url}")
        needed = {
            "skip_tokenizer_init": True,
            "enable_return_routed_experts": self.config.routed_experts,
            "enable_deterministic_inference": self.config.deterministic,
            "enable_metrics": self.config.metrics,
        }
        lacking = [name for name, needs in needed.items() if needs and not found.get(name)]
        if lacking:
            flags = " ".join(f"--{name.replace('_', '-')}" for name in lacking)
            raise EngineError(f"engine.url: the server at {self.config.url} was started without {flags}: add it")
        await self.client.post("/abort_request", {"abort_all": True})  # whatever a killed run left there
        if release.sessions:
            with contextlib.suppress(EngineError):  # which is the answer where none was left open
                await self.client.post(END, {})
        path = (await self.client.get("/model_info"))["model_path"]
        await self.client.post("/update_weights_from_disk", {"model_path": path, "flush_cache": False})
        return found

    async def _until(self, route: str) -> None:
        while not await self.client.answers(route):
            await asyncio.sleep(_AGAIN_S)

    async def _leave(self) -> None:
        """A server elsewhere goes on, but not with what nobody waits for."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self.client.post("/abort_request", {"abort_all": True})

    async def end(self, reason: str) -> None:
        """Nobody gets an answer any more. Safe to call twice."""
        self.die(reason)
        for task in list(self._aborting):
            task.cancel()
        await self._ends.aclose()

    def die(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
            self.gate.fail(f"engine sglang: request lost: {reason}")

    def alive(self) -> Self:
        if self.ended.done():
            raise EngineError(f"engine sglang: it cannot serve: {self.ended.result()}; start it again")
        return self

    # --- what is with the server -------------------------------------------------------------------------------------

    def rid(self) -> str:
        """Of equal length, for aborting one aborts all whose id begins so."""
        return f"{self._name}-{next(self._serial):012d}"

    def salt(self, version: Version) -> str:
        """Requests share cached prefixes only with those of an equal one: of this life, and of this version."""
        return f"{self._name}.{version.lineage}.{version.number}"

    def forget(self, rid: str) -> None:
        """Nobody waits for this request any more: the server need not go on with it."""
        task = asyncio.create_task(self._abort(rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(EngineError):
            await self.client.post("/abort_request", {"rid": rid})

    async def lost(self, error: ServerUnreachable) -> None:
        """A request's connection broke. Raises EngineError when the server is gone; else it is worth another try."""
        await asyncio.wait([self.ended], timeout=_DEATH_S if self.server else 0)
        if not self.ended.done() and not await self.client.answers("/model_info", _ANSWER_S):
            self.die(f"it does not answer: {error}")
        if self.ended.done():
            raise EngineError(f"engine sglang: request lost: {self.ended.result()}") from error

    async def abort_all(self) -> None:
        """Everything that is with the server comes back. Shut the gate before."""
        self.aborts += 1
        if self._frozen:  # what is frozen does not end either
            await self.client.post("/continue_generation", {})
        while self.gate.inside:  # again, for a request may reach the server after the order to abort
            await self.client.post("/abort_request", {"abort_all": True})
            try:
                await asyncio.wait_for(self.gate.empty(), _AGAIN_S)
            except TimeoutError:
                continue
        if self._frozen:
            await self.client.post("/pause_generation", {"mode": "in_place"})

    async def freeze(self, why: str, mode: str) -> None:
        """No token is made until everyone who froze it has thawed it."""
        if not self._frozen:
            await self.client.post("/pause_generation", {"mode": mode})
        self._frozen.add(why)

    async def thaw(self, why: str) -> None:
        if why in self._frozen:
            self._frozen.discard(why)
            if not self._frozen and not self.ended.done():
                await self.client.post("/continue_generation", {})

    async def idle(self) -> None:
        """Return when the server itself has nothing running or waiting; it forgets its prefix cache.

        To be asked with nobody inside: an aborted request may outlive its answer for a moment.
        """
        async with asyncio.timeout(self.config.control_s):
            while not await self.client.answers("/flush_cache"):
                await asyncio.sleep(_AGAIN_S)


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _key(config: SglangConfig) -> str | None:
    if config.key_env is None:
        return None
    key = os.environ.get(config.key_env)
    if not key:
        raise EngineError(f"engine.key_env: the environment variable {config.key_env} is not set; set it to the key")
    return key
