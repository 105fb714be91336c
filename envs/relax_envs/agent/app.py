"""The HTTP side of the endpoint: routes, keys, sizes, streams. Imported when the endpoint starts: FastAPI is heavy.

Everything here runs in the server's own event loop and thread; ``Session.submit`` is the way to the play's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from relax_envs.agent.errors import ApiError
from relax_envs.agent.replies import Answered, Head, event
from relax_envs.agent.requests import ANY_MODEL, Asked, no_model, read
from relax_envs.agent.session import Session

_ROUTES = "/v1/chat/completions, /v1/models"


def application(sessions: Mapping[str, Session], most_bytes: int, heartbeat_s: float) -> FastAPI:
    """``sessions``: by key, those that are open just now. ``most_bytes``: of a request's body."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        session = _session(request, sessions)
        asked = read(await _body(request, most_bytes), session.rules)
        headers = {"x-relax-ignored": ", ".join(asked.ignored)} if asked.ignored else {}
        future = session.submit(asked)
        if asked.stream:
            stream = _stream(asked, future, heartbeat_s)
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        answered = await _while_there(request, future)
        return JSONResponse(Head.new(asked.model).whole(answered), headers=headers)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        names = _session(request, sessions).rules.models or (ANY_MODEL,)
        return JSONResponse({"object": "list", "data": [_model(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        rules = _session(request, sessions).rules
        if name not in (rules.models or (ANY_MODEL,)):
            raise no_model(name, rules)
        return JSONResponse(_model(name))

    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    return app


# --- requests ---------------------------------------------------------------------------------------------------------


def _session(request: Request, sessions: Mapping[str, Session]) -> Session:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    session = sessions.get(key.strip()) if kind.lower() == "bearer" else None
    if session is None:
        raise ApiError(401, "no open session has this key; give OPENAI_API_KEY of a play that runs", "invalid_api_key")
    return session


async def _body(request: Request, most: int) -> Any:
    declared = request.headers.get("content-length", "")
    content = bytearray()
    if not declared.isdigit() or int(declared) <= most:
        async for piece in request.stream():
            content += piece
            if len(content) > most:
                break
        else:
            try:
                return json.loads(content)
            except (ValueError, RecursionError) as error:
                raise ApiError(400, f"the request is not JSON: {error}", "invalid_json") from error
    raise ApiError(413, f"the request has more than {most:,} bytes, which is request_bytes", "request_too_large")


async def _while_there(request: Request, future: Future[Answered]) -> Answered:
    """The reply; what nobody waits for any more is given up."""
    reply, gone = asyncio.wrap_future(future), asyncio.ensure_future(_disconnected(request))
    try:
        either: set[asyncio.Future[Any]] = {reply, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise ClientDisconnect
        return reply.result()
    finally:
        reply.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- answers ----------------------------------------------------------------------------------------------------------


async def _stream(asked: Asked, future: Future[Answered], heartbeat_s: float) -> AsyncIterator[str]:
    """The engine gives whole replies: until then comments keep the connection alive. Cancelled when the client goes."""
    reply = asyncio.wrap_future(future)
    head = Head.new(asked.model)
    try:
        yield event(head.chunk({"role": "assistant", "content": ""}))
        while not (await asyncio.wait({reply}, timeout=heartbeat_s))[0]:
            yield ": the policy is being sampled\n\n"
        for value in head.chunks(reply.result(), asked.usage):
            yield event(value)
        yield event("[DONE]")
    except ApiError as error:
        yield event(error.body)
    finally:
        reply.cancel()


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "relax"}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # Clients ask again after 429 and 5xx by themselves, but what ended a play does not pass.
    return JSONResponse(error.body, error.status, {"x-should-retry": str(error.again).lower()})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}; there are {_ROUTES}"
    return await _refused(request, ApiError(error.status_code, text, "no_route"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
