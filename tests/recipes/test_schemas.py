"""The schemas of recipes and grids: every shipped file is valid, mistakes are found, and other packages' names join."""

import json
from copy import deepcopy

import pytest
import yaml

from subtoken_train.cli.recipe_source import recipe_keys, shipped_schema
from subtoken_train.documents import parse_yaml
from subtoken_train.resources import is_grid, recipe_files, recipe_text, with_schema
from tests.support.commands import printed, refused
from tests.support.places import RECIPES, ROOT, recipe

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema (extra dev) is not installed")
CHECKS = {kind: jsonschema.Draft7Validator(shipped_schema(kind)) for kind in ("recipe", "grid")}
TEXTS = {name: recipe_text(path) for name, path in recipe_files().items()}


def test_every_shipped_recipe_and_grid_is_valid_and_names_its_schema():
    kinds = []
    for name, text in TEXTS.items():
        kinds.append("grid" if is_grid(text) else "recipe")
        assert [error.message for error in CHECKS[kinds[-1]].iter_errors(parse_yaml(text, name))] == [], name
        folder = "" if recipe_files()[name].parent == RECIPES else "../"
        assert text.splitlines()[1] == f"# yaml-language-server: $schema={folder}{kinds[-1]}.schema.json", name
    assert (kinds.count("grid"), len(kinds) > 300) == (43, True)


WRONG = {
    "model.routing.num_group": 16, "model.routing.num_groups": "sixteen", "model.routing.selector": "liner",
    "model.reducer.layers": 2, "model.reducer.name": "fastvv", "model.optimizer.warmup_steps": 1.5,
    "data.train_files": "x.json", "data.batch_size": True, "trainer.max_step": 1, "trainer.strategy": "os.system",
    "trainer.plugins": [], "seed_everything": None,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG.items())
def test_a_recipe_that_fit_refuses_violates_it(key, value):
    content = yaml.safe_load(recipe("tiny_fastv25_s16k4").read_text())
    assert CHECKS["recipe"].is_valid(content)
    group = content
    for name in key.split(".")[:-1]:
        group = group.setdefault(name, {})
    group[key.rpartition(".")[2]] = value
    assert not CHECKS["recipe"].is_valid(content)


def test_a_grid_with_mistakes_violates_it():
    grid = yaml.safe_load((RECIPES / "eval" / "mini_scenes.yaml").read_text())
    for key, value in (("arm", []), ("limit", "all"), ("tasks", ["scenes_pop"]), ("anchors", "some")):
        assert not CHECKS["grid"].is_valid({**deepcopy(grid), key: value}), key
    for arm in ({"adaptor": "x"}, {"adapter": 1}, {"adapter": "x", "eviction_every": "often"}):
        assert not CHECKS["grid"].is_valid({**deepcopy(grid), "arms": [arm]}), arm
    assert not CHECKS["grid"].is_valid({key: value for key, value in grid.items() if key != "out"})


def test_the_command_prints_what_ships(capsys):
    assert json.loads(printed(capsys, "recipes", "schema")) == shipped_schema()
    assert json.loads(printed(capsys, "recipes", "schema", "--grid")) == shipped_schema("grid")


def test_a_copy_names_the_schema_of_the_installation(tmp_path, capsys):
    for name, kind in (("tiny_fastv12p5_s16k4", "recipe"), ("mini_scenes", "grid")):
        assert "wrote" in printed(capsys, "recipes", "copy", name, tmp_path / "mine.yaml", "--overwrite")
        first, second, *_ = (tmp_path / "mine.yaml").read_text().splitlines()
        assert first == TEXTS[f"{'eval' if kind == 'grid' else 'tiny'}/{name}"].splitlines()[0]
        assert second == f"# yaml-language-server: $schema=file://{ROOT}/recipes/{kind}.schema.json"
        assert (tmp_path / "mine.yaml").read_text().count("yaml-language-server") == 1
    assert with_schema("# mine\nmodel: 1\n") == "# mine\nmodel: 1\n"


def test_fit_lists_keys_with_types_and_defaults(capsys, monkeypatch):
    keys = dict(recipe_keys(shipped_schema(), {}))
    assert keys["model.routing.num_groups"] == "whole number (16)"
    assert keys["model.reducer.page_size"] == "whole number (16)"
    assert keys["trainer.max_steps"] == "whole number (-1)"
    assert keys["push_to_hub"] == "text or null (null)"
    everything = printed(capsys, "fit", "--help")
    assert [key for key in keys if f"  --{key} " not in everything] == []
    text = printed(capsys, "fit", "--config", "tinylm_quest25_s16k12", "--help")
    assert "--model.reducer.page_size " in text
    assert "--data.num_facts " in text
    for absent in ("--model.reducer.stage ", "--data.train_file ", "--data.block_length "):
        assert absent in everything
        assert absent not in text
    assert "--data.train_file " in printed(capsys, "fit", "--config", "tiny_fastv25_s16k4", "-h")


def test_a_grid_is_told_from_a_recipe(capsys):
    lines = printed(capsys, "recipes", "ls", "mini_scenes").splitlines()
    assert lines[1].startswith("  mini_scenes  grid · The mini-suite, images")
    assert len([line for line in printed(capsys, "recipes", "ls").splitlines() if "  grid · " in line]) == 43
    for command in ("fit", "check"):
        said = refused(capsys, command, "--config", "recipes/eval/mini_scenes.yaml")
        assert "is a grid of arms and tasks" in said
        assert said.rstrip().endswith("subtoken-train evaluate --config recipes/eval/mini_scenes.yaml")
