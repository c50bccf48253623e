"""The terminal side of a command: counters, messages, exit codes; noise that no user of ours can act on is silenced.

The one place where exceptions become exit codes: 0 fine, 1 our failure, 2 wrong input, 130 Ctrl-C.
"""

import errno
import io
import logging
import os
import re
import select
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from subtoken_train.errors import SubTokenWarning, UncutError, panics_in_words, plain, system_words

PROGRAM = "subtoken-train"
USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
"""Errors that a user can mend while a run goes on; of a command also what else the file system refuses."""
MAX_LENGTH = 400
"""Characters of a message."""


def one_line(error: Exception) -> str:
    """Return the message of an error on one line; of the system's, reason, path and what to do."""
    if isinstance(error, OSError) and error.filename is not None:
        text = system_words(error)
    elif isinstance(error, UnicodeError):
        text = f"a text that is not UTF-8 ({getattr(error, 'reason', error)})"
    else:
        text = str(error)
    if "Original Traceback" in text:  # raised in a data-loading worker: torch puts the whole traceback in the message
        text = text.strip().splitlines()[-1].partition(": ")[2]
    if "embedded null" in text:
        text = "a path contains a NUL character, which no file name can"
    text = plain(" ".join(text.split())) or type(error).__name__
    if isinstance(error, UncutError) or len(text) <= MAX_LENGTH:
        return text
    return f"{text[: MAX_LENGTH - 125]} ... {text[-120:]}"


def guarded(action: Callable[[], int]) -> int:
    """Run a command and return its exit code; wrong input, or a ``SubTokenWarning``, is one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # writes out what its encoding has no bytes for, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    out, err = map(_Shown, (sys.stdout, sys.stderr))
    with redirect_stdout(cast("TextIO", out)), redirect_stderr(cast("TextIO", err)):
        return _exit_code(action)


_MOVE = re.compile(r"\r|\n*(?:\x1b\[A)+$|")
"""Ways back of a counter or a bar to its line: before a text, or alone."""


class _Shown:
    """A stream all of whose text is ``plain``: nothing that a command prints acts on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write out what would act."""
        move = _MOVE.match(text)
        end = move.end() if move and self._stream.isatty() else 0
        return self._stream.write(text[:end] + plain(text[end:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _exit_code(action: Callable[[], int]) -> int:
    show = warnings.showwarning

    def worded(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
        if issubclass(category, SubTokenWarning):
            print(f"{PROGRAM}: warning: {' '.join(str(message).split())}", file=sys.stderr)
        else:
            show(message, category, *place, **further)

    try:
        with warnings.catch_warnings(), panics_in_words():
            warnings.showwarning = worded
            return action()
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if _reader_is_gone():
            return 0
        traceback.print_exc()
        return 1
    except Exception as error:
        lost = isinstance(error, ConnectionError | TimeoutError | BlockingIOError | ChildProcessError)
        refused = isinstance(error, OSError) and not lost and (error.errno or 0) in errno.errorcode
        if refused or isinstance(error, USER_ERRORS):
            print(f"{PROGRAM}: error: {one_line(error)}", file=sys.stderr)
            return 2
        traceback.print_exc()
        return 1


def _reader_is_gone() -> bool:
    """Return True if stdout broke (``... | head`` has read enough), and not a pipe to a worker of ours."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # not a file at all
        return False
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    if gone := any(event & select.POLLERR for _, event in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # or Python complains again at exit
    return gone


_LINES = 10  # in a log


def counter(what: str, timed: bool = False) -> Callable[[int, int], None]:
    """Return a function of (done, total) that shows ``done/total what``, and if ``timed`` the time left."""
    shown, what, start = -1 if timed else 0, plain(what), time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        line = f"{done}/{total} {what}"
        if timed:
            left = f", {about((time.monotonic() - start) / done * (total - done))} left" if done < total else ""
            line += f"{left:<22}" if sys.stderr.isatty() else left  # wipes out the end of a longer one
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif (part := done * _LINES // total) > shown:
            shown = part
            print(line, file=sys.stderr, flush=True)

    return show


def about(seconds: float) -> str:
    """Return a duration in the largest unit that it fills twice: ``about 3 minutes``."""
    size, unit = next((u for u in ((3600, "hours"), (60, "minutes")) if seconds >= 2 * u[0]), (1, "s"))
    return f"about {max(1, round(seconds / size))} {unit}"


_NOISE = (
    *("Tip: For seamless", "Restoring states", "Restored all states", "TPU available", "HPU available", "Seed set to"),
    "Failed to load CPU gemm_4bit_forward",  # an optional package for CPUs; said at import, wanted or not
    "Setting accelerator to CPU",  # peft imports DeepSpeed where it is installed
    "MatMul8bitLt: inputs will be cast",  # at every product of an 8-bit layer
)
_LOGGERS = (
    *("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed", "DeepSpeed"),
    *("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"),
)


def quiet_environment() -> None:
    """Call before the Hub's client is imported, which reads this then."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def quiet_libraries() -> None:
    """Call before anything of ours that uses transformers or lightning."""
    quiet_environment()
    for message in (
        ".*is_gradient_checkpointing. is deprecated",  # peft's call into transformers
        ".*gradient_checkpointing_enable. is deprecated",
        ".*treespec, LeafSpec",  # lightning's call into torch
        "Precision .* is not supported by the model summary",
        "Found .* module.s. in eval mode",  # the frozen backbone is meant to be
        "The 'train_dataloader' does not have many workers",
        "The 'val_dataloader' does not have many workers",
        "Total length of .* across ranks is zero",  # no validation file was given
        "Paged optimizers are not supported on CPU",  # bitsandbytes: plain ones are used, which is what a CPU has
        "When saving the DeepSpeed Stage 3 checkpoint",  # trained_tensors puts the parts together
        ".*all_gather_into_tensor. is deprecated",  # DeepSpeed's and FSDP2's calls into torch
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not any(noise in record.getMessage() for noise in _NOISE))
    import datasets
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    datasets.disable_progress_bars()
