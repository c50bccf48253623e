"""What ``fit`` says to a wrong recipe or option: one short line, the whole key, the nearest name; nothing written."""

import json
import re

import pytest
from lightning.pytorch.callbacks import ModelSummary

from subtoken_train.cli.recipe import RecipeCLI
from tests.support import commands
from tests.support.places import recipe

RECIPE = recipe("tiny_fastv25_s16k4")


def refused(capsys, argv, tmp_path):
    """Run a fit that must fail before it starts; the message without its prefix."""
    line = commands.refused(capsys, "fit", *argv)
    assert not (tmp_path / "run").exists()
    return line


def written(tmp_path, old, new):
    """The tiny recipe with one thing changed, in a file."""
    text = RECIPE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new))
    return ["--config", str(path), "--output_dir", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("output_dir:", "output_dirr:", "unknown key 'output_dirr'. Did you mean 'output_dir'?"),
        ("\ntrainer:", "\ntrianer:", "unknown key 'trianer'. Did you mean 'trainer'?"),
        ("kept_groups:", "kept_group:", "unknown key 'model.routing.kept_group'. Did you mean"),
        ("  reducer:", "  reducr:", "unknown key 'model.reducr'. Did you mean 'model.reducer'?"),
        ("max_length:", "max_len:", "unknown key 'data.max_len'. Did you mean 'data.max_length'?"),
        ("max_steps:", "max_step:", "unknown key 'trainer.max_step'. Did you mean 'trainer.max_steps'?"),
        (" learning_rate:", " lr:", "unknown key 'model.optimizer.lr'. Allowed in model.optimizer: final_fraction"),
        ("3.0e-3", "abc", "model.optimizer.learning_rate is 'abc'; it must be a number"),
        ("num_groups: 16", "num_groups: 1.5", "model.routing.num_groups is 1.5; it must be a whole number"),
        ("batch_size: 32", "batch_size: many", "data.batch_size is 'many'; it must be a whole number"),
        ("schedule: cosine", "schedule: cosin", "unknown model.optimizer.schedule 'cosin'. Did you mean 'cosine'?"),
        ("stage: embeds", "stage: embed", "unknown model.reducer.stage 'embed'. Did you mean 'embeds'? Allowed:"),
        ("train_file:", "val_file:", "data.train_file is not set, and has no default"),
    ],
)
def test_mistakes_in_a_recipe(capsys, tmp_path, old, new, message):
    assert message in refused(capsys, written(tmp_path, old, new), tmp_path)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trainer.max_stepss", "3"], "unknown option '--trainer.max_stepss'. Did you mean '--trainer.max_steps'?"),
        (["--max_steps=3"], "unknown option '--max_steps'. Did you mean '--trainer.max_steps'?"),
        (["--kept-groups", "3"], "unknown option '--kept-groups'. Did you mean '--model.routing.kept_groups'?"),
        (["--trainer.max_st", "3"], "unknown option '--trainer.max_st'. Did you mean '--trainer.max_steps'?"),
        (["--zzz", "3"], "unknown option '--zzz'. 'subtoken-train recipes show tiny_fastv25_s16k4' prints a"),
        (["--model.routing.kept_group", "3"], "unknown option '--model.routing.kept_group'. Did you mean"),
        (["--model.optimizer.learning_rate", "abc"], "model.optimizer.learning_rate is 'abc'; it must be a number"),
        (["--data.val_batch_size", "abc"], "data.val_batch_size is 'abc'; it must be a whole number"),
        (["--model.optimizer.router_learning_rate", "abc"], "model.optimizer.router_learning_rate is 'abc'; it must"),
        (["--model.routing", "false"], "model.routing is 'false'; it must be a group of keys or null"),
        (["--model.reducer", "fastv"], "model.reducer is 'fastv'; it must be a group of keys"),
        (["--model.routing.features", "norm"], "model.routing.features is 'norm'; it must be a list in brackets"),
        (["--model.reducer.window", "9"], "unknown option '--model.reducer.window'. Allowed in model.reducer:"),
        (
            ["--model.reducer.name", "visionzip", "--model.reducer.layer", "2"],
            "unknown option '--model.reducer.layer'. Allowed in model.reducer: keep_ratio, matches, name, round_up",
        ),
        (["--data.batch_size"], "--data.batch_size needs a value"),
        (["--overwrite=maybe"], "overwrite is 'maybe'; it must be true or false"),
        (["more"], "unexpected argument 'more'; options start with --"),
        (["a.yaml"], "unexpected argument 'a.yaml'; a recipe is passed as --config a.yaml"),
    ],
)
def test_mistakes_in_options(capsys, tmp_path, argv, message):
    start = ["--config", str(RECIPE), "--output_dir", str(tmp_path / "run")]
    assert message in refused(capsys, [*start, *argv], tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: [1, 2\ndata: 3\n", "line 2, column 5: invalid YAML (expected ',' or ']', but got ':')"),
        ("", "holds no keys; a recipe has the bands model, data and trainer"),
        ("- 1\n", "holds no keys; a recipe has the bands model, data and trainer"),
        (b"\xff\xfe", "is not UTF-8 (byte 0)"),
    ],
    ids=["syntax", "empty", "list", "bytes"],
)
def test_files_that_are_no_recipe(capsys, tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(capsys, ["--config", str(path)], tmp_path)
    assert line.startswith(str(path))
    assert message in line


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("recipes/tiny_fastv25_s16k3.yaml", "Did you mean 'tiny_fastv25_s16k4.yaml'?"),
        ("zzzzzz", "'subtoken-train recipes ls' lists the shipped ones"),
    ],
)
def test_a_recipe_that_does_not_exist(capsys, tmp_path, path, hint):
    line = refused(capsys, ["--config", path], tmp_path)
    assert line.startswith(f"recipe {path} is not a file.")
    assert hint in line


