"""The endpoint of a process: an HTTP server on the loopback, in a thread of its own, and the sessions it serves.

In a thread because the event loop of the plays may be busy for long (an engine decodes there, a trainer computes):
clients that wait hear from the server meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING

from relax_envs.agent.session import Session

if TYPE_CHECKING:
    import uvicorn

    from relax_core.chat import Chat
    from relax_envs.agent.requests import Rules

_HOST = "127.0.0.1"
_WAITING = 1024
"""Connections that may wait to be accepted."""
_IDLE_S = 3600
"""After which a connection that nobody uses is closed. Long: a client that uses it again just then loses a request."""
_END_S = 10.0


class Endpoint:
    """Starts with the first session. ``most_bytes``: of a request's body; ``heartbeat_s``: between comments in a stream
    whose reply is being sampled."""

    def __init__(self, most_bytes: int = 64 << 20, heartbeat_s: float = 10.0) -> None:
        self.most_bytes, self.heartbeat_s = most_bytes, heartbeat_s
        self.sessions: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._url: str | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    async def open(self, chat: Chat, rules: Rules) -> Session:
        """A session for a play; close it when the play ends."""
        url = self._url
        session = Session(chat, rules, url if url is not None else await asyncio.to_thread(self._start))
        self.sessions[session.key] = session
        return session

    async def close_session(self, session: Session) -> None:
        """Its key is worth nothing any more."""
        self.sessions.pop(session.key, None)
        await session.close()

    def _start(self) -> str:
        import uvicorn

        from relax_envs.agent.app import application

        with self._lock:
            if self._url is None:
                listening = socket.create_server((_HOST, 0), backlog=_WAITING)  # who comes before it runs, waits
                app = application(self.sessions, self.most_bytes, self.heartbeat_s)
                config = uvicorn.Config(
                    app,
                    loop="asyncio",
                    http="h11",
                    ws="none",
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    backlog=_WAITING,
                    timeout_keep_alive=_IDLE_S,
                    timeout_graceful_shutdown=1,
                )
                self._server = server = uvicorn.Server(config)
                self._thread = threading.Thread(
                    target=server.run, args=([listening],), name="agent endpoint", daemon=True
                )
                self._thread.start()
                self._url = f"http://{_HOST}:{listening.getsockname()[1]}/v1"
        return self._url

    async def close(self) -> None:
        """End the server. A later session starts another one."""
        for session in list(self.sessions.values()):
            await self.close_session(session)
        with self._lock:
            server, thread = self._server, self._thread
            self._server = self._thread = self._url = None
        if server is not None and thread is not None:
            server.should_exit = True
            await asyncio.to_thread(thread.join, _END_S)
