"""The counter of long commands."""

import sys

from subtoken_train.cli import terminal
from subtoken_train.cli.terminal import about, counter


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


def test_a_timed_counter_says_what_is_left_after_the_first(capsys, monkeypatch):
    now = iter([0.0, 60.0, 70.0, 80.0, 90.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    show = counter("runs", timed=True)
    for done in (1, 2, 3, 30):
        show(done, 30)
    assert capsys.readouterr().err.splitlines() == [
        "1/30 runs, about 29 minutes left",
        "3/30 runs, about 12 minutes left",
        "30/30 runs",
    ]


def test_a_timed_counter_wipes_out_a_longer_line_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show = counter("runs", timed=True)
    for done in (1, 2):
        show(done, 2)
    first, last = capsys.readouterr().err.removeprefix("\r").removesuffix("\n").split("\r")
    assert first.startswith("1/2 runs, about 1 s left")
    assert len(last) >= len(first.rstrip())
    assert last.rstrip() == "2/2 runs"


def test_durations_are_said_in_the_largest_unit_that_they_fill_twice():
    assert [about(seconds) for seconds in (0.2, 119, 120, 7199, 7200)] == [
        "about 1 s",
        "about 119 s",
        "about 2 minutes",
        "about 120 minutes",
        "about 2 hours",
    ]
