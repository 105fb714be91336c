"""Media behind addresses: only from where it is allowed, within limits, and a row error when it cannot be had."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from relax_core.types import Image, user
from relax_envs.data import fetch
from relax_envs.data.columns import Columns
from relax_envs.data.rows import TaskMaker
from relax_envs.data.values import RowError

PICTURE = b"\x89PNG" + bytes(range(256)) * 100


class Handler(BaseHTTPRequestHandler):
    """``calls``: the paths that were asked for."""

    calls: list[str]

    def do_GET(self) -> None:
        self.calls.append(self.path)
        name, _, rest = self.path[1:].partition("/")
        if name == "to":
            self._answer(302, b"", Location=rest if "://" in rest else f"/{rest}")
        elif name == "loop":
            self._answer(302, b"", Location="/loop")
        elif name == "status":
            self._answer(int(rest), b"no")
        elif name == "flaky":
            self._answer(200 if self.calls.count(self.path) > 2 else 503, PICTURE)
        elif name == "empty":
            self._answer(200, b"")
        elif name == "large":
            self._answer(200, b"x" * 5000, **{"Content-Length": "99999999999"})
        elif name == "endless":
            self._answer(200, b"", **{"Content-Length": ""})
            while len(self.calls) < 99:
                self.wfile.write(b"x" * 65536)
        elif name == "bomb":
            self._answer(200, gzip.compress(b"\0" * 10_000_000), **{"Content-Encoding": "gzip"})
        elif name == "cut":
            self._answer(200, PICTURE, **{"Content-Length": str(len(PICTURE) + 10)})
        else:
            self._answer(200, PICTURE)

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server on this machine; ``calls`` of Handler says what it was asked."""
    Handler.calls = []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{httpd.server_port}"
    Handler.calls += ["end"] * 99
    httpd.shutdown()
    thread.join(10)
    httpd.server_close()


@pytest.fixture(autouse=True)
def _direct_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(fetch, "PAUSE", 0.01)


def fetched(url: str, urls: bool | tuple[str, ...] = True) -> bytes:
    task = TaskMaker(Columns(), urls=urls).task({"prompt": "<image>", "images": [url], "answer": "a"}, Path(), "1")
    [image] = task.messages[0].media()
    assert isinstance(image, Image) and isinstance(image.source, bytes) and task.messages == (user(image),)
    return image.source


def refused(url: str, urls: bool | tuple[str, ...] = True) -> str:
    with pytest.raises(RowError) as error:
        fetched(url, urls)
    assert str(error.value).startswith(f"image {url}: ") and "\n" not in str(error.value)
    return str(error.value).removeprefix(f"image {url}: ")


def test_an_address_is_not_fetched_unless_allowed(server: str) -> None:
    said = "an address; download it and give the path, or allow it by urls: true, or a list of hosts"
    assert refused(f"http://{server}/a.png", False) == said and Handler.calls == []


@pytest.mark.parametrize("urls", [True, ("127.0.0.1",), ("other.org", "{server}"), ("OTHER.org", "127.0.0.1")])
def test_an_address_that_is_allowed(urls: bool | tuple[str, ...], server: str) -> None:
    urls = urls if urls is True else tuple(host.replace("{server}", server) for host in urls or ())
    assert fetched(f"http://{server}/a.png", urls) == PICTURE
    assert fetched(f"HTTP://{server}/to/a.png", urls) == PICTURE
    assert Handler.calls == ["/a.png", "/to/a.png", "/a.png"]


@pytest.mark.parametrize("host", ["other.org", "127.0.0.1:1", "27.0.0.1", "127.0.0.1.other.org"])
def test_other_hosts_are_refused(host: str, server: str) -> None:
    assert refused(f"http://{server}/a.png", (host,)) == (
        f"an address of 127.0.0.1, which is not among urls: {host.lower()}"
    )
    assert "an address of 127.0.0.1" in refused(f"http://{host.partition(':')[0]}@{server}/a.png", (host,))
    assert Handler.calls == []


def test_redirects_go_to_allowed_hosts_only(server: str) -> None:
    port = server.partition(":")[2]
    url = f"http://{server}/to/http://localhost:{port}/a.png"
    assert fetched(url, ("127.0.0.1", "localhost")) == PICTURE
    Handler.calls.clear()
    assert refused(url, ("127.0.0.1",)) == "an address of localhost, which is not among urls: 127.0.0.1"
    assert Handler.calls == [f"/to/http://localhost:{port}/a.png"]
    assert refused(f"http://{server}/to/file:///etc/passwd").startswith("file addresses are not fetched")
    assert refused(f"http://{server}/loop") == "cannot be fetched: more than 5 redirects"


@pytest.mark.parametrize(
    "url", ["s3://bucket/a.png", "ftp://example.org/a.png", "gs://x/y", "http://", "http:///a.png"]
)
def test_other_addresses_are_not_fetched(url: str) -> None:
    assert "download it and give the path" in refused(url) or "cannot be fetched" in refused(url)


def test_answers_that_are_no_medium(server: str) -> None:
    assert refused(f"http://{server}/status/404") == "cannot be fetched: the server answers 404"
    assert refused(f"http://{server}/empty") == "cannot be fetched: the answer is empty"
    assert refused(f"http://{server}/large") == "cannot be fetched: 99,999,999,999 bytes, 256,000,000 are allowed"
    assert Handler.calls == ["/status/404", "/empty", "/large"], "asked once"


def test_limits(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 1_000_000)
    assert refused(f"http://{server}/endless") == "cannot be fetched: more than 1,000,000 bytes"
    assert refused(f"http://{server}/bomb") == "cannot be fetched: more than 1,000,000 bytes"
    monkeypatch.setattr(fetch, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(fetch, "MAX_BYTES", 10**12)
    assert refused(f"http://{server}/endless") == "cannot be fetched: not there after 0.3 seconds"


def test_failures_that_may_pass_are_tried_again(server: str) -> None:
    assert fetched(f"http://{server}/flaky") == PICTURE
    assert Handler.calls == ["/flaky"] * 3
    assert refused(f"http://{server}/status/503") == "cannot be fetched: the server answers 503"
    assert Handler.calls[3:] == ["/status/503"] * 3
    assert "peer closed connection" in refused(f"http://{server}/cut")


def test_a_server_that_is_not_there() -> None:
    assert refused("http://127.0.0.1:9/a.png").startswith("cannot be fetched: ConnectError: ")


def test_threads_share_a_fetcher(server: str) -> None:
    maker = TaskMaker(Columns(), urls=True)
    found: list[bytes] = []

    def play(i: int) -> None:
        row = {"prompt": "<image>", "images": [f"http://{server}/{i}.png"], "answer": "a"}
        [image] = maker.task(row, Path(), "1").messages[0].media()
        assert isinstance(image.source, bytes)
        found.append(image.source)

    threads = [threading.Thread(target=play, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [PICTURE] * 8
