"""Processes that take turns: libraries that need different environments, measured beside each other.

A worker prints a line of JSON when it is ready (its versions), then answers every line of JSON with one. Only the one
that was asked computes; whoever asks waits for the answer. ``{"error": ...}`` is an answer that says why there is none.
"""

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Worker:
    """One side, in a process of its own.

    Args:
        command: that starts it, in the root of the repository.
    """

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.versions = self._answer()

    def ask(self, **message: Any) -> Any:
        """Its answer."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(self._ended()) from None
        answer = self._answer()
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        """Let it end, if it has not."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self._ended())
        return json.loads(line)

    def _ended(self) -> str:
        return f"a worker ended with exit code {self.process.wait()}: {' '.join(map(str, self.process.args))}"


def in_turns(names: Mapping[str, Any] | list[str], turn: int) -> list[str]:
    """Who goes first in a round: the order alternates."""
    return list(names)[:: 1 if turn % 2 == 0 else -1]
