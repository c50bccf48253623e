"""``subtoken-train check`` as tests call it."""

import re

from subtoken_train.cli.main import main
from tests.support import commands


def checked(capsys, argv: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in commands.printed(capsys, "check", *argv).splitlines()]


def stopped(capsys, argv: list[str]) -> tuple[list[str], str]:
    assert main(["check", *argv]) == 2
    out, err = capsys.readouterr()
    assert not re.search("^(ready|valid):", out, re.MULTILINE)
    start, errors = "subtoken-train: error: ", err.splitlines()
    assert [line.startswith(start) for line in errors] == [False] * (len(errors) - 1) + [True], errors
    return [" ".join(line.split()) for line in out.splitlines()], errors[-1].removeprefix(start)


def refused(capsys, argv: list[str]) -> str:
    return commands.refused(capsys, "check", *argv, reports=True)
