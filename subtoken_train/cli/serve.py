"""``subtoken-train serve``: an OpenAI-compatible server on compressed caches."""

import argparse
import logging
import re
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.command_line import add_compression_options, add_settings, check_counts, flagged_arm
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.demo.local_server import check_address
from subtoken_train.documents import read_text
from subtoken_train.errors import SubTokenWarning, check_package, check_range, check_word, refuse
from subtoken_train.evictions import EVICTIONS
from subtoken_train.settings import parse_keep
from subtoken_train.typed import text_numbers

if TYPE_CHECKING:
    from subtoken_train.serving.chat_request import Limits
    from subtoken_train.serving.http_app import ChatServer, ServerSettings

HELP = """Serve one model to clients of OpenAI's API, on compressed caches.

  subtoken-train serve --adapter DIR --contexts FOLDER
  subtoken-train serve --backbone PATH --eviction kvzip --eviction-keep 0.25 --allow-eviction kvzip,none

POST /v1/chat/completions answers texts and pictures, streamed if asked; POST /v1/completions continues a text; GET
/v1/models; GET /health. Requests are answered together, whatever their lengths and settings. A part of a message with
"cache_control": {"type": "ephemeral"} ends a context, which is compressed once and kept for the next question. Only
this machine can reach the server, unless --host says otherwise. Each request is a line on stderr. It needs the extra
serve. Ctrl-C ends it."""
_DEVICES = "where it runs; several, as cuda:0,cuda:1: a process on each (default: auto)"
_OPTIONS: tuple[tuple[str, Any, str | None, str], ...] = (
    ("--name", None, "NAME", "what requests call the model (default: its folder's name)"),
    ("--port", 8000, "N", "default: 8000"),
    ("--host", "127.0.0.1", "ADDRESS", "default: 127.0.0.1, this machine only"),
    ("--api-key-file", None, "FILE", "file of keys, one a line; a request must bring one (default: no keys)"),
    ("--contexts-per-key", False, None, "a request finds only contexts that came with its own key"),
    ("--allow-origin", [], "ORIGIN", "address of web pages that may ask; repeatable, or *"),
    ("--allow-eviction", None, "NAMES", "evictions that a request may choose, as knorm,none (default: none of them)"),
    ("--allow-keep", None, "LOW,HIGH", "shares that a request may choose to keep (default: 0,1)"),
    ("--contexts", None, "FOLDER", "saved contexts that a request may name: FOLDER/NAME.safetensors"),
    ("--context-memory", "1GB", "BYTES", "memory for contexts between requests (default: 1GB)"),
    ("--queue", 64, "N", "requests that may run or wait (default: 64)"),
    ("--batch", 64, "N", "answers that are made together (default: 64)"),
    ("--answer-memory", "4GB", "BYTES", "memory for the caches of running answers (default: 4GB)"),
    ("--timeout", 120.0, "SECONDS", "time limit of one request (default: 120)"),
    ("--max-new-tokens", 512, None, "cap on an answer in tokens (default: 512)"),
    ("--max-body", "20MB", "BYTES", "largest request (default: 20MB)"),
    ("--max-images", 4, "N", "most images in a request (default: 4)"),
    ("--max-image-pixels", 25_000_000, "N", "most pixels of an image (default: 25000000)"),
)
"""Flags with their defaults, the words for a value, and help; a number's default says its type."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "adapter", "backbone")
    add_compression_options(parser)
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0", help=_DEVICES)
    for flag, default, metavar, words in _OPTIONS:
        how: dict[str, Any] = {"type": type(default) if isinstance(default, int | float) else str, "metavar": metavar}
        how = {"action": "append", "metavar": metavar} if default == [] else how
        how = {"action": "store_true"} if default is False else how
        parser.add_argument(flag, default=default, help=words, **how)


def run(args: argparse.Namespace) -> int:
    for package in ("starlette", "uvicorn"):
        check_package(package, "serve", "the server")
    check_range("--port", args.port, 1, 65535)
    check_address(args.host, args.port)
    check_counts(args, "queue", "batch", "max_new_tokens", "max_images", "max_image_pixels")
    check_range("--timeout", args.timeout, 1, 86400)
    flagged_arm(args, adapter=args.adapter)
    _bytes("--context-memory", args.context_memory)
    if args.contexts is not None and not Path(args.contexts).is_dir():
        raise ValueError(f"--contexts {args.contexts} is not a folder; name the folder that cache.save wrote to")
    from subtoken_train.serving.http_app import serve_chats, serve_on

    settings = _settings(args)
    _limits(args)
    if not settings.keys and settings.hosts == ("*",):
        words = f"--host {args.host} without --api-key-file: whoever reaches it is answered"
        warnings.warn(words, SubTokenWarning, stacklevel=2)
    devices = args.device.split(",")

    def say(url: str) -> None:
        print(f"{url} serves {settings.name!r} (Ctrl-C ends it)", flush=True)

    if len(devices) > 1:
        serve_on(devices, partial(_server, args), args.host, args.port, say)
        return 0
    server = _server(args, args.device)
    with closing(server.answerer):
        serve_chats(server, args.host, args.port, say)
    return 0


def _server(args: argparse.Namespace, device: str) -> "ChatServer":
    quiet_libraries()
    from subtoken_train.kernels import native
    from subtoken_train.serving.answerer import Answerer, ContextStore
    from subtoken_train.serving.http_app import ChatServer

    log = logging.getLogger("subtoken_train.serving")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    spec = flagged_arm(args, adapter=args.adapter)
    store = ContextStore(_bytes("--context-memory", args.context_memory), args.contexts and Path(args.contexts))
    if (model := spec.load(device)).device.type == "cpu":
        native.library()  # compiled before the first answer
    return ChatServer(Answerer(model, spec, _limits(args), store), _settings(args))


def _limits(args: argparse.Namespace) -> "Limits":
    from subtoken_train.serving.chat_request import Limits

    names = tuple(name.strip() for name in (args.allow_eviction or "").split(",") if name.strip())
    for name in names:
        check_word("eviction of --allow-eviction", name, (*EVICTIONS, "none"))
    shares = [each for part in (args.allow_keep or "0,1").split(",") for each in text_numbers(part, float)]
    ordered = len(shares) == 2 and 0 <= shares[0] <= shares[1] <= 1
    words = f"--allow-keep {args.allow_keep} must be two shares, the smaller one first, as 0.1,0.5"
    refuse((args.allow_keep and not names, "--allow-keep needs --allow-eviction NAMES"), (not ordered, words))
    most, kept = (args.max_new_tokens, args.max_images, args.max_image_pixels), (shares[0], shares[1])
    return Limits(*most, names, kept, args.batch, _bytes("--answer-memory", args.answer_memory))


def _settings(args: argparse.Namespace) -> "ServerSettings":
    from subtoken_train.serving.http_app import LOCAL, ServerSettings

    file = args.api_key_file
    keys = [] if file is None else [line.strip() for line in read_text(file).splitlines() if line.strip()]
    odd = file is not None and not (keys and all(key.isascii() and key.isprintable() for key in keys))
    refuse(
        (odd, f"--api-key-file {file} must hold keys of visible ASCII, one a line"),
        (args.contexts_per_key and not keys, "--contexts-per-key needs --api-key-file FILE, whose keys it tells apart"),
    )
    for origin in args.allow_origin:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(f"--allow-origin {origin} must be an origin, as https://example.org, or *")
    name = args.name or Path(args.adapter or args.backbone).name
    sizes = args.queue, args.timeout, _bytes("--max-body", args.max_body)
    hosts, origins = LOCAL if args.host in LOCAL else ("*",), tuple(args.allow_origin)
    return ServerSettings(name, tuple(keys), *sizes, hosts, origins, apart=args.contexts_per_key)


def _bytes(option: str, text: str) -> int:
    number, unit = parse_keep(text) if text[:1].isdigit() else (0.0, "")
    refuse((unit != "bytes" or number < 1, f"{option} {text} must be bytes, for instance 20MB"))
    return int(number)
