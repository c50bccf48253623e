"""Command lines as tests give them."""

import re

from subtoken_train.cli.main import main

ERROR = "subtoken-train: error: "
_BEFORE = re.compile(r"\d+/\d+ .*|subtoken-train: warning: .*|GPU available: .*|resuming from .*")


def printed(capsys, *words: object, silent: bool = False) -> str:
    capsys.readouterr()
    code, (out, err) = main([*map(str, words)]), capsys.readouterr()
    assert code == 0, err
    assert not (silent and err)
    return out


def refused(capsys, *words: object, reports: bool = False) -> str:
    """Run a command that must be refused in one line, after counts, warnings and any report; that line.

    A fit's trainer may have said by then what it runs on, and where it goes on from.
    """
    capsys.readouterr()
    code, (out, err) = main([*map(str, words)]), capsys.readouterr()
    *before, line = err.splitlines()
    assert (code, "" if reports else out) == (2, "")
    assert all(map(_BEFORE.fullmatch, before)), err
    assert line.startswith(ERROR)
    assert "<class" not in line
    return line.removeprefix(ERROR)
