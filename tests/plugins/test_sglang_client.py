"""What the client makes of a server that errs: no real one can be made to answer so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from relax_core.errors import EngineError
from relax_plugin_sglang.client import Client, ServerUnreachable

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def asked(answer: Answer, test: Callable[[Client], Awaitable[None]]) -> None:
    """Run a test with a client of a server that reads a request's head and then does ``answer``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"authorization: bearer secret" in head.lower()
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", "secret", request_s=0.5, control_s=0.5)
        try:
            await test(client)
        finally:
            await client.close()
            server.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def says(status: str, body: str) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()

    return answer


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(5)


async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"text": ')
    await writer.drain()


def test_the_servers_words_are_in_the_error() -> None:
    async def test(client: Client) -> None:
        with pytest.raises(EngineError, match=r"/generate: status 400; the server says: .*too long") as failed:
            await client.generate({})
        assert not isinstance(failed.value, ServerUnreachable)

    asked(says("400 Bad Request", '{"error": {"message": "too long"}}'), test)


def test_an_answer_that_is_no_json_is_refused() -> None:
    async def test(client: Client) -> None:
        with pytest.raises(EngineError, match="/x answered with no JSON"):
            await client.post("/x")
        assert await client.text("/x") == "gateway"

    asked(says("200 OK", "gateway"), test)


def test_an_empty_answer_is_none() -> None:
    async def test(client: Client) -> None:
        assert await client.post("/abort_request", {"rid": "a"}) is None

    asked(says("200 OK", ""), test)


@pytest.mark.parametrize(("answer", "words"), [(hangs, "in time"), (breaks, "no answer")])
def test_no_whole_answer_is_an_error_of_its_own(answer: Answer, words: str) -> None:
    async def test(client: Client) -> None:
        for call in (client.generate({}), client.post("/x"), client.get("/x")):
            with pytest.raises(ServerUnreachable, match=words):
                await call
        assert not await client.answers("/health", seconds=0.3)

    asked(answer, test)


def test_nobody_listens() -> None:
    async def main() -> None:
        client = Client("http://127.0.0.1:9", None)
        with pytest.raises(ServerUnreachable, match=r"no answer from http://127\.0\.0\.1:9"):
            await client.get("/model_info")
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
