"""What is asked of a server over HTTP, in JSON, and what its answers mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from relax_core.errors import EngineError
from relax_plugin_sglang.streams import Broken, Connections, Response

_SHOWN = 600
"""Characters of the server's own words in an error."""


def fastest() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """(dumps, loads): of orjson where it is installed."""
    try:
        import orjson  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return (lambda value: json.dumps(value, separators=(",", ":")).encode()), json.loads
    return orjson.dumps, orjson.loads


class Client:
    """Of the server at ``url``. ``key`` is sent as a bearer token. Belongs to one event loop.

    ``request_s``, ``control_s``: how long a request for tokens, and anything else, may take.
    """

    def __init__(self, url: str, key: str | None, request_s: float | None = None, control_s: float = 600.0) -> None:
        self.url = url
        self.request_s, self.control_s = request_s, control_s
        self._dumps, self._loads = fastest()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._requests, self._control = Connections(url, headers), Connections(url, headers)

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """POST /generate: an object, or a list of them for a batch. Raises EngineError as ``post`` does."""
        answer = await self._asked("POST", "/generate", body, self.request_s, self._requests)
        return self._read("/generate", answer)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the server answers, from JSON; None where it says nothing.

        Raises EngineError with the server's own words when it refuses, and ServerUnreachable when no answer came.
        """
        return self._read(path, await self._asked("POST", path, {} if body is None else body, self.control_s))

    async def get(self, path: str) -> Any:
        """As ``post``."""
        return self._read(path, await self._asked("GET", path, None, self.control_s))

    async def text(self, path: str) -> str:
        """What the server answers to GET, as it is."""
        return (await self._asked("GET", path, None, self.control_s)).text

    async def answers(self, path: str, seconds: float = 30.0) -> bool:
        """Whether the server answers to GET with a success, within ``seconds``."""
        try:
            return (await self._control.ask("GET", path, None, seconds)).good
        except (Broken, TimeoutError):
            return False

    def _read(self, path: str, response: Response) -> Any:
        try:
            return self._loads(response.body) if response.body else None
        except ValueError:
            raise EngineError(f"engine sglang: {path} answered with no JSON: {response.body[:_SHOWN]!r}") from None

    async def _asked(
        self, method: str, path: str, body: Any, seconds: float | None, by: Connections | None = None
    ) -> Response:
        content = None if body is None else self._dumps(body)
        try:
            response = await (by or self._control).ask(method, path, content, seconds)
        except (Broken, TimeoutError) as error:
            what = (
                f"no answer from {self.url}: {error}"
                if isinstance(error, Broken)
                else f"no answer from {self.url} in time"
            )
            raise ServerUnreachable(f"engine sglang: {path}: {what}") from error
        if not response.good:
            said = response.text.strip()[:_SHOWN] or "nothing"
            raise EngineError(f"engine sglang: {path}: status {response.status}; the server says: {said}")
        return response

    def cut(self) -> None:
        """Requests for tokens get ServerUnreachable, now and later; all else may still be asked."""
        self._requests.close()

    async def close(self) -> None:
        self._requests.close()
        self._control.close()


class ServerUnreachable(EngineError):
    """No answer came: the connection broke, or the time was up."""
