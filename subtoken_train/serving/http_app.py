"""The server's HTTP: OpenAI's paths, errors and streams over one ``Answerer``, on Starlette and uvicorn.

Nothing of a request is read before it has a place in the line: at most ``queue`` bodies and answers are held at a time.
The answer of a client that hangs up ends after its next token, or is not begun.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from subtoken_train.demo.local_server import bound_socket, sigterm_as_ctrl_c
from subtoken_train.serving.answerer import Answerer
from subtoken_train.serving.chat_request import ChatRequest, RefusedError, read_request
from subtoken_train.serving.line import Answer, Event, Job

LOCAL = ("127.0.0.1", "localhost")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_READING = 60  # seconds that a body may take
GOODBYE = 10  # seconds that answers on their way have once the server is told to end
CONNECTIONS = 1000


@dataclass(frozen=True)
class ServerSettings:
    """Settings by which requests are let in.

    Attributes:
        name: of the model, which requests give.
        key: that they must bring; None: none.
        queue: requests that are held at a time, the one that is answered among them.
        timeout: seconds from a request's arrival to the end of its answer.
        max_body: bytes of a request.
        hosts: names under which the server is asked; ``*`` for any.
    """

    name: str
    key: str | None = None
    queue: int = 16
    timeout: float = 120.0
    max_body: int = 20_000_000
    hosts: tuple[str, ...] = LOCAL


class ChatServer:
    """Lets requests in, and says what became of them."""

    def __init__(self, answerer: Answerer, settings: ServerSettings) -> None:
        self.answerer, self.settings = answerer, settings
        self.held = 0

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(self.settings.hosts))
        return Starlette(routes=routes, middleware=[hosts], exception_handlers={HTTPException: _http_error})

    async def health(self, request: Request) -> Response:
        """Say how many requests are held, and what is kept between them."""
        kept = self.answerer.contexts
        counts = {"held": len(kept), "bytes": kept.nbytes, "compressed": kept.taken, "found": kept.found}
        return JSONResponse({"status": "ok", "model": self.settings.name, "requests": self.held, "contexts": counts})

    async def models(self, request: Request) -> Response:
        """List the one model."""
        card = {"id": self.settings.name, "object": "model", "created": 0, "owned_by": "subtoken_train"}
        return self._stranger(request) or JSONResponse({"object": "list", "data": [card]})

    async def complete(self, request: Request) -> ASGIApp:
        """Answer a chat."""
        deadline = time.monotonic() + self.settings.timeout
        if (refused := self._stranger(request)) is not None:
            return refused
        if self.held >= self.settings.queue:
            return _error(RefusedError(429, f"{self.held} requests are held, as many as may wait; come again later"))
        self.held += 1
        try:
            return _Reply(self, await self._read(request), deadline)
        except BaseException as error:
            self.held -= 1
            if isinstance(error, ValueError):
                return _error(error)
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)
            raise

    async def _read(self, request: Request) -> ChatRequest:
        """Return the request once its body is here, and is one."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body must be JSON; send it with Content-Type: application/json")
        most = self.settings.max_body
        too_long = RefusedError(413, f"the body has more than {most:,} bytes, the most that is read here; send less")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(_READING):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_long
        except TimeoutError:
            raise RefusedError(408, f"the body took more than {_READING} seconds; send it again") from None
        chat = await run_in_threadpool(read_request, bytes(body), self.answerer.limits)
        if chat.model != self.settings.name:
            words = f"there is no model {chat.model[:80]!r} here; this server has {self.settings.name!r}"
            raise RefusedError(404, words, "model_not_found")
        await run_in_threadpool(self.answerer.compression, chat)
        return chat

    def _stranger(self, request: Request) -> Response | None:
        """Return the answer to a request that does not bring the key."""
        if self.settings.key is None:
            return None
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.settings.key.encode()):
            return None
        return _error(RefusedError(401, "the API key is missing or wrong", "invalid_api_key"))


