"""What ``fit`` says to a wrong recipe or option: one short line, the whole key, the nearest name; nothing written."""

import json
import re

import pytest
from lightning.pytorch.callbacks import ModelSummary

from subtoken_train.cli.recipe import RecipeCLI
from tests.support import commands
from tests.support.places import recipe

RECIPE = recipe("tiny_fastv25_s16k4")


def refused(capsys, tmp_path, *argv, config=RECIPE):
    """Run a fit that must fail before it starts; the message without its prefix."""
    line = commands.refused(capsys, "fit", "--config", config, "--output_dir", tmp_path / "run", *argv)
    assert not (tmp_path / "run").exists()
    return line


IN_A_RECIPE = [
    ("output_dir:", "output_dirr:", "unknown key 'output_dirr'. Did you mean 'output_dir'?"),
    ("\ntrainer:", "\ntrianer:", "unknown key 'trianer'. Did you mean 'trainer'?"),
    ("kept_groups:", "kept_group:", "unknown key 'model.routing.kept_group'. Did you mean"),
    ("  reducer:", "  reducr:", "unknown key 'model.reducr'. Did you mean 'model.reducer'?"),
    ("max_length:", "max_len:", "unknown key 'data.max_len'. Did you mean 'data.max_length'?"),
    ("max_steps:", "max_step:", "unknown key 'trainer.max_step'. Did you mean 'trainer.max_steps'?"),
    (" learning_rate:", " lr:", "unknown key 'model.optimizer.lr'. Allowed in model.optimizer: final_fraction"),
    ("3.0e-3", "abc", "model.optimizer.learning_rate is 'abc'; it must be a number"),
    ("num_groups: 16", "num_groups: 1.5", "model.routing.num_groups is 1.5; it must be a whole number"),
    ("schedule: cosine", "schedule: cosin", "unknown model.optimizer.schedule 'cosin'. Did you mean 'cosine'?"),
    ("stage: embeds", "stage: embed", "unknown model.reducer.stage 'embed'. Did you mean 'embeds'? Allowed:"),
    ("train_file:", "val_file:", "data.train_file is not set, and has no default"),
]


@pytest.mark.parametrize(("old", "new", "message"), IN_A_RECIPE)
def test_mistakes_in_a_recipe(capsys, tmp_path, old, new, message):
    text = RECIPE.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new))
    assert message in refused(capsys, tmp_path, config=tmp_path / "mine.yaml")


VISIONZIP = "--model.reducer.name visionzip --model.reducer.layer 2"
IN_OPTIONS = {
    "--trainer.max_stepss 3": "unknown option '--trainer.max_stepss'. Did you mean '--trainer.max_steps'?",
    "--max_steps=3": "unknown option '--max_steps'. Did you mean '--trainer.max_steps'?",
    "--kept-groups 3": "unknown option '--kept-groups'. Did you mean '--model.routing.kept_groups'?",
    "--trainer.max_st 3": "unknown option '--trainer.max_st'. Did you mean '--trainer.max_steps'?",
    "--zzz 3": "unknown option '--zzz'. 'subtoken-train recipes show tiny_fastv25_s16k4' prints a",
    "--model.routing.kept_group 3": "unknown option '--model.routing.kept_group'. Did you mean",
    "--data.val_batch_size abc": "data.val_batch_size is 'abc'; it must be a whole number",
    "--model.optimizer.router_learning_rate abc": "model.optimizer.router_learning_rate is 'abc'; it must",
    "--model.routing false": "model.routing is 'false'; it must be a group of keys or null",
    "--model.reducer fastv": "model.reducer is 'fastv'; it must be a group of keys",
    "--model.routing.features norm": "model.routing.features is 'norm'; it must be a list in brackets",
    "--model.reducer.window 9": "unknown option '--model.reducer.window'. Allowed in model.reducer:",
    VISIONZIP: "unknown option '--model.reducer.layer'. Allowed in model.reducer: keep_ratio, matches, name, round_up",
    "--data.batch_size": "--data.batch_size needs a value",
    "--overwrite=maybe": "overwrite is 'maybe'; it must be true or false",
    "more": "unexpected argument 'more'; options start with --",
    "a.yaml": "unexpected argument 'a.yaml'; a recipe is passed as --config a.yaml",
}


@pytest.mark.parametrize("argv", IN_OPTIONS)
def test_mistakes_in_options(capsys, tmp_path, argv):
    assert IN_OPTIONS[argv] in refused(capsys, tmp_path, *argv.split())


NO_KEYS = "holds no keys; a recipe has the bands model, data and trainer"
NO_RECIPE = {
    "syntax": (b"model: [1, 2\ndata: 3\n", "line 2, column 5: invalid YAML (expected ',' or ']', but got ':')"),
    "empty": (b"", NO_KEYS),
    "list": (b"- 1\n", NO_KEYS),
    "bytes": (b"\xff\xfe", "is not UTF-8 (byte 0)"),
}


@pytest.mark.parametrize(("content", "message"), NO_RECIPE.values(), ids=NO_RECIPE)
def test_files_that_are_no_recipe(capsys, tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    line = refused(capsys, tmp_path, config=path)
    assert line.startswith(str(path))
    assert message in line


def test_no_recipe_at_all(capsys):
    said = commands.refused(capsys, "fit", "--trainer.max_steps", "3")
    assert "no recipe is given; pass one with --config" in said


def test_missing_images_are_counted_before_anything_is_loaded(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.training.module.SubTokenModule.configure_model", None)
    turns = [{"from": "human", "value": "<image> hi"}, {"from": "gpt", "value": "7"}]
    file = tmp_path / "train.json"
    file.write_text(json.dumps([{"image": f"gone/{i}.jpg", "conversations": turns} for i in range(40)]))
    line = refused(capsys, tmp_path, "--data.train_file", file, "--data.val_file", "null")
    assert line.startswith(f"40 of 40 images that {file} names are missing below {tmp_path} (first: ")
    assert line.endswith(f"subtoken-train data images --file {file} --root {tmp_path}")


BESIDE = {
    "model": {"backbone", "gradient_checkpointing", "lora", "optimizer", "reducer", "routing"},
    "model.routing": {"budget", "kept_groups", "num_groups"},
}


@pytest.mark.parametrize("group", BESIDE)
def test_an_unknown_key_is_told_keys_and_groups_beside_it(capsys, tmp_path, group):
    line = refused(capsys, tmp_path, f"--{group}.bogus=1")
    before, _, listed = line.partition(f"{group}.bogus'. Allowed in {group}: ")
    assert before in ("unknown option '--", "unknown key '")
    names = re.sub(r", and \d+ more$", "", listed).split(", ")
    assert set(names) >= BESIDE[group]
    assert names == sorted({*names} - {"help"})


def test_a_group_that_there_is_not_is_named(capsys, tmp_path):
    (tmp_path / "more.yaml").write_text("model: {bogus: {a: {b: 1}}}\n")
    line = refused(capsys, tmp_path, "--config", tmp_path / "more.yaml")
    assert line.startswith("unknown key 'model.bogus'. Allowed in model: backbone, ")


def test_lightnings_table_of_parameters_is_printed_where_it_is_asked_for(tmp_path):
    """By itself it says one row, no FLOPs, and what ``check`` counts."""

    def tables(*options):
        trainer = RecipeCLI(["--config", str(RECIPE), "--output_dir", str(tmp_path / "run"), *options]).trainer
        return sum(isinstance(each, ModelSummary) for each in trainer.callbacks)

    asked = "--trainer.callbacks=model_summary"
    assert [tables(), tables("--trainer.enable_model_summary=true"), tables(asked)] == [0, 1, 1]
