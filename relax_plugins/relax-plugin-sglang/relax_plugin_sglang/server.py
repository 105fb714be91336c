"""A server as a child process: started, watched, and ended with everything that it started itself.

A guard (``relax_core.guard``) starts it, and kills all of it when the server ends, when told to, and when this
process is gone. What the server prints goes to a log file, whose end is part of the error when it does not start or
dies. The key is given in a file that only this user can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from relax_core.errors import EngineError
from relax_core.guard import guarded
from relax_plugin_sglang.arguments import server_arguments, server_environment
from relax_plugin_sglang.client import Client

if TYPE_CHECKING:
    from relax_plugin_sglang.config import SglangConfig

_SERVE = Path(__file__).parent / "processes" / "serve.py"
_POLL_S = 0.25
"""Between two questions whether a starting server is ready."""
_GRACE_S = 15.0
"""How long ``stop`` waits for the guard, which is quicker than that."""
_TAIL_LINES = 15
_HIGHEST_PORT = 65535 - 10000


class Server:
    """One life of a server; ``start`` once. ``log``: a file that is appended to. ``media``: whether it reads them."""

    def __init__(self, config: SglangConfig, model: Path, device: str, log: Path, media: bool = False) -> None:
        self.config, self.model, self.device, self.log, self.media = config, model, device, log, media
        self.key = secrets.token_hex(24)  # one that begins with "-" would be read as an argument
        self.port = config.port or _free_port(config.host)
        self.url = f"http://{'127.0.0.1' if config.host == '0.0.0.0' else config.host}:{self.port}"
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Has a result, the reason, once the server has ended, of itself or by ``stop``."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._from = 0
        self._watching: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the guard, which leads the process group of the server."""
        return self._guard.pid if self._guard else None

    async def start(self, client: Client) -> None:
        """Start it and wait until it answers. Raises EngineError, with the end of its log, if it does not in time."""
        self._guard = self._launch()
        self._watching = asyncio.create_task(self._watch(self._guard), name="sglang server")
        try:
            await asyncio.wait_for(self._ready(client), self.config.start_s)
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"engine sglang: the server was not ready after {self.config.start_s:g} s; raise engine.start_s, or "
                f"see {self._words()}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    def _launch(self) -> subprocess.Popen[bytes]:
        config = self.config
        python = shutil.which(str(config.python))
        if python is None:
            raise EngineError(
                f"engine.python: {config.python} is no program; give the Python of an environment that has SGLang"
            )
        self._folder = folder = Path(tempfile.mkdtemp(prefix="relax-sglang-"))
        secret = folder / "key.yaml"
        secret.write_text(json.dumps({"api-key": self.key}))  # JSON is YAML
        command = [python, str(_SERVE), "--config", str(secret)]
        command += server_arguments(config, self.model, self.device, self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from = log.tell()
            return subprocess.Popen(
                guarded(command),
                stdin=subprocess.PIPE,  # its end tells the guard that this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=server_environment(config, self.device, folder, media=self.media),
                start_new_session=True,
            )

    async def _ready(self, client: Client) -> None:
        """It says that it is healthy once it has served a request of its own."""
        while not self.died.done():
            if await client.answers("/health"):
                return
            await asyncio.wait([self.died], timeout=_POLL_S)
        raise EngineError(f"engine sglang: the server does not start: {self.died.result()}")

    async def _watch(self, guard: subprocess.Popen[bytes]) -> None:
        await _exited(guard)
        how = (
            "it was stopped" if self._stopping else f"its process {_ended(guard)}; {self.log} ends with:\n{self.tail()}"
        )
        if not self.died.done():
            self.died.set_result(how)

    def _words(self) -> str:
        return f"{self.log}, which ends with:\n{self.tail()}"

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines that this server printed."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._from, self.log.stat().st_size - (1 << 14)))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        return ""

    async def stop(self) -> None:
        """End it; nothing that it started is left. Safe to call at any time."""
        guard, self._guard = self._guard, None
        if guard is not None:
            self._stopping = True
            _close(guard.stdin)
            try:
                await asyncio.wait_for(asyncio.shield(_exited(guard)), _GRACE_S)
            except TimeoutError:
                os.killpg(guard.pid, 9)
                await _exited(guard)
        if self._watching is not None:
            await self._watching
            self._watching = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


async def _exited(process: subprocess.Popen[bytes]) -> int:
    """Without a thread that waits, so that nothing keeps the interpreter from ending."""
    while (code := process.poll()) is None:
        await asyncio.sleep(0.05)
    return code


def _ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    signal = -code if code < 0 else code - 128
    return f"was ended by signal {signal}" if 0 < signal < 65 else f"ended with exit code {code}"


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


def _free_port(host: str) -> int:
    """Another process may take it first: then the server does not start, and says so.

    SGLang up to 0.5.15 refuses one above which it finds no other, for a service that it does not even start.
    """
    with contextlib.ExitStack() as taken:  # those that are too high are kept until there is one that is not
        while True:
            probe = taken.enter_context(socket.socket())
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            if port <= _HIGHEST_PORT:
                return port
