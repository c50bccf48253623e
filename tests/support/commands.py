"""Command lines as tests give them."""

from __future__ import annotations

import re

from subtoken_train.cli.main import main

ERROR = "subtoken-train: error: "
_BEFORE = re.compile(r"\d+/\d+ .*|subtoken-train: warning: .*")


def printed(capsys, *words: object) -> str:
    """Run a command that must succeed; what it printed."""
    capsys.readouterr()
    code, (out, err) = main([*map(str, words)]), capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys, *words: object, reports: bool = False) -> str:
    """Run a command that must be refused in one line, after counts, warnings and any report; that line."""
    capsys.readouterr()
    code, (out, err) = main([*map(str, words)]), capsys.readouterr()
    *before, line = err.splitlines()
    assert (code, "" if reports else out) == (2, "")
    assert all(map(_BEFORE.fullmatch, before)), err
    assert line.startswith(ERROR)
    assert "<class" not in line
    return line.removeprefix(ERROR)
