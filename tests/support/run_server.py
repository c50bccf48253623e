"""Starts ``subtoken-train`` runs that someone means to kill, without paying their imports each time.

A server process imports everything once; every run is a fork of it in a session of its own. A run may be told to die
by its own hand in the middle of writing a checkpoint, where no outside signal hits reliably.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType


class RunServer:
    """Starts one run at a time; use it in a ``with`` block.

    Args:
        log: file that takes what the runs print.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = 0

    def __enter__(self) -> RunServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_group()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def start(self, argv: list[str], die_writing: int = 0) -> int:
        """Start ``subtoken-train ARGV``; returns its process id.

        Args:
            argv: the command.
            die_writing: the run kills itself half-way through the file of its nth checkpoint; 0: never.
        """
        self.log.write_text("")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([argv, die_writing]) + "\n")
        self.process.stdin.flush()
        self.pid = self._answer()
        return self.pid

    def wait(self) -> int:
        """The exit code of the run, negative for a signal."""
        code = self._answer()
        self.kill_group()
        return code

    def kill_group(self) -> None:
        """End what is left of the run: data-loading workers outlive a kill -9 of their parent by seconds."""
        if self.pid:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.pid = 0

    def _answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server is gone; see {self.log}")
        return int(line)


def serve(log: Path) -> None:
    """Read commands from stdin, a line each; answer with the run's process id, then with its exit code."""
    import peft  # noqa: F401  # what a fit imports, once
    from transformers.models.llava import modeling_llava  # noqa: F401

    from subtoken_train.artifact import folder  # noqa: F401
    from subtoken_train.cli import fit_course  # noqa: F401

    for line in sys.stdin:
        argv, die_writing = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(argv, die_writing, log)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(argv: list[str], die_writing: int, log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if die_writing:
        _die_writing(die_writing)
    from subtoken_train.cli.main import main

    code = 1
    try:
        code = main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_writing(nth: int) -> None:
    """Kill this process at the nth flush of a checkpoint's file, when half of its bytes are on the disk."""
    flush, seen = os.fsync, 0

    def cut_and_die(descriptor: int) -> None:
        nonlocal seen
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/.state.ckpt." in path:
            seen += 1
            if seen == nth:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = cut_and_die


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
