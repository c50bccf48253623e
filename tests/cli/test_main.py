"""The command line: exit codes, one-line errors that a terminal shows as they are, nearest names, completion."""

import errno
import json
import logging
import os
import platform
import re
import subprocess
import sys
import unicodedata
import warnings
from importlib.metadata import version

import pytest

import subtoken_train
from subtoken_train.cli import check, terminal
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.main import COMMANDS
from subtoken_train.cli.terminal import about, counter, guarded, one_line, quiet_libraries
from subtoken_train.errors import _ADVICE, SubTokenWarning, UncutError, plain, shell_words, unknown_name
from subtoken_train.evaluation.reporting.exports import report_csv, text_cell
from subtoken_train.evaluation.reporting.report import make_report
from tests.support.benchmark_folders import write_files
from tests.support.commands import printed, refused
from tests.support.places import ROOT, recipe
from tests.support.report_results import answers, facts, register, write_run


def test_help_and_version(capsys):
    for argv in ([], ["--help"], ["-h"]):
        out = printed(capsys, *argv)
        assert [name for name, summary in COMMANDS.items() if not re.search(f"  {name} +{summary}", out)] == []
    for argv in (["check", "--help"], ["check", "-h"], ["env", "--help"]):
        assert "--offline" in printed(capsys, *argv)
    assert "--count" in printed(capsys, "preview", "--help")
    assert printed(capsys, "--version") == f"subtoken-train {version('subtoken_train')}\n"
    assert subtoken_train.__version__ == version("subtoken_train")


def test_options_after_the_separator_and_values_with_blanks_are_left_alone():
    parser = Parser(prog="x")
    parser.add_argument("words", nargs="*")
    check_options(parser, ["--", "--not-an-option"])
    check_options(parser, ["--help", "--what is this"])


def test_our_warnings_are_one_line_and_others_stay_as_they_are(capsys):
    def action():
        warnings.warn("layer 0 keeps\n nothing", SubTokenWarning, stacklevel=1)
        warnings.warn("of a library", UserWarning, stacklevel=1)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others = []
        warnings.showwarning = lambda *shown: others.append(str(shown[0]))
        assert guarded(action) == 0
    assert capsys.readouterr().err == "subtoken-train: warning: layer 0 keeps nothing\n"
    assert others == ["of a library"]


def test_versions_and_hardware(capsys, monkeypatch):
    facts = json.loads(printed(capsys, "env", "--json"))
    assert facts == json.loads(printed(capsys, "check", "--machine", "--json"))
    here = {"python": platform.python_version(), "torch": version("torch"), "cpu_count": os.cpu_count()}
    assert here.items() <= facts.items()
    assert {"subtoken_train", "platform", "nvidia_smi", *check.PACKAGES} <= set(facts)
    monkeypatch.setattr(check, "PACKAGES", ("no-such-package-at-all",))
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    rows = dict(line.split(maxsplit=1) for line in printed(capsys, "env").splitlines())
    assert (rows["no-such-package-at-all"], rows["nvidia_smi"]) == ("not installed", "none found")


