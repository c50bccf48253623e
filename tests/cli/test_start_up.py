"""What is wrong with a path, a YAML or a key at the top is said before torch is imported."""

import subprocess
import sys
from dataclasses import fields

import pytest

from subtoken_train.cli.evaluate import GRID_KEYS
from subtoken_train.evaluation.runner.spec import Grid
from tests.support.places import recipe

RECIPE = recipe("tiny_fastv25_s16k4")
PROGRAM = """
import resource, sys
from subtoken_train.cli.main import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "lightning", "datasets", "pandas") if name in sys.modules]
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, heavy, used.ru_utime + used.ru_stime < 1)
"""
COMMANDS = {
    "no such recipe": ["fit", "--config", "nope.yaml"],
    "broken": ["fit", "--config", "broken.yaml"],
    "a key": ["check", "--offline", "--config", "key.yaml"],
    "a key of the trainer": ["preview", "--config", str(RECIPE), "--trainer.max_step=3"],
    "an option": ["fit", "--config", str(RECIPE), "--outputdir=x"],
    "a number": ["fit", "--config", str(RECIPE), "--trainer.max_steps=0"],
    "a class": ["fit", "--config", str(RECIPE), "--trainer.callbacks=os.system"],
    "a sweep": ["sweep", "--config", "nope.yaml", "--set", "seed_everything=1,2"],
    "no such run": ["export", "nope", "OUT"],
    "no such grid": ["evaluate", "--config", "nope.yaml"],
    "a broken grid": ["evaluate", "--config", "broken.yaml"],
    "a key of a grid": ["evaluate", "--config", "key.yaml"],
    "a line": ["serve", "--backbone", "nope", "--queue", "0"],
    "a port": ["demo", "--adapter", "nope", "--port", "0"],
    "a recipe's name": ["recipes", "show", "nope"],
    "no such folder": ["init", "nope"],
    "no data in it": ["init", "."],
    "no results": ["report", "nope"],
    "no results in it": ["report", "."],
}


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS.keys())
def test_nothing_heavy_is_imported_for_a_slip(tmp_path, argv):
    (tmp_path / "broken.yaml").write_text("model: [1\n")
    (tmp_path / "key.yaml").write_text("modle: {}\n")
    command = [sys.executable, "-c", PROGRAM, *argv]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "2 [] True\n", done.stderr
    assert done.stderr.count("\n") == 1


def test_the_keys_of_a_grid():
    assert {field.name for field in fields(Grid)} == set(GRID_KEYS)
