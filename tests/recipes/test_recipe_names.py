"""Names are made from bases: every setting is what the recipe's own file said, and the text is a whole recipe."""

import csv
import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.evaluation.runner.spec import read_grid
from subtoken_train.resources import NamedRecipe, read_names
from subtoken_train.training.preflight import count_devices
from tests.support.commands import printed
from tests.support.places import RECIPES, ROOT, recipe, run_recipes
from tests.support.sampling import sampled

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


def test_every_recipe_has_the_settings_of_its_file(capsys):
    assert {path.stem for path in run_recipes()} == set(DIGESTS)
    for name, digest in DIGESTS.items():
        settings = yaml.safe_load(printed(capsys, "recipes", "show", name))
        assert hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() == digest, name


def test_bases_are_files_and_no_name_is_one():
    names = read_names(RECIPES)
    assert len(names) == 244
    assert all(recipe(row.base).is_file() and not recipe(row.name).exists() for row in names.values())
    assert list(names) == sorted(names)
    assert read_names(RECIPES)["llava7b_fastv25_s8k2"].base == "llava7b_fastv25_s16k4"


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


GRID_PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_its_grid_can_be_read(tmp_path):
    text = GRID_PAGE.partition("## The grid file\n")[2].partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "grid.yaml"
    path.write_text(text, encoding="utf-8")
    grid = read_grid(path)
    assert len(grid.arms) == 8
    assert [task.name for task in grid.tasks] == ["scenes_pope", "scenes_textvqa"]


OVERLAYS = sorted((RECIPES / "strategy").glob("*.yaml"))
PAPER = recipe("llava7b_fastv25_s16k4")


def test_every_strategy_has_an_overlay():
    assert {path.stem for path in OVERLAYS} - {"slurm"} == set(KINDS["strategy"].names) - {"auto"}


@sampled("path", OVERLAYS, every=4, ids=lambda path: path.stem)
def test_an_overlay_on_a_recipe(path):
    text = path.read_text()
    assert text.startswith("# overlay · ")
    assert f"recipes/strategy/{path.stem}." in text
    assert list(yaml.safe_load(text)) == ["trainer"]
    plain = RecipeCLI(["--config", str(PAPER)]).config
    laid_over = RecipeCLI(["--config", str(PAPER), "--config", str(path)]).config
    assert laid_over.trainer.strategy == ("ddp" if path.stem == "slurm" else path.stem)
    assert laid_over.model == plain.model

    def records(config) -> int:
        trainer = config.trainer
        processes = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
        return processes * config.data.batch_size * trainer.accumulate_grad_batches

    assert records(laid_over) == records(plain)


def test_the_batch_script_starts_what_its_overlay_says():
    script = (RECIPES / "strategy" / "slurm.sbatch").read_text()
    trainer = yaml.safe_load((RECIPES / "strategy" / "slurm.yaml").read_text())["trainer"]
    asked = {name: int(value) for name, value in re.findall(r"#SBATCH --([\w-]+)=(\d+)\n", script)}
    assert asked["nodes"] == trainer["num_nodes"]
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == trainer["devices"]