RECIPE = recipe("tiny_fastv25_s16k4")
PROGRAM = """
import json, sys
import subtoken_train.plugins.lm_eval
from subtoken_train.cli.main import main
HEAVY = {"torch", "transformers", "lightning", "pandas", "matplotlib", "lm_eval", "lmms_eval"}
for words in json.load(sys.stdin):
    code = main(words)
    heavy = [*HEAVY.intersection(sys.modules)]
    print("@", code, heavy, " ".join(words), file=sys.__stdout__)
    if heavy:
        break
"""
NEEDS_NO_TENSORS = f"""
0 --help
0 recipes ls
0 env
2 fit
2 fit --config nope.yaml
2 fit --config {RECIPE} --output_dir key.yaml/x
2 fit --config {RECIPE} --output_dir line
2 fit --config {RECIPE} --output_dir done
2 fit --config broken.yaml
2 fit --config {RECIPE} --model.routing.kept_group=3
2 fit --config {RECIPE} --trainer.callbacks=os.system
2 check --offline --config key.yaml
2 preview --config {RECIPE} --outputdir=x
2 sweep --config nope.yaml --set seed_everything=1,2
2 sweep --config {RECIPE} --set model.routing.kept=2,4
2 sweep --grid nope
2 export nope OUT
2 recipes show nope
2 init nope
2 init empty
2 init captions
2 init line
2 report nope
2 report results --out key.yaml/x
2 evaluate --config nope.yaml
2 evaluate --config key.yaml
2 evaluate --config {RECIPE}
2 evaluate --check --config task.yaml
2 evaluate --check --config arm.yaml
2 evaluate --suite maxi
2 evaluate --suite mini --out key.yaml/x
2 evaluate --data nope.json --adapter nope
2 evaluate --tasks recal --backbone checkpoints/tiny-llama
2 compare nope
2 generate --adapter nope --prompt x
2 generate --backbone checkpoints/tiny-llama --prompt x --eviction snapkw --eviction-keep 0.5
2 generate --backbone checkpoints/tiny-llama --prompt x --eviction snapkv --eviction-keep 42
2 generate --backbone checkpoints/tiny-llama --prompt x --kv-dtype int3
2 generate --backbone checkpoints/tiny-llava --prompt x --image nope.png
2 serve
2 serve --backbone nope --queue 0
2 serve --adapter nope
2 demo --adapter nope --port 0
2 benchmark --model nope
2 calibrate duo_attention --backbone nope --out x.json
2 calibrate duo --backbone nope --out x.json
2 data scense
2 diagnose --backbone checkpoints/tiny-llama
2 axes nope empty
2 budget --keep-ratio 2 --num-groups 16 --kept-groups 4
2 recommend --budget 0.001
"""


def test_what_needs_no_tensors_loads_no_torch(tmp_path):
    files = {
        "broken.yaml": "model: [1\n",
        "key.yaml": "modle: {}\n",
        "task.yaml": "{out: x, arms: [{backbone: checkpoints/tiny-llama}], tasks: [recal]}",
        "arm.yaml": "{out: x, arms: [{backbone: checkpoints/tiny-llama, evictoin: x}], tasks: [recall]}",
        "captions/a.csv": "file,caption\na.png,a dog\n",
        "line/a.txt": "one line",
        "done/adapter/subtoken_config.json": "{}",
        "results/a/b/manifest.json": "{}",
        "empty/.hidden": "",
    }
    write_files(tmp_path, files)
    rows = [line.split() for line in NEEDS_NO_TENSORS.strip().splitlines()]
    given, command = json.dumps([words for _, *words in rows]), [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, input=given)
    said = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert said == [f"@ {code} [] {' '.join(words)}" for code, *words in rows]
    assert done.stderr.count("\n") == sum(code == "2" for code, *_ in rows), done.stderr


