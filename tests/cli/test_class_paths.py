"""Names that a recipe's trainer may give: complete, readable again when a run has saved them, closed to all else."""

import dataclasses
import inspect
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from lightning.pytorch import Trainer

from subtoken_train.cli.command_line import FLAGS
from subtoken_train.cli.recipe import RecipeCLI, recipe_plan
from subtoken_train.cli.recipe_source import BANDS, KEYS, read_source
from subtoken_train.cli.trainer_parts import KINDS, SETTINGS, ZERO_SETTINGS, named_parts
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule, RecallDataModule
from subtoken_train.training.strategies import PRESETS
from subtoken_train.training.strategies.zero import _RECIPE_SAYS
from subtoken_train.typed import SettingsPlan
from tests.support.places import RECIPES, recipe, run_recipes
from tests.support.sampling import sampled

RECIPE = str(recipe("tiny_fastv25_s16k4"))
NAMES = [(key, name) for key, kind in KINDS.items() for name in kind.names]


def test_tables_are_complete():
    assert set(SETTINGS) == set(inspect.signature(Trainer).parameters)
    assert set(PRESETS) < set(KINDS["strategy"].names)
    assert set(_RECIPE_SAYS) <= set(ZERO_SETTINGS)
    assert set(recipe_plan("fastv", InstructionDataModule).hints) == {*KEYS, *FLAGS}
    assert set(BANDS) < set(KEYS)


@pytest.mark.parametrize(("key", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_name_leads_to_a_class_that_has_its_settings(key, name):
    parameters = inspect.signature(KINDS[key].names[name].__init__).parameters
    free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert free or set(KINDS[key].settings.get(name, ())) <= set(parameters)


def _leaves(hint: Any):
    if dataclasses.is_dataclass(hint):
        for inner in get_type_hints(hint).values():
            yield from _leaves(inner)
    elif get_origin(hint) is not Literal and get_args(hint):
        for inner in get_args(hint):
            yield from _leaves(inner)
    else:
        yield get_origin(hint) or hint


@pytest.mark.parametrize("data", [InstructionDataModule, CorpusDataModule, RecallDataModule])
def test_every_key_has_a_plain_type(data):
    """What stands as it is, is checked against a closed list."""
    plain = {int, float, str, bool, Path, NoneType, None, Literal, dict, list, tuple, ..., Any}
    bands = [recipe_plan("fastv", data)]
    for plan in bands:
        for name, hint in plan.hints.items():
            if isinstance(hint, SettingsPlan):
                bands.append(hint)
            else:
                assert (hint is Any) == (name in (*KINDS, "plugins")), name
                assert set(_leaves(hint)) <= plain, name


@sampled(("key", "name"), NAMES, every=4, ids=[name for _, name in NAMES])
def test_a_saved_recipe_passes_again(tmp_path, monkeypatch, key, name):
    monkeypatch.setattr("subtoken_train.cli.loggers.find_spec", lambda package: True)
    overlay, saved = tmp_path / "overlay.yaml", tmp_path / "recipe.yaml"
    spec = {name: dict.fromkeys(KINDS[key].settings.get(name, ())[:1], 1)}
    spec = {name: {"config": {"steps_per_print": 1}}} if name.startswith("zero") else spec
    overlay.write_text(yaml.safe_dump({"trainer": {key: [spec] if KINDS[key].many else spec}}))
    first = RecipeCLI(["--config", RECIPE, "--config", str(overlay)])
    (tmp_path / "recipe.yaml.partial").symlink_to(overlay)
    before = overlay.read_text()
    first.save_recipe(saved)
    assert (overlay.read_text(), saved.is_symlink()) == (before, False)  # a link there leads nowhere
    assert RecipeCLI(["--config", str(saved)]).resolved() == first.resolved()


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("0.25", 0.25), ("00:00:10:00", "00:00:10:00")])
def test_an_interval_is_a_count_a_share_or_a_time(text, value):
    found = RecipeCLI(["--config", RECIPE, f"--trainer.val_check_interval={text}"]).config.trainer.val_check_interval
    assert (found, type(found)) == (value, type(value))


REFUSED = {
    "lightning.pytorch.loggers.WandbLogger": "write wandb",
    "{class_path: subtoken_train.training.strategies.Fsdp2Strategy}": "names no class",
    "{wandb: {experiment: x}}": "experiment",
    "{wandb: {project: {a: b}}}": "one value",
    "[wandb, wandb]": "twice",
    "weights_and_biases": "unknown trainer.logger",
    "3": "write a name",
}


@pytest.mark.parametrize(("value", "words"), REFUSED.items(), ids=REFUSED)
def test_what_is_not_listed_is_refused_with_what_to_write(value, words):
    with pytest.raises(ValueError, match=words):
        named_parts("logger", yaml.safe_load(value) if value == "3" else value)


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
