"""Carries out what a case asks for: a command line in this process, or a function of the library."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.hostile.case import Answer

PREFIX = "subtoken-train: "
OS_WORDS = tuple({os.strerror(number) for number in errno.errorcode})
"""What the system says of an error; alone it is no sentence of ours."""
CANARY_MODULE = "hostile_canary"
"""A module on the path of every case that nobody but a hostile input imports."""
SOURCE = '''
"""Imported, it has run."""
class Callback:
    def __init__(self, *args, **kwargs): pass
def call(*args, **kwargs): return Callback()
'''


def install_canary(folder: Path) -> None:
    """Put the canary's module where ``import`` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{CANARY_MODULE}.py").write_text(SOURCE)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def command(words: Sequence[str]) -> Answer:
    from subtoken_train.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as end:  # --help
            code = end.code if isinstance(end.code, int) else 0
    return Answer(code, out.getvalue(), err.getvalue())


def call(function: Callable[[], object]) -> Answer:
    """Call a function: a plain ``ValueError`` or a worded ``OSError`` is a refusal; all else is none."""
    from subtoken_train.cli.terminal import one_line

    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            value = function()
        return Answer(0, out.getvalue(), "", value)
    except (ValueError, OSError) as error:
        ours = type(error) is ValueError or type(error).__module__.startswith("subtoken_train.")
        if not (ours or (isinstance(error, OSError) and worded(error))):
            raise
        return Answer(2, "", f"{PREFIX}error: {one_line(error)}\n")  # as a command would say it


def worded(error: OSError) -> bool:
    """Whether an error of the system carries a sentence of ours, and not the system's words and a path alone."""
    text = str(error)
    return " " in text and not text.startswith("[Errno ") and not system_words(text)


def system_words(line: str) -> bool:
    """Whether a line of a command holds nothing but what the system says of a path."""
    return "; " not in line and any(line == words or line.startswith(f"{words}: ") for words in OS_WORDS)
