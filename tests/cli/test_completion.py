"""Completion, asked as a shell asks: commands without torch, a command's options, recipes' names and keys."""

import os
import subprocess
import sys

import pytest

from subtoken_train.cli.main import COMMANDS
from tests.support.places import ROOT

pytest.importorskip("argcomplete", reason="argcomplete (extra completion) is not installed")
PROGRAM = """
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
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert heavy.read_text() == ""
    return {word.strip() for word in out.read_text().split("\n")}


def test_a_shell_completes(tmp_path):
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
