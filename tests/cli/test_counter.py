"""The counter of long commands."""

import sys

from subtoken_train.cli.terminal import counter


def test_a_log_takes_ten_lines(capsys):
    show = counter("questions")
    for done in range(0, 1001, 7):
        show(done, 1000)
    show(1000, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "105/1000 questions"
    assert lines[-1] == "1000/1000 questions"


def test_a_terminal_counts_in_place(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show = counter("questions")
    for done in (1, 2):
        show(done, 2)
    assert capsys.readouterr().err == "\r1/2 questions\r2/2 questions\n"
