"""A server of OpenAI's chat completions for tests: it answers as it is told, and remembers what was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | tuple[int, Any]
"""The text of a completion, or a status and a body."""


class ChatServer:
    """``answer(number, body)`` says what becomes of each request, numbers from 0."""

    def __init__(self, answer: Callable[[int, Any], Answer]) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server._lock:
                    number = len(server.bodies)
                    server.bodies.append(body)
                    server.paths.append(self.path)
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                found = server.answer(number, body)
                with server._lock:
                    server.at_once -= 1
                status, content = (200, completion(found)) if isinstance(found, str) else found
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler


def completion(text: str | None, reason: str | None = "stop") -> dict[str, Any]:
    """The body of an answer. ``reason``: its ``finish_reason``."""
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}]}