BAD_INPUT = {
    "init no": ({"no/a.bin": "x"}, "1 .bin; add texts, or pictures and a table, then: "),
    "init line": ({"line/a.txt": "one line"}, "too few different documents (1), three at least; add some, then: "),
    "init absent": ({"absent/a.csv": "file,caption\nx.png,a dog\n"}, "1 of 1 images are not in absent (first: 'x.png'"),
    "init blank": ({"blank/a.csv": "question,answer\n,x\n"}, "line 2: column 'question' is empty; fill it, or drop"),
    "fit --config FILE": (
        {"FILE": RECIPE.read_text().replace("kept_groups: 4", "kept_groups: four")},
        "model.routing.kept_groups is 'four'; it must be a whole number; 'subtoken-train fit --help' lists the keys",
    ),
    "evaluate --config FILE": (
        {"FILE": "{out: x, arms: [{backbone: x}], tasks: recall}"},
        "FILE: tasks is 'recall'; it must be a list in brackets, such as [one, two]; 'subtoken-train recipes show",
    ),
    "generate --backbone checkpoints/tiny-llama --prompt x": (
        {}, "GiB of memory and no GPU; take bfloat16, or a smaller model: subtoken-train data smollm2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_INPUT)
def test_what_newcomers_bring_is_one_line_with_the_command_to_type_next(tmp_path, monkeypatch, capsys, line):
    monkeypatch.setattr("subtoken_train.families.load.machine_memory", lambda: 1000)
    files, words = BAD_INPUT[line]
    write_files(tmp_path, files)
    said = refused(capsys, *line.split())
    assert words in said
    assert not line.startswith("init") or said.endswith(f"then: subtoken-train {line}")


COMPLETION = """
import atexit, os, sys
leave = os._exit
def seen(code):
    open(os.environ["HEAVY"], "w").write(",".join({"torch", "transformers", "lightning"} & sys.modules.keys()))
    leave(code)
os._exit = seen
from subtoken_train.cli.main import main
main()
"""


def completed(tmp_path, line):
    out, heavy = tmp_path / "out", tmp_path / "heavy"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "HEAVY": str(heavy)}
    command = [sys.executable, "-c", COMPLETION]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert heavy.read_text() == ""
    return {word.strip() for word in out.read_text().split("\n")}


def test_a_shell_completes(tmp_path):
    pytest.importorskip("argcomplete", reason="argcomplete (extra completion) is not installed")
    assert completed(tmp_path, "subtoken-train ") >= set(COMMANDS)
    assert completed(tmp_path, "subtoken-train ex") == {"export"}
    assert completed(tmp_path, "subtoken-train evaluate --lim") == {"--limit"}
    assert completed(tmp_path, "subtoken-train recipes sh") == {"show"}
    fit = completed(tmp_path, "subtoken-train fit --config tiny_fastv25_s16k4 --")
    assert fit >= {"--overwrite", "--anchor", "--trainer.max_steps", "--model.routing.num_groups", "--data.num_facts"}
    assert "tiny_fastv25_s16k4_anchor" in completed(tmp_path, "subtoken-train fit --config tiny_fastv25_s16k4_a")
    assert completed(tmp_path, "subtoken-train recipes show tinylm_quest25_s8k6_a") == {"tinylm_quest25_s8k6_anchor"}


def test_argcomplete_finds_the_mark():
    assert "PYTHON_ARGCOMPLETE_OK" in (ROOT / "subtoken_train/cli/main.py").read_text()[:1024]


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


def test_cells_of_text_are_no_formulas_and_markup_in_names_is_text(tmp_path, monkeypatch, capsys):
    register(monkeypatch, "fake")
    odd_report = tmp_path / "results"
    arm = facts("[red]x", 0.2, anchor="[link=http:]y", reducer="fastv 0.25", groups="S16K4 linear")
    write_run(odd_report, arm, "fake", answers(range(20)))
    write_run(odd_report, facts("=1+1|<b>", 1.0, adapter="@cmd", backbone="=HYPERLINK()"), "fake", answers(range(20)))
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
    said = capsys.readouterr().err.splitlines()
    assert said == ["1/30 runs, about 29 minutes left", "3/30 runs, about 12 minutes left", "30/30 runs"]


def test_durations_are_said_in_the_largest_unit_that_they_fill_twice():
    said = {0.2: "1 s", 119: "119 s", 120: "2 minutes", 7199: "120 minutes", 7200: "2 hours"}
    assert {seconds: about(seconds) for seconds in said} == {key: f"about {words}" for key, words in said.items()}


def test_noise_is_filtered_by_message():
    quiet_libraries()
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    for message, shown in (("MatMul8bitLt: inputs will be cast from bfloat16", False), ("something is wrong", True)):
        record = logging.LogRecord(logger.name, logging.WARNING, __file__, 1, message, None, None)
        assert bool(logger.filter(record)) == shown
