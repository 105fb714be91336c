"""HTTP over plain streams: what a server may answer, and what becomes of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from relax_plugin_sglang.streams import Broken, Connections

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def asked(talk: Talk, work: Callable[[Connections], Awaitable[None]]) -> int:
    """Do something with connections to a server that talks so; how many were opened."""
    opened = 0

    async def main() -> None:
        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal opened
            opened += 1
            try:
                await talk(reader, writer)
            except (EOFError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(counted, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = Connections(f"http://127.0.0.1:{port}/base", {"authorization": "Bearer k"})
        await asyncio.wait_for(work(connections), 10)
        connections.close()
        server.close()

    asyncio.run(main())
    return opened


def answers(*replies: bytes) -> Talk:
    """To each request of a connection one of these, as they are."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if "content-length" in head:
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            writer.write(reply)

    return talk


def test_requests_that_follow_each_other_share_a_connection() -> None:
    async def work(connections: Connections) -> None:
        for content in (b"{}", None, b"[1]"):
            response = await connections.ask("POST", "/x", content, 5)
            assert (response.status, response.text, response.good) == (200, "ok", True)

    assert asked(answers(PLAIN, PLAIN, PLAIN), work) == 1


def test_requests_at_once_have_a_connection_each() -> None:
    async def work(connections: Connections) -> None:
        found = await asyncio.gather(*(connections.ask("POST", "/x", b"{}", 5) for _ in range(300)))
        assert {response.body for response in found} == {b"ok"}

    assert asked(answers(PLAIN), work) == 300


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n3;x=y\r\n456\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n0123456",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 7\r\n\r\n0123456",
    ],
)
def test_an_answer_may_have_any_of_http_s_forms(reply: bytes) -> None:
    async def work(connections: Connections) -> None:
        response = await connections.ask("GET", "/x", None, 5)
        assert response.body == b"0123456"
        assert response.good is (b"404" not in reply)

    asked(answers(reply), work)


def test_path_key_and_host_are_sent() -> None:
    heads: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(PLAIN)

    async def work(connections: Connections) -> None:
        await connections.ask("GET", "/x?y=1", None, 5)

    asked(talk, work)
    first, *lines = heads[0].split("\r\n")
    assert first == "GET /base/x?y=1 HTTP/1.1" and "authorization: Bearer k" in lines
    assert any(line.startswith("host: 127.0.0.1:") for line in lines)


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n"]
)
def test_a_broken_answer_is_an_error_and_its_connection_is_not_used_again(reply: bytes) -> None:
    async def work(connections: Connections) -> None:
        for _ in range(2):
            with pytest.raises(Broken):
                await connections.ask("POST", "/x", b"{}", 5)

    assert asked(answers(reply), work) == 2


def test_a_server_that_is_not_there_and_one_that_says_nothing() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def work(connections: Connections) -> None:
        with pytest.raises(TimeoutError):
            await connections.ask("GET", "/x", None, 0.1)
        with pytest.raises(Broken, match="ConnectionRefusedError"):
            await Connections("http://127.0.0.1:9", {}).ask("GET", "/x", None, 5)

    asked(silent, work)


def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    async def work(connections: Connections) -> None:
        for _ in range(3):
            assert (await connections.ask("GET", "/x", None, 5)).body == b"ok"
            await asyncio.sleep(0.05)  # the end of it arrives

    assert asked(answers(PLAIN), work) == 3


def test_who_waits_when_all_are_closed_gets_an_error_at_once() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN)
        await reader.read()

    async def work(connections: Connections) -> None:
        await connections.ask("GET", "/x", None, 5)
        waiting = asyncio.gather(*(connections.ask("GET", "/x", None, 60) for _ in range(1)), return_exceptions=True)
        await asyncio.sleep(0.1)
        connections.close()
        assert [type(result) for result in await asyncio.wait_for(waiting, 2)] == [Broken]

    asked(silent, work)
