"""A process that runs commands against a Hub of its own address: the client reads HF_ENDPOINT when it is imported.

As a program: reads one JSON list per line, the token and either a command line or ``["-c", PROGRAM]``; answers with
exit code, stdout and stderr.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


class Session:
    """One such process; commands run one after the other in it. ``home``: the cache of the client."""

    def __init__(self, address: str, home: Path, offline: bool = False) -> None:
        hub = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
        settings = {
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }
        environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **hub, **settings},
        )

    def run(self, *argv: object, token: str | None = "hf_writer") -> Result:
        """Run a command line of ``subtoken-train``, or a program after ``-c``, as the owner of a token."""
        print(json.dumps([token, *map(str, argv)]), file=self.process.stdin, flush=True)
        return Result(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process; it has nothing left to write."""
        self.process.kill()
        self.process.wait()


def _serve() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    for line in sys.stdin:
        token, *argv = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        if token is not None:
            os.environ["HF_TOKEN"] = token
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _run(argv)
        print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)


def _run(argv: list[str]) -> int:
    from subtoken_train.cli.main import dispatch
    from subtoken_train.cli.terminal import guarded

    def program() -> int:
        exec(argv[1], {})
        return 0

    return guarded(program if argv[0] == "-c" else lambda: dispatch(argv))


if __name__ == "__main__":
    _serve()
