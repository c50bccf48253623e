"""Whatever goes wrong becomes one short line that a terminal shows as it is."""

import errno
import logging
import os
import subprocess
import sys
import unicodedata
import warnings

import pytest

from subtoken_train.cli import terminal
from subtoken_train.cli.terminal import about, counter, guarded, one_line, quiet_libraries
from subtoken_train.errors import _ADVICE, SubTokenWarning, UncutError, plain, shell_words, unknown_name
from subtoken_train.evaluation.reporting.exports import report_csv, text_cell
from subtoken_train.evaluation.reporting.report import make_report
from tests.support.commands import printed
from tests.support.report_results import answers, facts, register, write_run


def raised(error: BaseException) -> int:
    def action() -> int:
        raise error

    return guarded(action)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileExistsError("out exists; --overwrite"), 2),
        (KeyboardInterrupt(), 130),
        (RuntimeError("ours"), 1),
        (OSError("a broken pool"), 1),
        (ConnectionResetError(104, "reset"), 1),
        (BrokenPipeError("worker"), 1),
    ],
)
def test_exit_codes_and_who_keeps_a_traceback(error, code, capsys):
    assert raised(error) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


@pytest.mark.parametrize("number", [*_ADVICE, errno.EXDEV], ids=lambda number: errno.errorcode[number])
def test_what_the_file_system_refuses_is_one_line(number, capsys):
    assert raised(OSError(number, os.strerror(number), "a/\x1b[31mpath")) == 2
    advice = _ADVICE.get(number, "name another file or folder")
    assert capsys.readouterr() == ("", f"subtoken-train: error: {os.strerror(number)}: a/\\x1b[31mpath; {advice}\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("x" * 5000), "x ... x"),
        (ValueError("one\n  two\tthree"), "one two three"),
        (ValueError("embedded null byte"), "a path contains a NUL character"),
        (ValueError("\u202eabc\udcff\x07"), r"\u202eabc\udcff\x07"),
        (ValueError(), "ValueError"),
    ],
)
def test_messages_are_short_lines(error, words):
    line = one_line(error)
    assert words in line
    assert len(line) <= 400
    assert line.isprintable()


def test_bytes_that_are_no_text_and_lists_that_are_long():
    for action in (b"\xff".decode, "\udcff".encode):
        with pytest.raises(UnicodeError) as error:
            action()
        assert one_line(error.value).startswith("a text that is not UTF-8")
    assert len(one_line(UncutError("; ".join(map(str, range(500)))))) > 400
    names = str(unknown_name("recipe", "x" * 5000, [f"some_recipe_{i}" for i in range(200)]))
    assert (len(names) < 400, names[-4:]) == (True, "more")


@pytest.fixture
def odd_report(tmp_path, monkeypatch):
    register(monkeypatch, "fake")
    arm = facts("[red]x", 0.2, anchor="[link=http:]y", reducer="fastv 0.25", groups="S16K4 linear")
    write_run(tmp_path / "results", arm, "fake", answers(range(20)))
    other = facts("=1+1|<b>", 1.0, adapter="@cmd", backbone="=HYPERLINK()")
    write_run(tmp_path / "results", other, "fake", answers(range(20)))
    return tmp_path / "results"


def test_cells_of_text_are_no_formulas_and_markup_in_names_is_text(odd_report, capsys):
    out = printed(capsys, "report", str(odd_report))
    assert "[red]x" in out
    assert "its anchor [link=http:]y has no results here" in out
    cells = [cell for line in report_csv(make_report([odd_report])).splitlines()[1:] for cell in line.split(",")]
    assert "'=1+1|<b>" in cells
    assert "'=HYPERLINK()" in cells
    assert "'@cmd" in cells
    assert not [cell for cell in cells if cell.startswith(("=", "@", "+"))]
    assert text_cell("-") == "-"
    assert [text_cell(text)[0] for text in ("=a", "+a", "-a", "@a", "\ta", "\ra")] == ["'"] * 6
    assert text_cell("a=b") == "a=b"


NAME = "a\r\x1b[31m\x07\x9b\u202e\u2066\u200b\u200e\u061c\ufeff\u2028\U000e0041"


def test_no_name_acts_on_a_terminal_by_whatever_way_it_is_printed(capsys):
    """Joiners, which are letters, line breaks and tabs stay."""

    def action():
        print(NAME, "\u06cc\u200c\u200d\tb")
        print(NAME, file=sys.stderr)
        warnings.warn(NAME, SubTokenWarning, stacklevel=1)
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": NAME}))
        counter(NAME)(1, 1)
        raise TypeError(NAME)

    assert guarded(action) == 1
    said = "".join(capsys.readouterr())
    assert {letter for letter in said if unicodedata.category(letter) in ("Cc", "Cf", "Zl")} == set("\n\t\u200c\u200d")
    assert said.count(r"\x1b[31m") >= 5


@pytest.mark.parametrize(
    "word", ["", "a b", NAME, "\n", "it's\n\\", "\udcff\n", "é\t$(id)`id`\n", "$'\\x41'", "\x85a\U000e0041f"]
)
def test_a_word_of_a_command_is_the_same_to_bash_and_keeps_to_its_line(word):
    typed = shell_words("printf", "%s\\0", word)
    assert plain(typed) == typed
    assert len(typed.splitlines()) == 1
    assert subprocess.run(["bash", "-c", typed], capture_output=True, check=True).stdout == os.fsencode(word) + b"\0"


def test_a_log_takes_ten_lines(capsys):
    show = counter("questions")
    for done in range(0, 1001, 7):
        show(done, 1000)
    show(1000, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "105/1000 questions"
    assert lines[-1] == "1000/1000 questions"


def test_a_terminal_counts_in_place_and_wipes_out_a_longer_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for count in (counter("questions"), counter("runs", timed=True)):
        count(1, 2)
        count(2, 2)
    questions, runs = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert questions == "\r1/2 questions\r2/2 questions"
    first, last = runs.removeprefix("\r").split("\r")
    assert first.startswith("1/2 runs, about 1 s left")
    assert (len(last) >= len(first.rstrip()), last.rstrip()) == (True, "2/2 runs")


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


def test_durations_are_said_in_the_largest_unit_that_they_fill_twice():
    said = {0.2: "1 s", 119: "119 s", 120: "2 minutes", 7199: "120 minutes", 7200: "2 hours"}
    assert {seconds: about(seconds) for seconds in said} == {key: f"about {words}" for key, words in said.items()}


def test_noise_is_filtered_by_message():
    quiet_libraries()
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    for message, shown in (("MatMul8bitLt: inputs will be cast from bfloat16", False), ("something is wrong", True)):
        record = logging.LogRecord(logger.name, logging.WARNING, __file__, 1, message, None, None)
        assert bool(logger.filter(record)) == shown
