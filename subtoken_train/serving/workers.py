"""Several servers behind one address: a process on each device, all of which listen to one socket.

Each has a model, a line and contexts of its own, and takes connections as they come: requests about one document are
not sent to the process that holds it. Where they should be, start a server for each device behind a balancer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from subtoken_train.demo.local_server import bound_socket, sigterm_as_ctrl_c
from subtoken_train.serving.http_app import CONNECTIONS, GOODBYE, ChatServer, http_server


def serve_on(
    devices: Sequence[str], make: Callable[[str], ChatServer], host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM, a process for each device; where one of them ends, all do.

    ``make`` loads a server on a device, in its process, so it must be picklable; ``say`` is called with the address
    once all have loaded.
    """
    context = get_context("spawn")  # a forked process has no CUDA
    with bound_socket(host, port) as heard, sigterm_as_ctrl_c():
        heard.listen(CONNECTIONS)
        ears, workers = [], []
        try:
            for device in devices:
                ear, mouth = context.Pipe(duplex=False)
                given, name = (make, device, heard, mouth), f"the server on {device}"
                worker = context.Process(target=_work, args=given, name=name)
                worker.start()
                mouth.close()
                ears.append(ear)
                workers.append(worker)
            for ear, worker in zip(ears, workers, strict=True):
                if words := _told(ear, worker.name):
                    raise ValueError(words)
            say(f"http://{host}:{port}/v1")
            by_end = {worker.sentinel: worker for worker in workers}
            ended, *_ = wait(list(by_end))
            gone = by_end[ended]  # type: ignore[index]
            gone.join()
            raise ValueError(f"{gone.name} ended (exit code {gone.exitcode}), and so did the others; start them again")
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(GOODBYE + 5)
                worker.kill()


def _told(ear: Connection, name: str) -> str | None:
    """Return why a server was not made; None where it was."""
    try:
        words: str | None = ear.recv()
    except EOFError:
        return f"{name} ended while it was loaded; what it said stands above"
    return words


def _work(make: Callable[[str], ChatServer], device: str, heard: socket.socket, mouth: Connection) -> None:
    with suppress(KeyboardInterrupt), sigterm_as_ctrl_c():
        try:
            server = make(device)
        except (ValueError, OSError) as error:  # users' mistakes: the first process words them
            mouth.send(" ".join(str(error).split()))
            return
        mouth.send(None)
        http_server(server).run(sockets=[heard])
