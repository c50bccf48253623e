"""The list of classes: complete for what is documented, readable again when a run has saved it, closed under change."""

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer

from subtoken_train.cli.class_check import ALLOWED, ZERO_SETTINGS
from subtoken_train.cli.command_line import FLAGS
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.recipe_source import BANDS, KEYS, read_source
from subtoken_train.cli.trainer_ranges import SETTINGS
from subtoken_train.errors import SubTokenWarning
from subtoken_train.training.strategies import STRATEGIES, Fsdp2Strategy
from subtoken_train.training.strategies.zero import _RECIPE_SAYS
from tests.support.places import RECIPES, recipe, run_recipes
from tests.support.sampling import sampled

RECIPE = str(recipe("tiny_fastv25_s16k4"))
NEEDED = {
    "EarlyStopping": {"monitor": "val/loss"},
    "CSVLogger": {"save_dir": "x"},
    "TensorBoardLogger": {"save_dir": "x"},
}
PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
CLASSES = [(key, path) for key, allowed in ALLOWED.items() for path in allowed.classes]


def test_tables_are_complete():
    assert set(SETTINGS) == set(inspect.signature(Trainer).parameters)
    assert set(STRATEGIES) == set(ALLOWED["strategy"].names)
    assert set(_RECIPE_SAYS) <= set(ZERO_SETTINGS)
    tops = {action.dest.partition(".")[0] for action in RecipeCLI(["--config", RECIPE]).parser._actions}
    assert tops - {"help", "config", "print_config", "print_shtab", "==SUPPRESS=="} == {*KEYS, *FLAGS}
    assert set(BANDS) < set(KEYS)


@sampled(("key", "path"), CLASSES, every=4, ids=[path for _, path in CLASSES])
def test_a_saved_recipe_passes_again(tmp_path, key, path):
    name = path.rpartition(".")[2]
    if find_spec(PACKAGES.get(name, "lightning")) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    spec = {"class_path": path, "init_args": NEEDED.get(name, {})}
    overlay, saved = tmp_path / "overlay.yaml", tmp_path / "recipe.yaml"
    overlay.write_text(yaml.safe_dump({"trainer": {key: [spec] if ALLOWED[key].many else spec}}))
    first = RecipeCLI(["--config", RECIPE, "--config", str(overlay)])
    (tmp_path / "recipe.yaml.partial").symlink_to(overlay)
    before = overlay.read_text()
    first.save_recipe(saved)
    assert (overlay.read_text(), saved.is_symlink()) == (before, False)  # a link there leads nowhere
    assert RecipeCLI(["--config", str(saved)]).resolved() == first.resolved()


@pytest.mark.parametrize("key", ALLOWED)
def test_a_setting_means_the_same_to_every_class_that_has_it(key):
    """A class may be changed by a later file, and settings that both have stay: none may become a function there."""
    classes = ALLOWED[key].classes
    listed = {setting for settings in classes.values() for setting in settings}
    for path, settings in classes.items():
        module, _, name = path.rpartition(".")
        parameters = set(inspect.signature(getattr(import_module(module), name).__init__).parameters)
        assert (parameters & listed) <= set(settings), path


@sampled("path", sorted({*RECIPES.rglob("*.yaml"), *run_recipes()}), every=5, ids=lambda path: path.stem)
def test_shipped_recipes_and_overlays_need_no_flag(path):
    grid = path.parent == RECIPES / "real" and "\narms:" in path.read_text()
    if not grid and path.parent.name not in ("eval", "ablations") and path.stem != "table":
        read_source(["--config", str(path)])


def test_recipes_of_version_0_1_are_read(tmp_path, capsys):
    text = Path(RECIPE).read_text(encoding="utf-8")
    old = tmp_path / "recipe.yaml"
    old.write_text(f"{text}\noverwrite: false\nresume: false\nprivate: false\npush_to_hub: null\n")
    assert RecipeCLI(["--config", str(old)]).resolved() == RecipeCLI(["--config", RECIPE]).resolved()


def test_a_recipe_may_name_a_class_by_the_path_that_it_had(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "subtoken_train.training.strategies.fsdp2", raising=False)
    old = tmp_path / "old.yaml"
    old.write_text("trainer: {strategy: {class_path: subtoken_train.training.strategies.fsdp2.Fsdp2Strategy}}")
    with pytest.warns(SubTokenWarning, match=r"strategies\.fsdp2 is now subtoken_train\.training\.strategies;"):
        recipe_cli = RecipeCLI(["--config", RECIPE, "--config", str(old)])
    assert type(recipe_cli.trainer.strategy) is Fsdp2Strategy


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_no_keys(tmp_path, flag):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{Path(RECIPE).read_text(encoding='utf-8')}\n{flag}: true\n")
    with pytest.raises(ValueError, match=f"{flag}: True; that belongs on the command line"):
        read_source(["--config", str(path)])


NESTED = "[" * 3000
HOSTILE = {
    "deep": f"trainer: {NESTED}",
    "deep in a text": f"output_dir: '{NESTED}{']' * 3000}'",
    "an alias of itself": "trainer: &a {x: *a}",
    "a bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a bomb in a text": "output_dir: '[&a [x,x,x,x,x,x,x,x], "
    + ", ".join(f"&{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "]'",
    "a key twice": "output_dir: a\noutput_dir: b",
    "two documents": "output_dir: a\n---\noutput_dir: b",
    "no text": "\x00",
    "a number as a key": "3: 4",
    "a list as a key": "? [1]\n: 4",
    "many digits": "seed_everything: " + "9" * 5000,
    "a long text": f"output_dir: {'x' * 5000}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused_in_words(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"recipe\.yaml|output_dir|seed|key") as error:
        read_source(["--config", str(path)])
    assert len(str(error.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("name", [".", "pipe"])
def test_what_is_no_file(tmp_path, monkeypatch, name):
    import os

    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_source(["--config", name])
