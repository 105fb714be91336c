"""JSON posted to a server that may be slow, busy or gone for a moment: tried again, or an error that says why."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from relax_core.errors import ConfigError, RelaxError
from relax_core.interfaces import ComponentConfig
from relax_envs.rewards.loops import PerLoop

if TYPE_CHECKING:
    import httpx

TRY_AGAIN = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses of a server that may do better a moment later."""

LONGEST_ANSWER = 10_000_000
"""Bytes of an answer that are read, at most."""

Positive = Annotated[float, Field(gt=0)]


class ServerConfig(ComponentConfig):
    """Where a server is, and how long it is waited for."""

    url: str
    """Where to POST, such as ``http://127.0.0.1:8000/score``."""
    token_env: str | None = None
    """Name of an environment variable whose value is sent as a bearer token; the value itself is never written."""
    request_timeout: Positive = 30.0
    """Seconds for one try. ``timeout`` ends the whole of it, pauses included."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """Tries after the first one."""
    backoff: Positive = 0.5
    """Seconds before the second try; doubled for each one after that."""
    max_wait: Positive = 30.0
    """Seconds of one pause, at most, whatever ``Retry-After`` says."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^\s/@]+(?:/\S*)?", url):
            raise ValueError("write http://host:port/path or https://..., without a password (see token_env)")
        return url


class JsonServer:
    """Posts to one server, by connections of the running loop's own. ``who``: what errors call the reward.

    Connection errors, time-outs and the statuses 408, 425, 429 and 5xx are tried again, after a pause that doubles or
    the server's ``Retry-After``; any other status but 2xx (redirects too) is not. ``concurrency``: requests at the same
    time.
    """

    def __init__(self, config: ServerConfig, concurrency: int, who: str, url: str | None = None) -> None:
        self.config, self.url, self._concurrency = config, url or config.url, concurrency
        if config.token_env is not None and not os.environ.get(config.token_env):
            raise ConfigError(
                f"{who}: token_env: the environment variable {config.token_env!r} is not set: put the token there"
            )
        self._connections = PerLoop(self._connect)

    def _connect(self) -> _Connection:
        import httpx

        token = os.environ.get(self.config.token_env or "", "")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=self._concurrency)
        secure = self.url.startswith("https:")  # else certificates, which take time to load, are of no use
        client = httpx.AsyncClient(headers=headers, limits=limits, timeout=self.config.request_timeout, verify=secure)
        return _Connection(client, asyncio.Semaphore(self._concurrency))

    async def close(self) -> None:
        """Closes the connections of the running loop."""
        if connection := self._connections.take():
            await connection.client.aclose()

    async def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer, an object. Raises RelaxError when there is none after the last try."""
        content = json.dumps(body, allow_nan=False).encode()
        attempt = 0
        while isinstance(outcome := await self._try(content), _Busy):
            if attempt == self.config.retries:
                raise RelaxError(f"{self.url}: {outcome.why}, after {attempt + 1} tries")
            pause = self.config.backoff * 2**attempt if outcome.wait is None else outcome.wait
            await asyncio.sleep(min(pause, self.config.max_wait))
            attempt += 1
        return outcome

    async def _try(self, content: bytes) -> dict[str, Any] | _Busy:
        import httpx

        connection = self._connections.get()
        async with connection.places:
            try:
                async with asyncio.timeout(self.config.request_timeout):
                    request = connection.client.build_request(
                        "POST", self.url, content=content, headers={"content-type": "application/json"}
                    )
                    answer = await connection.client.send(request, stream=True)
                    try:
                        received = await _read(answer)
                    finally:
                        await answer.aclose()
            except (httpx.TimeoutException, TimeoutError):
                return _Busy(f"no answer within {self.config.request_timeout:g} s")
            except httpx.RequestError as error:
                return _Busy(f"{type(error).__name__}: {error}")
        if answer.status_code in TRY_AGAIN:
            return _Busy(f"HTTP {answer.status_code}", _retry_after(answer.headers.get("retry-after")))
        if not answer.is_success:
            raise RelaxError(f"{self.url}: HTTP {answer.status_code}: {shown(received)}")
        try:
            found = json.loads(received)
        except (ValueError, RecursionError) as error:
            raise RelaxError(f"{self.url}: the answer is not JSON: {shown(received)}") from error
        if not isinstance(found, dict):
            raise RelaxError(f"{self.url}: the answer is no object: {shown(received)}")
        return found


@dataclass(slots=True)
class _Connection:
    client: httpx.AsyncClient
    places: asyncio.Semaphore


@dataclass(frozen=True, slots=True)
class _Busy:
    """A try that is worth another one; ``wait``: seconds that the server asks for."""

    why: str
    wait: float | None = None


async def _read(answer: httpx.Response) -> bytes:
    received = b""
    async for block in answer.aiter_bytes():
        received += block
        if len(received) > LONGEST_ANSWER:
            raise RelaxError(f"{answer.url}: the answer is longer than {LONGEST_ANSWER} bytes")
    return received


def _retry_after(header: str | None) -> float | None:
    """Seconds from now, of a number of seconds or of a date."""
    if header is None:
        return None
    if re.fullmatch(r"\d{1,9}", header.strip()):
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = value[:200].decode(errors="replace") if isinstance(value, bytes) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 100 else text[:97] + "..."
