"""The server's HTTP: OpenAI's paths, errors and streams over one ``Answerer``, on Starlette and uvicorn.

At most ``queue`` requests whose body is here are held at a time; bodies on their way have as much memory together, and
where more comes, the one that takes longest ends.
"""

import asyncio
import hmac
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from subtoken_train.demo.local_server import bound_socket, sigterm_as_ctrl_c
from subtoken_train.errors import plain, refuse
from subtoken_train.serving.answerer import BROKEN, Answerer, time_over
from subtoken_train.serving.chat_request import ChatRequest, RefusedError, read_request
from subtoken_train.serving.line import Answer, Event, Job, Prepared

_log = logging.getLogger(__name__)
LOCAL = ("127.0.0.1", "localhost")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_READING = 60  # seconds that headers may take, and a body
GOODBYE = 10  # seconds that answers on their way have once the server is told to end
CONNECTIONS = 1000
_ANSWER = "subtoken_train.answer"  # where a request's scope holds its end
_STRANGER = 401, "the API key is missing or wrong", "invalid_api_key"
_PATHS = "there are POST /v1/chat/completions and /v1/completions, GET /v1/models and /health"


@dataclass(frozen=True)
class ServerSettings:
    """Settings by which requests are let in, of ``max_body`` bytes; with one of the ``keys``, if there are any.

    Attributes:
        queue: requests that are held at a time, the one that is answered among them.
        timeout: seconds from a request's arrival to the end of its answer.
        hosts, origins: names under which the server is asked, and pages in a browser that may ask; ``*`` for any.
        apart: whether a context is found by requests of the key alone that brought it.
    """

    name: str
    keys: tuple[str, ...] = ()
    queue: int = 64
    timeout: float = 120.0
    max_body: int = 20_000_000
    hosts: tuple[str, ...] = LOCAL
    origins: tuple[str, ...] = ()
    apart: bool = False


