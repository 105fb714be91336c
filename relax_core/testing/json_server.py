"""A server of JSON over HTTP for tests: it answers as it is told, and remembers what was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (JSON, or bytes as they are), and headers."""


class JsonServer:
    """Answers each request by ``answer(number, body)``, numbers from 0; remembers bodies, headers, times and paths.

    ``url``: of ``path``. Status 0 hangs up without an answer.
    """

    answer: Callable[[int, Any], Any]

    def __init__(self, path: str) -> None:
        self.path, self.answer = path, lambda number, body: (200, {"reward": 1.0})
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{self.path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answered(self, number: int, body: Any) -> Answer:
        found: Answer = self.answer(number, body)
        return found

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server._lock:
                    number = len(server.bodies)
                    server.bodies.append(body)
                    server.headers.append({key.lower(): value for key, value in self.headers.items()})
                    server.times.append(time.monotonic())
                    server.paths.append(self.path)
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                status, content, *rest = server._answered(number, body)
                with server._lock:
                    server.at_once -= 1
                if status == 0:
                    self.close_connection = True
                    return
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for key, value in (rest[0] if rest else {}).items():
                    self.send_header(key, value)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler
