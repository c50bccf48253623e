"""Names are made from bases: every setting is what the recipe's own file said, and the text is a whole recipe."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import pytest
import yaml

from subtoken_train.cli import recipes
from subtoken_train.cli.main import main
from subtoken_train.resources import NamedRecipe, read_names, recipe_file, recipe_text
from tests.support.places import RECIPES, recipe, run_recipes

with (Path(__file__).parent / "settings_digests.csv").open(encoding="utf-8") as file:
    DIGESTS = {row["name"]: row["sha256"] for row in csv.DictReader(file)}
"""sha256 of each recipe's parsed settings as JSON with sorted keys, taken when every recipe was a file of its own."""

BASE = """\
# Tiny · 25 %
#   train   fit --config recipes/tiny_a25_s4k1.yaml
output_dir: runs/tiny_a25_s4k1
model:
  stage2: null                # none
  first: runs/tiny_a25/adapter
  reducer:
    keep: 0.25                # 16 of 64
    # of the reducer
  routing: {groups: 4}

data: 1
"""


def test_every_recipe_has_the_settings_of_its_file(capsys, monkeypatch):
    monkeypatch.setattr(recipes, "say_needs", lambda path: None)  # which lays every model out
    assert {path.stem for path in run_recipes()} == set(DIGESTS)
    for name, digest in DIGESTS.items():
        assert main(["recipes", "show", name]) == 0
        settings = yaml.safe_load(capsys.readouterr().out)
        assert hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() == digest, name


def test_bases_are_files_and_no_name_is_one():
    names = read_names(RECIPES)
    assert len(names) == 242
    assert all(recipe(row.base).is_file() and not recipe(row.name).exists() for row in names.values())
    assert list(names) == sorted(names)
    assert recipe_file(recipe("llava7b_fastv25_s8k2")) == RECIPES / "llava7b_fastv25_s16k4.yaml"


@pytest.mark.parametrize(
    ("name", "settings", "lines"),
    [
        ("tiny_a25_s8k2", "model.reducer.keep=0.125", {"output_dir: runs/tiny_a25_s8k2", "    keep: 0.125"}),
        ("tiny_a12p5_s4k1", "", {"  first: runs/tiny_a12p5/adapter", "    keep: 0.25                # 16 of 64"}),
        ("tiny_a", "model.stage2.lora.rank=4", {"  stage2:", "    lora:", "      rank: 4"}),
        ("tiny_a", "model.reducer- data=2", {"  routing: {groups: 4}", "data: 2"}),
        ("tiny_a", "model.reducer.new=[x]", {"    # of the reducer", "    new: [x]"}),
    ],
)
def test_settings_replace_add_and_remove_lines(name, settings, lines):
    made = NamedRecipe(name, "tiny_a25_s4k1", settings, "New").text(BASE).split("\n")
    assert made[0] == "# New"
    assert f"#   train   fit --config recipes/{name}.yaml" in made
    assert made[2] == "# Made from recipes/tiny_a25_s4k1.yaml by its line of recipes/names.csv."
    assert lines <= set(made)
    parsed = yaml.safe_load("\n".join(made))
    assert ("reducer" in parsed["model"]) == ("reducer-" not in settings)


def test_copy_writes_the_whole_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", "llava7b_fastv25_s8k2"]) == 0
    assert Path("llava7b_fastv25_s8k2.yaml").read_text() == recipe_text(recipe("llava7b_fastv25_s8k2"))


def test_a_name_that_is_no_grid_says_so(capsys):
    assert main(["evaluate", "--config", "tiny_fastv25_s16k4_global"]) == 2
    assert "unknown key" in capsys.readouterr().err
