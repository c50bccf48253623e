"""The command line as a whole: exit codes, one-line errors, nearest names, nothing heavy in the light paths."""

import json
import os
import platform
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest

import subtoken_train
from subtoken_train.cli import check
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.main import COMMANDS, main
from subtoken_train.cli.terminal import guarded
from subtoken_train.errors import SubTokenWarning
from tests.support.commands import printed, refused

BUDGET = ["budget", "--keep-ratio", ".25", "--num-groups", "16", "--kept-groups", "4"]
HEAVY = ("torch", "transformers", "lightning", "peft", "datasets", "numpy")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(capsys, argv):
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"  {name} " in out
        assert summary in out


@pytest.mark.parametrize("argv", [["check"], ["check", "--help"], ["check", "-h"], ["preview"], ["preview", "--help"]])
def test_raw_commands_print_their_help(capsys, argv):
    assert {"check": "--offline", "preview": "--no-color"}[argv[0]] in printed(capsys, *argv)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"subtoken-train {version('subtoken_train')}\n"
    assert subtoken_train.__version__ == version("subtoken_train")


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        (["bugdet"], "budget"),
        (["--versoin"], "--version"),
        (["budget", "--keep-ration", ".25"], "--keep-ratio"),
        ([*BUDGET, "--modle=llava-1.5-7b"], "--model"),
        (["recipes", "shwo", "x"], "show"),
        (["recipes", "copy", "x", "--overwrit"], "--overwrite"),
    ],
)
def test_misspelt_names_get_the_nearest(capsys, argv, nearest):
    assert f"Did you mean {nearest!r}?" in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["budget"], ["required", "--keep-ratio", "subtoken-train budget --help"]),
        ([*BUDGET, "more"], ["unrecognized arguments: more"]),
        (["budget", "--keep-ratio", "a", "--num-groups", "2", "--kept-groups", "1"], ["--keep-ratio", "'a'"]),
        (["recipes"], ["required", "ACTION"]),
    ],
)
def test_argparse_errors_are_one_line(capsys, argv, words):
    line = refused(capsys, *argv)
    assert all(word in line for word in words)


def test_options_after_the_separator_and_values_with_blanks_are_left_alone():
    parser = Parser(prog="x")
    parser.add_argument("words", nargs="*")
    check_options(parser, ["--", "--not-an-option"])
    check_options(parser, ["--help", "--what is this"])


def fail_with(error):
    def action():
        raise error

    return action


NOT_MINE = "this user may not; change its rights, or name another place"


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (ValueError("two\n lines"), 2, "subtoken-train: error: two lines\n"),
        (ValueError(), 2, "subtoken-train: error: ValueError\n"),
        (FileExistsError("out exists; --overwrite"), 2, "subtoken-train: error: out exists; --overwrite\n"),
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            f"subtoken-train: error: Permission denied: /x; {NOT_MINE}\n",
        ),
        (KeyboardInterrupt(), 130, "subtoken-train: interrupted\n"),
    ],
)
def test_exit_codes(capsys, error, code, stderr):
    assert guarded(fail_with(error)) == code
    assert capsys.readouterr().err == stderr


@pytest.mark.parametrize(
    "error",
    [RuntimeError("ours"), OSError("a broken pool"), ConnectionResetError(104, "reset"), BrokenPipeError("worker")],
)
def test_our_own_failures_keep_their_traceback(capsys, error):
    assert guarded(fail_with(error)) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert str(error) in err


def test_public_names_are_lazy():
    assert subtoken_train.KVBudget(0.25, 16, 4).total_kv_fraction == 0.15625
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = subtoken_train.Nothing


def test_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "subtoken_train", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("subtoken-train: error: unknown command 'nothing'")


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


@pytest.mark.parametrize(
    "argv",
    [
        ["init", "LOOP", "--out", "out"],
        ["init", "LOOP/deeper"],
        ["init", "."],
        ["generate", "--backbone", "checkpoints/tiny-llama", "--prompts", "LOOP", "--output", "out.jsonl"],
        ["generate", "--backbone", "LOOP", "--prompt", "x"],
        ["fit", "--config", "LOOP"],
        ["fit", "--config", "tinylm_compactor25", "--output_dir", "LOOP"],
        ["check", "--config", "LOOP", "--offline"],
        ["evaluate", "--adapter", "LOOP", "--data", "LOOP"],
        ["report", "LOOP"],
        ["export", "LOOP", "out"],
        ["recipes", "copy", "tinylm_compactor25", "LOOP/x.yaml"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("path", ["loop", "x" * 300, "nul\0x"])
def test_paths_that_lead_nowhere_are_one_line(tmp_path, monkeypatch, capsys, argv, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main([word.replace("LOOP", path) for word in argv]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert len(last) < 450
    assert last.isprintable()
    assert [each.name for each in tmp_path.iterdir()] == ["loop"]


def test_json_holds_versions_and_hardware(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == version("torch")
    assert facts["cpu_count"] == os.cpu_count()
    assert {"subtoken_train", "platform", "nvidia_smi", *check.PACKAGES} <= set(facts)


def test_absent_package_and_absent_gpu(capsys, monkeypatch):
    monkeypatch.setattr(check, "PACKAGES", ("no-such-package-at-all",))
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["no-such-package-at-all"] == "not installed"
    assert rows["nvidia_smi"] == "none found"
