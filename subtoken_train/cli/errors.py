"""The one place where exceptions become messages and exit codes: 0 fine, 1 our failure, 2 wrong input, 130 Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from subtoken_train.errors import SubTokenWarning

PROGRAM = "subtoken-train"

USER_ERRORS = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)


def one_line(error: Exception) -> str:
    """The message of an error on one line; system errors as ``<reason>: <path>``."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    text = str(error)
    if "Original Traceback" in text:  # raised in a data-loading worker: torch puts the whole traceback in the message
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(text.split()) or type(error).__name__


def guarded(action: Callable[[], int]) -> int:
    """Run a command and return its exit code; wrong input gives one line on stderr and no traceback.

    A ``SubTokenWarning`` is one line on stderr, too.
    """
    try:
        with warnings.catch_warnings():
            _word_warnings()
            return action()
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if _reader_is_gone():
            return 0
        traceback.print_exc()
        return 1
    except USER_ERRORS as error:
        print(f"{PROGRAM}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 1


def _word_warnings() -> None:
    """Show our own warnings without file, line and source."""
    show = warnings.showwarning

    def worded(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
        if issubclass(category, SubTokenWarning):
            print(f"{PROGRAM}: warning: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            show(message, category, *place, **further)

    warnings.showwarning = worded


def _reader_is_gone() -> bool:
    """Whether it is stdout that broke (``... | head`` has read enough), and not a pipe to a worker of ours."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # not a file at all
        return False
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # or Python complains again at exit
    return gone
