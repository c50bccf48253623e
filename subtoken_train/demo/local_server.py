"""Serves the page on one address, until Ctrl-C or SIGTERM."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gradio as gr

    from subtoken_train.demo.side_by_side import SideBySide


def check_address(host: str, port: int) -> None:
    """Raise a worded ``ValueError`` unless a server can listen there."""
    if ":" in host:  # Gradio asks for its own page at http://::1:7860
        raise ValueError(f"--host {host} is no IPv4 address; give one, or a name (127.0.0.1 is this machine alone)")
    bound_socket(host, port).close()


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an IPv4 address, and does not listen yet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise _no_host(host) from None
    made = socket.socket(family, kind)
    # a port that was in use a moment ago is free
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        if isinstance(error, PermissionError):
            raise ValueError(f"--port {port} needs administrator rights; use 1024 or more") from None
        raise _in_use(host, port) if error.errno == errno.EADDRINUSE else _no_host(host) from None
    return made


@contextmanager
def served(models: "SideBySide", host: str, port: int) -> Iterator[str]:
    """Serve the page at the address given inside the block; afterwards what was uploaded and drawn is removed."""
    with TemporaryDirectory(prefix="subtoken_demo_") as folder:
        before = os.environ.get("no_proxy")  # the spelling that goes before NO_PROXY
        # before Gradio is imported, which reads them; a port is tried on GRADIO_SERVER_NAME, whatever launch is told
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder, GRADIO_SERVER_NAME=host)
        os.environ["no_proxy"] = "*"  # Gradio asks for its own page, and makes its clients when imported
        try:
            page, url = _launched(models, host, port)
        finally:
            del os.environ["no_proxy"]
            if before is not None:
                os.environ["no_proxy"] = before
        try:
            yield url
        finally:
            page.close(verbose=False)


def _launched(models: "SideBySide", host: str, port: int) -> "tuple[gr.Blocks, str]":
    from subtoken_train.demo.blocks import STYLE, build_page, looks

    page = build_page(models)
    try:
        # what Gradio would otherwise take from its environment variables is said
        off = dict.fromkeys(("share", "ssr_mode", "mcp_server", "run_history"), False)
        on = dict.fromkeys(("show_error", "prevent_thread_lock", "quiet"), True)
        drawn: dict[str, Any] = {"theme": looks(), "css": STYLE, "num_workers": 0, "footer_links": [], **off, **on}
        _, url, _ = page.launch(server_name=host, server_port=port, **drawn)
    except Exception as error:
        if page.is_running:  # it listens: what failed is Gradio's look at its own page, which it words as share=True
            page.close(verbose=False)
            words = f"--host {host}: this machine does not reach its own page there, on port {port}"
            raise ValueError(f"{words}; use 127.0.0.1, or look at firewall and name service") from error
        if isinstance(error, OSError):
            raise _in_use(host, port) from None
        raise
    return page, url


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise ``KeyboardInterrupt`` inside the block."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def serve(models: "SideBySide", host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until ``KeyboardInterrupt``, which SIGTERM is here too; ``say`` is called with the address."""
    with sigterm_as_ctrl_c(), served(models, host, port) as url:
        say(url)
        threading.Event().wait()


def _in_use(host: str, port: int) -> ValueError:
    return ValueError(f"--port {port} of {host} is in use; choose another one")


def _no_host(host: str) -> ValueError:
    return ValueError(f"--host {host} is no address of this machine; use 127.0.0.1 (only here) or 0.0.0.0 (everywhere)")
