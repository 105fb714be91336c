"""HTTP to a server: one client for requests, which may take long, and connections of their own for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from relax_core.errors import EngineError

_KEPT_S = 2.0
"""How long an unused connection is kept: less than the server's own 5 s, which may close it just as we use it."""
_CONNECT_S = 10.0
_SHOWN = 600
"""Characters of the server's own words in an error."""


def _fastest() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """(dumps, loads): of orjson where it is installed."""
    try:
        import orjson
    except ImportError:
        return (lambda value: json.dumps(value, separators=(",", ":")).encode()), json.loads
    return orjson.dumps, orjson.loads


class Client:
    """Of the server at ``url``. ``key`` is sent as a bearer token. Belongs to one event loop.

    ``in_flight``: requests that may be with the server at once.
    """

    def __init__(
        self, url: str, key: str | None, in_flight: int = 1024, request_s: float | None = None, control_s: float = 600.0
    ) -> None:
        self.url = url
        self._dumps, self._loads = _fastest()
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._requests = self._open(in_flight, request_s)
        self._control = self._open(16, control_s)

    def _open(self, connections: int, seconds: float | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(seconds, connect=_CONNECT_S, pool=None),
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_KEPT_S
            ),
            trust_env=False,  # no proxy stands between us and the server
        )

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /generate. Raises EngineError as ``post`` does."""
        answer: dict[str, Any] = await self._ask(self._requests, "POST", "/generate", body)
        return answer

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the server answers, from JSON; None where it says nothing.

        Raises EngineError with the server's own words when it refuses, and ServerUnreachable when no answer came.
        """
        return await self._ask(self._control, "POST", path, {} if body is None else body)

    async def get(self, path: str) -> Any:
        """As ``post``."""
        return await self._ask(self._control, "GET", path, None)

    async def text(self, path: str) -> str:
        """What the server answers to GET, as it is."""
        return (await self._sent(self._control, "GET", path, None)).text

    async def answers(self, path: str, seconds: float = 30.0) -> bool:
        """Whether the server answers to GET with a success, within ``seconds``."""
        try:
            return (await self._control.get(self.url + path, timeout=seconds)).is_success
        except httpx.HTTPError:
            return False

    async def _ask(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> Any:
        content = (await self._sent(client, method, path, body)).content
        try:
            return self._loads(content) if content else None
        except ValueError:
            raise EngineError(f"engine sglang: {path} answered with no JSON: {content[:_SHOWN]!r}") from None

    async def _sent(self, client: httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Response:
        content = None if body is None else self._dumps(body)
        try:
            response = await client.request(method, self.url + path, content=content)
        except httpx.HTTPError as error:
            what = "no answer in time" if isinstance(error, httpx.TimeoutException) else "no answer"
            raise ServerUnreachable(
                f"engine sglang: {path}: {what} from {self.url}: {type(error).__name__} {error}".rstrip()
            ) from error
        if not response.is_success:
            said = response.text.strip()[:_SHOWN] or "nothing"
            raise EngineError(f"engine sglang: {path}: status {response.status_code}; the server says: {said}")
        return response

    async def close(self) -> None:
        await self._requests.aclose()
        await self._control.aclose()


class ServerUnreachable(EngineError):
    """No answer came: the connection broke, or the time was up."""