class _Reply:
    """The answer to one request, whole or in pieces; it ends when the client is gone or the time is over."""

    def __init__(self, server: ChatServer, chat: ChatRequest, deadline: float) -> None:
        self._server, self._chat, self._deadline = server, chat, deadline
        self._about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": chat.model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def heard(event: Event) -> None:
            events.put_nowait(event)
            if not isinstance(event, str):  # not when its client leaves: until its turn it is in memory
                self._server.held -= 1

        def say(event: Event) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(heard, event)

        job = Job(self._chat, say, self._deadline)
        self._server.answerer.submit(job)
        gone = asyncio.ensure_future(_hung_up(receive))
        speaking = asyncio.ensure_future(self._speak(events, scope, receive, send))
        left = self._deadline - time.monotonic()
        try:
            # a client that does not read its answer is not waited for either
            await asyncio.wait({gone, speaking}, return_when=asyncio.FIRST_COMPLETED, timeout=left + GOODBYE)
            if speaking.done():
                speaking.result()
        except asyncio.CancelledError:  # the server ends, and uvicorn says that an answer was cut
            pass
        finally:
            job.stopped.set()
            gone.cancel()
            speaking.cancel()

    async def _speak(self, events: asyncio.Queue[Event], scope: Scope, receive: Receive, send: Send) -> None:
        event = await events.get()
        if isinstance(event, RefusedError):  # before anything was said, so that the status is right
            await _error(event)(scope, receive, send)
        elif self._chat.stream:
            await self._stream(event, events, send)
        else:
            await (await self._whole(event, events))(scope, receive, send)

    async def _whole(self, event: Event, events: asyncio.Queue[Event]) -> Response:
        pieces = []
        while isinstance(event, str):
            pieces.append(event)
            event = await events.get()
        if isinstance(event, RefusedError):
            return _error(event)
        message = {"role": "assistant", "content": "".join(pieces)}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": event.finish}
        about = {"usage": _usage(event), "warnings": event.warnings}
        return JSONResponse({**self._about, "object": "chat.completion", "choices": [choice], **about})

    async def _stream(self, event: Event, events: asyncio.Queue[Event], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for said in self._chunks(event, events):
            body = f"data: {said}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _chunks(self, event: Event, events: asyncio.Queue[Event]) -> AsyncIterator[str]:
        """Yield what server-sent events say, OpenAI's end included."""
        yield self._chunk({"role": "assistant", "content": ""})
        while isinstance(event, str):
            yield self._chunk({"content": event})
            event = await events.get()
        if isinstance(event, RefusedError):
            yield json.dumps(_error_body(event))
            return
        yield self._chunk({}, event.finish, warnings=event.warnings)
        if self._chat.include_usage:
            yield self._chunk(None, usage=_usage(event))
        yield "[DONE]"

    def _chunk(self, delta: dict[str, str] | None, finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        choices = [] if delta is None else [choice]
        return json.dumps({**self._about, "object": "chat.completion.chunk", "choices": choices, **more})


def _usage(answer: Answer) -> dict[str, Any]:
    """Return OpenAI's counts, and the bytes of the answer's cache at its end beside those of an uncompressed one."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.new_tokens,
        "total_tokens": answer.prompt_tokens + answer.new_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "cache_bytes": answer.cache_bytes,
        "dense_cache_bytes": answer.dense_cache_bytes,
    }


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_body(error: RefusedError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": " ".join(str(error).split()), "type": kind, "param": None, "code": error.code}}


def _error(error: ValueError) -> JSONResponse:
    """Return a refusal; what the library refuses is the request's fault."""
    refused = error if isinstance(error, RefusedError) else RefusedError(400, str(error))
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return JSONResponse(_error_body(refused), refused.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Word Starlette's own refusals, of paths and methods."""
    assert isinstance(error, HTTPException)
    there = "POST /v1/chat/completions, GET /v1/models and /health"
    words = f"{request.method} {request.url.path[:80]}: {error.detail}; there are {there}"
    return _error(RefusedError(error.status_code, words))


def http_server(server: ChatServer) -> uvicorn.Server:
    """Return what serves on sockets that are bound."""
    config = uvicorn.Config(
        server.app(),
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GOODBYE,
        server_header=False,
        ws="none",
    )
    return uvicorn.Server(config)


def serve_chats(server: ChatServer, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; answers on their way are finished, for ``GOODBYE`` seconds at most."""
    with bound_socket(host, port) as socket, sigterm_as_ctrl_c():
        socket.listen(CONNECTIONS)  # who reads the line may connect
        say(f"http://{host}:{port}/v1")
        http_server(server).run(sockets=[socket])
