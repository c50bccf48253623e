"""Serves the page on one address, until Ctrl-C."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subtoken_train.demo.side_by_side import SideBySide


def check_address(host: str, port: int) -> None:
    """Raise a worded ``ValueError`` unless a server can listen there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise _no_host(host) from None
    with socket.socket(family, kind) as trial:
        # as the server does: a port that was in use a moment ago is free
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except PermissionError:
            raise ValueError(f"--port {port} is not for this user; take one from 1,024 on") from None
        except OSError as error:
            raise _in_use(host, port) if error.errno == errno.EADDRINUSE else _no_host(host) from None


@contextmanager
def served(models: SideBySide, host: str, port: int) -> Iterator[str]:
    """Inside the block the page is there; what was uploaded and drawn is removed afterwards.

    Yields:
        its address.

    Raises:
        ValueError: the port was taken in the meantime.
    """
    with TemporaryDirectory(prefix="subtoken_demo_") as folder:
        # before Gradio is imported, which reads them
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder)
        from subtoken_train.demo.blocks import build_page, looks

        page = build_page(models)
        try:
            # what Gradio would otherwise take from its environment variables is said
            _, url, _ = page.launch(
                server_name=host,
                server_port=port,
                theme=looks(),
                share=False,
                ssr_mode=False,
                mcp_server=False,
                num_workers=0,
                run_history=False,
                footer_links=[],
                show_error=True,
                prevent_thread_lock=True,
                quiet=True,
            )
        except OSError:
            raise _in_use(host, port) from None
        try:
            yield url
        finally:
            page.close(verbose=False)


def serve(models: SideBySide, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until ``KeyboardInterrupt``; ``say`` is called with the address."""
    with served(models, host, port) as url:
        say(url)
        threading.Event().wait()


def _in_use(host: str, port: int) -> ValueError:
    return ValueError(f"--port {port} of {host} is in use; choose another one")


def _no_host(host: str) -> ValueError:
    return ValueError(f"--host {host} is no address of this machine; 127.0.0.1 is heard here alone, 0.0.0.0 everywhere")
