"""Media behind addresses: fetched only from where the run file allows it, within limits of size and time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from relax_envs.data.values import RowError, short

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 256_000_000
MAX_SECONDS = 60.0
"""For one medium, with its redirects and repetitions."""
ATTEMPTS = 3
"""Connections that fail, and answers 429 and 5xx, are tried again."""
PAUSE = 0.25
"""Seconds before the first repetition; the second waits twice as long."""
REDIRECTS = 5


class Fetcher:
    """``allowed``: True for every host, or the hosts (``example.org``, or ``example.org:8000``). Thread-safe."""

    def __init__(self, allowed: bool | tuple[str, ...] = False) -> None:
        self.allowed = allowed
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None

    def get(self, url: str) -> bytes:
        """The content behind an address. Raises RowError when it is not allowed, or cannot be had."""
        if not self.allowed:
            advice = "download it and give the path, or allow it by urls: true, or a list of hosts"
            raise RowError(f"an address; {advice}")
        import httpx

        deadline = time.monotonic() + MAX_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._follow(url, deadline)
            except (httpx.TransportError, _TryAgainError) as error:
                problem = f"{type(error).__name__}: {error}" if isinstance(error, httpx.TransportError) else str(error)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                if isinstance(error, RowError):
                    raise
                raise RowError(f"cannot be fetched: {error}") from error
            if attempt == ATTEMPTS or time.monotonic() + PAUSE * attempt > deadline:
                break
            time.sleep(PAUSE * attempt)
        raise RowError(f"cannot be fetched: {short(' '.join(problem.split()))}")

    def _follow(self, url: str, deadline: float) -> bytes:
        for _ in range(REDIRECTS + 1):
            self._check(url)
            with self._opened().stream("GET", url, timeout=max(0.1, min(20.0, deadline - time.monotonic()))) as answer:
                if answer.has_redirect_location:
                    url = str(answer.next_request.url) if answer.next_request else ""
                    continue
                if answer.status_code == 429 or answer.status_code >= 500:
                    raise _TryAgainError(f"the server answers {answer.status_code}")
                if answer.status_code != 200:
                    raise RowError(f"cannot be fetched: the server answers {answer.status_code}")
                return _content(answer, deadline)
        raise RowError(f"cannot be fetched: more than {REDIRECTS} redirects")

    def _check(self, url: str) -> None:
        import httpx

        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise RowError(f"{parsed.scheme or 'this'} addresses are not fetched: download it and give the path")
        if self.allowed is True:
            return
        hosts = {host.lower() for host in self.allowed or ()}
        host = parsed.host.lower()
        if host not in hosts and f"{host}:{parsed.port}" not in hosts:
            raise RowError(f"an address of {host}, which is not among urls: {', '.join(sorted(hosts))}")

    def _opened(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._client is None:
                headers = {"Accept-Encoding": "identity", "User-Agent": "relax-rl"}
                self._client = httpx.Client(follow_redirects=False, headers=headers)
            return self._client


class _TryAgainError(Exception):
    """The server may answer better a moment later."""


def _content(answer: Any, deadline: float) -> bytes:
    stated = answer.headers.get("Content-Length", "")
    if stated.isdigit() and int(stated) > MAX_BYTES:
        raise RowError(f"cannot be fetched: {int(stated):,} bytes, {MAX_BYTES:,} are allowed")
    content = bytearray()
    for chunk in answer.iter_bytes(1 << 16):
        content += chunk
        if len(content) > MAX_BYTES:
            raise RowError(f"cannot be fetched: more than {MAX_BYTES:,} bytes")
        if time.monotonic() > deadline:
            raise RowError(f"cannot be fetched: not there after {MAX_SECONDS:g} seconds")
    if not content:
        raise RowError("cannot be fetched: the answer is empty")
    return bytes(content)
