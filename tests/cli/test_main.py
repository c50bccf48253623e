"""The command line as a whole: exit codes, one-line errors, nearest names, nothing heavy in the light paths."""

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from importlib.metadata import version

import pytest

import subtoken_train
from subtoken_train.cli import check
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.evaluate import GRID_KEYS
from subtoken_train.cli.main import COMMANDS, main
from subtoken_train.cli.terminal import guarded
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evaluation.runner.spec import Grid
from tests.support.commands import printed, refused
from tests.support.places import recipe

BUDGET = ["budget", "--keep-ratio", ".25", "--num-groups", "16", "--kept-groups", "4"]


def test_help_and_version(capsys):
    for argv in ([], ["--help"], ["-h"]):
        out = printed(capsys, *argv)
        assert [name for name, summary in COMMANDS.items() if not re.search(f"  {name} +{summary}", out)] == []
    for argv in (["check"], ["check", "--help"], ["check", "-h"], ["env", "--help"]):
        assert "--offline" in printed(capsys, *argv)
    assert "--count" in printed(capsys, "preview", "--help")
    assert printed(capsys, "--version") == f"subtoken-train {version('subtoken_train')}\n"
    assert subtoken_train.__version__ == version("subtoken_train")


REFUSED = [
    (["bugdet"], ["Did you mean 'budget'?"]),
    (["--versoin"], ["Did you mean '--version'?"]),
    (["budget", "--keep-ration", ".25"], ["Did you mean '--keep-ratio'?"]),
    ([*BUDGET, "--modle=llava-1.5-7b"], ["Did you mean '--model'?"]),
    (["recipes", "shwo", "x"], ["Did you mean 'show'?"]),
    (["recipes", "copy", "x", "--overwrit"], ["Did you mean '--overwrite'?"]),
    (["budget"], ["required", "--keep-ratio", "subtoken-train budget --help"]),
    (["recipes"], ["required", "ACTION"]),
]


@pytest.mark.parametrize(("argv", "words"), REFUSED)
def test_slips_are_one_line_with_the_nearest_name(capsys, argv, words):
    line = refused(capsys, *argv)
    assert [word for word in words if word not in line] == []


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


@pytest.mark.parametrize(
    "argv",
    [
        ["init", "LOOP", "--out", "out"],
        ["init", "."],
        ["generate", "--backbone", "checkpoints/tiny-llama", "--prompts", "LOOP", "--output", "out.jsonl"],
        ["fit", "--config", "LOOP"],
        ["fit", "--config", "tinylm_compactor25", "--output_dir", "LOOP"],
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
import resource, sys
from subtoken_train.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "lightning", "datasets", "pandas") if name in sys.modules]
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, heavy, used.ru_utime + used.ru_stime < 1)
"""
SLIPS = {
    "no such recipe": ["fit", "--config", "nope.yaml"],
    "broken": ["fit", "--config", "broken.yaml"],
    "a key": ["check", "--offline", "--config", "key.yaml"],
    "a key of the model": ["fit", "--config", str(RECIPE), "--model.routing.kept_group=3"],
    "an option": ["fit", "--config", str(RECIPE), "--outputdir=x"],
    "a class": ["fit", "--config", str(RECIPE), "--trainer.callbacks=os.system"],
    "a sweep": ["sweep", "--config", "nope.yaml", "--set", "seed_everything=1,2"],
    "no such run": ["export", "nope", "OUT"],
    "no such grid": ["evaluate", "--config", "nope.yaml"],
    "a key of a grid": ["evaluate", "--config", "key.yaml"],
    "a line": ["serve", "--backbone", "nope", "--queue", "0"],
    "a port": ["demo", "--adapter", "nope", "--port", "0"],
    "a recipe's name": ["recipes", "show", "nope"],
    "no such folder": ["init", "nope"],
    "no results": ["report", "nope"],
}


@pytest.mark.parametrize("argv", SLIPS.values(), ids=SLIPS)
def test_nothing_heavy_is_imported_for_a_slip(tmp_path, argv):
    (tmp_path / "broken.yaml").write_text("model: [1\n")
    (tmp_path / "key.yaml").write_text("modle: {}\n")
    command = [sys.executable, "-c", PROGRAM, *argv]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "2 [] True\n", done.stderr
    assert done.stderr.count("\n") == 1


def test_the_keys_of_a_grid():
    assert {field.name for field in fields(Grid)} == set(GRID_KEYS)
