"""Which file a recipe's name means: in the clone's root, in another folder, in an installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from subtoken_train import resources
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe_source import read_source
from subtoken_train.resources import find_recipe, recipe_files, resource_root, shipped_recipe
from tests.support.commands import refused
from tests.support.places import ROOT, recipe

TINY = recipe("tiny_fastv25_s16k4")
SPELLINGS = (
    "tiny_fastv25_s16k4",
    "tiny_fastv25_s16k4.yaml",
    "recipes/tiny_fastv25_s16k4.yaml",
    "recipes/tiny_fastv25_s16k4",
    "recipes/tiny/tiny_fastv25_s16k4.yaml",
    "tiny/tiny_fastv25_s16k4",
    "/clone/recipes/tiny_fastv25_s16k4.yaml",
)


@pytest.mark.parametrize("given", SPELLINGS)
@pytest.mark.parametrize("inside", [True, False], ids=["clone", "elsewhere"])
def test_one_recipe_in_every_folder(monkeypatch, tmp_path, inside, given):
    monkeypatch.chdir(ROOT if inside else tmp_path)
    assert find_recipe(given).resolve() == TINY


ELSEWHERE = {
    "recipes/strategy/ddp.yaml": "strategy/ddp.yaml",
    "recipes/eval/table1_llava7b.yaml": "eval/table1_llava7b.yaml",
    "qlora_nf4": "memory/qlora_nf4.yaml",
    "mine/tiny_fastv25_s16k4.yaml": None,
    "../tiny_fastv25_s16k4.yaml": None,
    "recipes/mine/tiny_fastv25_s16k4.yaml": None,
    "recipes/llava7b/tiny_fastv25_s16k4.yaml": None,
    "recipes/tiny_fastv25_s16k4.yaml/x": None,
    "tiny_fastv25_s16k3": None,
    "recipes": None,
}


@pytest.mark.parametrize(("given", "file"), ELSEWHERE.items())
def test_overlays_and_grids_too_and_what_is_missing_elsewhere_is_missing(monkeypatch, tmp_path, given, file):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(given) == (file and ROOT / "recipes" / file)


@pytest.mark.slow
def test_every_name_is_one_recipes():
    for name, path in recipe_files().items():
        assert shipped_recipe(path.stem) == shipped_recipe(name) == shipped_recipe(f"recipes/{path.name}") == path


@pytest.mark.parametrize("given", ["tiny_fastv25_s16k4", "recipes/tiny_fastv25_s16k4.yaml"])
def test_a_file_of_ones_own_goes_first(monkeypatch, tmp_path, given):
    monkeypatch.chdir(tmp_path)
    mine = Path(given)
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("output_dir: runs/mine\n")
    assert find_recipe(given) == mine
    assert read_source(["--config", given]).contents == ({"output_dir": "runs/mine"},)


def test_a_folder_of_that_name_is_no_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_fastv25_s16k4").mkdir()
    assert find_recipe("tiny_fastv25_s16k4") == TINY


def test_an_installed_package_finds_its_own(monkeypatch, tmp_path):
    (tmp_path / "_bundled" / "recipes").mkdir(parents=True)
    shutil.copy(TINY, tmp_path / "_bundled" / "recipes")
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resource_root() == tmp_path / "_bundled"
    for given in SPELLINGS:
        assert find_recipe(given) == tmp_path / "_bundled" / "recipes" / TINY.name
    assert find_recipe("llava7b_fastv25_s16k4") is None


def test_fit_takes_an_overlay_by_name(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "tiny_fastv25_s16k4", "--config", "ddp", "--print_config"])
    assert done.value.code in (0, None)
    assert "strategy: ddp" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "check", "preview", "evaluate"])
def test_a_misspelt_name(monkeypatch, tmp_path, capsys, command):
    monkeypatch.chdir(tmp_path)
    near, listed = "Did you mean 'tiny_fastv25_s16k4.yaml'?", "'subtoken-train recipes ls' lists the shipped ones"
    hints = {"tiny_fastv25_s16k3": near, "mine/tiny_fastv25_s16k4.yaml": near, "zzzzzz": listed}
    for given, hint in hints.items():
        said = refused(capsys, command, "--config", given)
        assert said.startswith(f"{'grid' if command == 'evaluate' else 'recipe'} {given} is not a file.")
        assert hint in said
