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
    """Run what must be refused in one line, after counts, warnings, a trainer's words and any report; that line."""
    capsys.readouterr()
    code, (out, err) = main([*map(str, words)]), capsys.readouterr()
    *before, line = err.splitlines()
    assert (code, "" if reports else out) == (2, "")
    assert all(map(_BEFORE.fullmatch, before)), err
    assert line.startswith(ERROR)
    assert "<class" not in line
    return line.removeprefix(ERROR)


def check_refused(capsys, argv: list[str]) -> str:
    return refused(capsys, "check", *argv, reports=True)


def checked(capsys, argv: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in printed(capsys, "check", *argv).splitlines()]


def stopped(capsys, argv: list[str]) -> tuple[list[str], str]:
    """A check that is refused by its last line alone: what it said before, and the message."""
    assert main(["check", *argv]) == 2
    out, err = capsys.readouterr()
    assert not re.search("^(ready|valid):", out, re.MULTILINE)
    errors = err.splitlines()
    assert [line.startswith(ERROR) for line in errors] == [False] * (len(errors) - 1) + [True], errors
    return [" ".join(line.split()) for line in out.splitlines()], errors[-1].removeprefix(ERROR)