def test_no_recipe_at_all(capsys, tmp_path):
    assert "no recipe is given; pass one with --config" in refused(capsys, ["--trainer.max_steps", "3"], tmp_path)


def test_missing_images_are_counted_before_anything_is_loaded(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.training.module.SubTokenModule.configure_model", None)
    turns = [{"from": "human", "value": "<image> hi"}, {"from": "gpt", "value": "7"}]
    rows = [{"image": f"gone/{i}.jpg", "conversations": turns} for i in range(40)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    data = ["--data.train_file", str(tmp_path / "train.json"), "--data.val_file", "null"]
    line = refused(capsys, ["--config", str(RECIPE), "--output_dir", str(tmp_path / "run"), *data], tmp_path)
    assert line.startswith(
        f"40 of 40 images that {tmp_path / 'train.json'} names are missing below {tmp_path} (first: "
    )
    assert line.endswith(f"subtoken-train data images --file {tmp_path / 'train.json'} --root {tmp_path}")


@pytest.mark.parametrize(
    ("group", "some"),
    [
        ("model", ["backbone", "gradient_checkpointing", "lora", "optimizer", "reducer", "routing"]),
        ("model.routing", ["budget", "kept_groups", "num_groups"]),
    ],
)
def test_an_unknown_key_is_told_keys_and_groups_beside_it(capsys, tmp_path, group, some):
    line = refused(capsys, ["--config", str(RECIPE), f"--{group}.bogus=1"], tmp_path)
    before, _, listed = line.partition(f"{group}.bogus'. Allowed in {group}: ")
    assert before in ("unknown option '--", "unknown key '")
    names = re.sub(r", and \d+ more$", "", listed).split(", ")
    assert set(some) <= set(names)
    assert names == sorted({*names} - {"help"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routin: 1", "unknown key 'model.routin'. Did you mean 'model.routing'?"),
        ("bogus: {a: {b: 1}}", "unknown key 'model.bogus'. Allowed in model: backbone, "),
    ],
)
def test_a_group_that_there_is_not_is_named(capsys, tmp_path, text, message):
    (tmp_path / "more.yaml").write_text(f"model: {{{text}}}\n")
    line = refused(capsys, ["--config", str(RECIPE), "--config", str(tmp_path / "more.yaml")], tmp_path / "none")
    assert line.startswith(message)


def test_lightnings_table_of_parameters_is_printed_where_it_is_asked_for(tmp_path):
    """By itself it says one row, no FLOPs, and what ``check`` counts."""

    def tables(*options):
        trainer = RecipeCLI(["--config", str(RECIPE), "--output_dir", str(tmp_path / "run"), *options]).trainer
        return sum(isinstance(each, ModelSummary) for each in trainer.callbacks)

    asked = "--trainer.callbacks=model_summary"
    assert [tables(), tables("--trainer.enable_model_summary=true"), tables(asked)] == [0, 1, 1]