class ChatServer:
    """Lets requests in, and says what became of them; ``held`` counts those that are read or answered."""

    def __init__(self, answerer: Answerer, settings: ServerSettings) -> None:
        self.answerer, self.settings = answerer, settings
        self.held = 0
        self._bodies: dict[asyncio.Timeout, int] = {}

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [Route(path, self.complete, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/completions")]
        routes += [Route(path, self.models) for path in ("/v1/models", "/v1/models/{name:path}")]
        routes.append(Route("/health", self.health))
        layers = [Middleware(TrustedHostMiddleware, allowed_hosts=list(self.settings.hosts))]
        if origins := self.settings.origins:
            layers.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
        handlers: Any = {HTTPException: _http_error, Exception: _http_error}
        return _Logged(Starlette(routes=routes, middleware=layers, exception_handlers=handlers))

    async def health(self, request: Request) -> Response:
        """Say whether answers are made; to those with a key, also how many, how long they waited, and what is kept."""
        works = self.answerer.works()
        said: dict[str, Any] = {"status": "ok" if works else "the thread that answers ended; it is replaced"}
        if self._owner(request) is not None:
            kept, waits = self.answerer.contexts, sorted(self.answerer.first_tokens)
            said |= {"model": self.settings.name, "requests": self.held, "replaced": self.answerer.replaced}
            said["running"], at = self.answerer.running, {"p50": len(waits) // 2, "p95": len(waits) * 19 // 20}
            seconds = {name: round(waits[place], 3) for name, place in at.items()} if waits else {}
            said["first_token"] = {"answers": len(waits), **seconds}
            said["contexts"] = {"held": len(kept), "bytes": kept.nbytes, "compressed": kept.taken, "found": kept.found}
        return JSONResponse(said, 200 if works else 503)

    async def models(self, request: Request) -> Response:
        """List the one model, or describe it."""
        if self._owner(request) is None:
            return _error(RefusedError(*_STRANGER))
        card = {"id": self.settings.name, "object": "model", "created": 0, "owned_by": "subtoken_train"}
        if (name := request.path_params.get("name", self.settings.name)) != self.settings.name:
            return _error(self._no_model(name))
        return JSONResponse(card if request.path_params else {"object": "list", "data": [card]})

    async def complete(self, request: Request) -> ASGIApp:
        """Answer a chat, or go on with a text."""
        deadline = time.monotonic() + self.settings.timeout
        full = RefusedError(429, f"{self.settings.queue} requests are waiting, and the queue is full; try again later")
        try:
            if (owner := self._owner(request)) is None:
                raise RefusedError(*_STRANGER)
            if self.held >= self.settings.queue:
                raise full
            body = await self._body(request)
            if self.held >= self.settings.queue:
                raise full
        except RefusedError as refused:
            return _error(refused)
        except ClientDisconnect:
            return Response(status_code=499)

        def let_go(reading: asyncio.Future[Any]) -> None:
            self.held -= 1
            reading.exception()

        self.held += 1
        # a thread cannot be stopped: its place is free when it is done
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, body, request.url.path, owner))
        await asyncio.wait({reading}, timeout=deadline - time.monotonic())
        if not reading.done():
            reading.add_done_callback(let_go)
            return _error(time_over("its pictures and texts were not read"))
        if (error := reading.exception()) is not None:
            let_go(reading)
            if isinstance(error, ValueError):
                return _error(error)
            raise error
        return _Reply(self, *reading.result(), deadline)

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the body must be JSON; send it with Content-Type: application/json")
        most = self.settings.max_body
        too_long = RefusedError(413, f"the body has more than {most:,} bytes, the most that is read; send less")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_long
        body, slow = bytearray(), asyncio.timeout(_READING)
        try:
            async with slow:
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_long
                    self._bodies[slow] = len(body)
                    if sum(self._bodies.values()) > self.settings.queue * most:
                        next(iter(self._bodies)).reschedule(0)
        except TimeoutError:
            words = f"the body took more than {_READING} seconds, or too many came at once; send it again"
            raise RefusedError(408, words) from None
        finally:
            self._bodies.pop(slow, None)
        return bytes(body)

    def _read(self, body: bytes, path: str, owner: str) -> tuple[ChatRequest, Prepared]:
        """Read a request whose body is here, in a thread of its own, out of which come refusals alone."""
        try:
            chat = read_request(body, self.answerer.limits, path == "/v1/completions", self.answerer.sees_images)
        except BaseException as error:
            raise error if isinstance(error, ValueError) else self.answerer.refusal(error) from None
        if chat.model != self.settings.name:
            raise self._no_model(chat.model)
        chat = replace(chat, owner=owner if self.settings.apart else "")
        return chat, self.answerer.prepare(chat)

    def _no_model(self, name: str) -> RefusedError:
        words = f"there is no model {name[:80]!r} here; this server has {self.settings.name!r}"
        return RefusedError(404, words, "model_not_found")

    def _owner(self, request: Request) -> str | None:
        """Return the key that a request brings, "" where none is asked for; None: it is a stranger's."""
        given = re.sub("(?i)^bearer +", "", request.headers.get("authorization", "")).encode()
        right = [key for key in self.settings.keys if hmac.compare_digest(given, key.encode())]
        return next(iter(right), None if self.settings.keys else "")


class _Logged:
    """Logs a line for each request: method, path, status, tokens of prompt and answer, seconds; no content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.monotonic(), 499

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if scope["type"] == "http":
                path, answer = scope["raw_path"].decode("ascii", "replace")[:80], scope.get(_ANSWER)
                tokens = f"{answer.prompt_tokens}+{answer.new_tokens} tokens, " if answer else ""
                _log.info("%s %s %d, %s%.2f s", scope["method"], path, status, tokens, time.monotonic() - begun)


class _Reply:
    """The answer to one request, whole or in pieces; it ends when the client is gone or the time is over."""

    def __init__(self, server: ChatServer, chat: ChatRequest, ready: Prepared, deadline: float) -> None:
        self._server, self._chat, self._ready, self._deadline = server, chat, ready, deadline
        self._kind = "text_completion" if chat.raw else "chat.completion"
        name = f"{'cmpl' if chat.raw else 'chatcmpl'}-{uuid.uuid4().hex}"
        self._about = {"id": name, "created": int(time.time()), "model": chat.model}
        self._events = asyncio.Queue[Event]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()

        def heard(event: Event) -> None:
            self._events.put_nowait(event)
            if isinstance(event, Answer):
                scope[_ANSWER] = event
            if not isinstance(event, str):  # not when its client leaves: until its turn it is in memory
                self._server.held -= 1

        def say(event: Event) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(heard, event)

        async def hung_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        job = Job(self._chat, say, self._deadline, self._ready)
        try:
            self._server.answerer.submit(job)
        except BaseException as error:
            job.tell(self._server.answerer.refusal(error))
        gone, speaking = (asyncio.ensure_future(each) for each in (hung_up(), self._speak(scope, receive, send)))
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

    async def _speak(self, scope: Scope, receive: Receive, send: Send) -> None:
        event = await self._next()
        if isinstance(event, RefusedError):  # before anything was said, so that the status is right
            await _error(event)(scope, receive, send)
        elif self._chat.stream:
            said = (f"data: {each}\n\n" async for each in self._chunks(event))
            await StreamingResponse(said, 200, {"cache-control": "no-cache"}, "text/event-stream")(scope, receive, send)
        else:
            await (await self._whole(event))(scope, receive, send)

    async def _next(self) -> Event:
        """Return the next event; a prompt that is being read may take longer than the time of its request."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._events.get()
        except TimeoutError:
            return time_over("its prompt is still read, or waits")

    async def _whole(self, event: Event) -> Response:
        pieces = []
        while isinstance(event, str):
            pieces.append(event)
            event = await self._next()
        if isinstance(event, RefusedError):
            return _error(event)
        text = "".join(pieces)
        said = {"text": text} if self._chat.raw else {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": event.finish}
        about = {"usage": _usage(event), "warnings": event.warnings}
        return JSONResponse({**self._about, "object": self._kind, "choices": [choice], **about})

    async def _chunks(self, event: Event) -> AsyncIterator[str]:
        if not self._chat.raw:
            yield self._chunk({"role": "assistant", "content": ""})
        while isinstance(event, str):
            yield self._chunk({"content": event})
            event = await self._next()
        if isinstance(event, RefusedError):
            yield json.dumps(_error_body(event))
            return
        yield self._chunk({}, event.finish, warnings=event.warnings)
        if self._chat.include_usage:
            yield self._chunk(None, usage=_usage(event))
        yield "[DONE]"

    def _chunk(self, delta: dict[str, str] | None, finish: str | None = None, **more: Any) -> str:
        kind = self._kind if self._chat.raw else f"{self._kind}.chunk"
        said = {"text": (delta or {}).get("content", "")} if self._chat.raw else {"delta": delta}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return json.dumps({**self._about, "object": kind, "choices": [] if delta is None else [choice], **more})


def _error_body(error: RefusedError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": plain(" ".join(str(error).split())), "type": kind, "param": None, "code": error.code}}


def _error(error: ValueError) -> JSONResponse:
    refused = error if isinstance(error, RefusedError) else RefusedError(400, str(error))
    headers = {"Retry-After": "1"} if refused.status in (429, 503) else None
    return JSONResponse(_error_body(refused), refused.status, headers)


def _usage(answer: Answer) -> dict[str, Any]:
    asked, new = answer.prompt_tokens, answer.new_tokens
    counts = {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}
    held = {"cache_bytes": answer.cache_bytes, "dense_cache_bytes": answer.dense_cache_bytes}
    return counts | {"prompt_tokens_details": {"cached_tokens": answer.cached_tokens}} | held


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return _error(RefusedError(500, BROKEN))
    words = f"{request.method} {request.url.path[:80]}: {error.detail}; {_PATHS}"
    return _error(RefusedError(error.status_code, words))


class _Connection(H11Protocol):
    """One connection: h11 is there always, and bounds the bytes of headers; their time is bounded here."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def _watch(self) -> None:
        """Have an end to the wait for whole headers, as long as it lasts."""
        waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if waits and self._late is None:
            self._late = self.loop.call_later(_READING, self.send_400_response, "The headers took too long.")
        elif not waits and self._late is not None:
            self._late.cancel()
            self._late = None


def http_server(server: ChatServer) -> uvicorn.Server:
    """Return what serves on sockets that are bound."""
    quiet: dict[str, Any] = {"log_level": logging.WARNING, "access_log": False, "server_header": False}
    bounds: dict[str, Any] = {"limit_concurrency": CONNECTIONS, "timeout_graceful_shutdown": GOODBYE}
    return uvicorn.Server(uvicorn.Config(server.app(), lifespan="off", ws="none", http=_Connection, **bounds, **quiet))


def serve_chats(server: ChatServer, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; answers on their way are finished, for ``GOODBYE`` seconds at most."""
    with bound_socket(host, port) as heard, sigterm_as_ctrl_c():
        heard.listen(CONNECTIONS)  # who reads the line may connect
        say(f"http://{host}:{port}/v1")
        http_server(server).run(sockets=[heard])


def serve_on(
    devices: Sequence[str], make: Callable[[str], ChatServer], host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM, a process for each device, which ``make`` (picklable) loads; they end together."""
    context = get_context("spawn")  # a forked process has no CUDA
    with bound_socket(host, port) as heard, sigterm_as_ctrl_c():
        heard.listen(CONNECTIONS)
        workers: dict[Any, Any] = {}  # what each says, and its process
        try:
            for device in devices:
                ear, mouth = context.Pipe(duplex=False)
                given, name = (make, device, heard, mouth), f"the server on {device}"
                workers[ear] = context.Process(target=_work, args=given, name=name)
                workers[ear].start()
                mouth.close()
            for ear, worker in workers.items():
                try:
                    words: str | None = ear.recv()
                except EOFError:
                    words = f"{worker.name} ended while it was loaded; see its message above"
                refuse((words, str(words)))
            say(f"http://{host}:{port}/v1")
            by_end = {worker.sentinel: worker for worker in workers.values()}
            gone = by_end[wait(list(by_end))[0]]
            gone.join()
            raise ValueError(f"{gone.name} ended (exit code {gone.exitcode}), and so did the others; start them again")
        finally:
            for worker in workers.values():
                worker.terminate()
            for worker in workers.values():
                worker.join(GOODBYE + 5)
                worker.kill()


def _work(make: Callable[[str], ChatServer], device: str, heard: socket.socket, mouth: Connection) -> None:
    with suppress(KeyboardInterrupt), sigterm_as_ctrl_c():
        try:
            server = make(device)
        except (ValueError, OSError) as error:  # users' mistakes: the first process words them
            mouth.send(" ".join(str(error).split()))
            return
        mouth.send(None)
        http_server(server).run(sockets=[heard])
