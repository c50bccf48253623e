"""``subtoken-train check`` as tests call it."""

from __future__ import annotations

from subtoken_train.cli.main import main


def checked(capsys, argv: list[str]) -> list[str]:
    """Run a check that must succeed; its lines, blanks joined."""
    assert main(["check", *argv]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, argv: list[str]) -> str:
    """Run a check that must fail on its input; its one line, without the program's name."""
    assert main(["check", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("subtoken-train: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("subtoken-train: error: ").strip()
