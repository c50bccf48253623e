"""What ``fit`` says and returns when training ends early."""

import copy
from types import SimpleNamespace

import pytest
import yaml

from subtoken_train.cli.fit_course import compare_recipes, train
from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.run_checkpoints import CheckpointFailed, TrainingInterrupted
from subtoken_train.training.run_folder import RunFolder


def ended(error, tmp_path, rank=0):
    """Training that ends with ``error`` in one process; its exit code."""

    def fit(*args, **kwargs):
        assert kwargs["weights_only"] is True
        raise error

    trainer = SimpleNamespace(fit=fit, is_global_zero=rank == 0, global_step=0)
    cli = SimpleNamespace(trainer=trainer, model=None, datamodule=None, output_dir=tmp_path)
    return train(cli, None, RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TrainingInterrupted(2, "after step 5"), 130, "subtoken-train: SIGINT: stopped after step 5\n"),
        (TrainingInterrupted(15, "after step 5"), 143, "subtoken-train: SIGTERM: stopped after step 5\n"),
        (CheckpointFailed("the disk"), 1, "subtoken-train: the disk\n"),
        (
            OSError(28, "No space left on device", "m.csv"),
            1,
            "stopped: No space left on device: m.csv; nothing that was there is lost: make room, or write elsewhere\n",
        ),
        (ConnectionError("api.wandb.ai"), 1, "subtoken-train: stopped: api.wandb.ai\n"),
    ],
)
def test_one_message_names_the_last_good_checkpoint(tmp_path, capsys, error, code, words):
    assert ended(error, tmp_path) == code
    said = capsys.readouterr().err
    assert words in said
    assert "no checkpoint was written; start again with the same command\n" in said
    seal(begin(tmp_path / "checkpoints", 3), Marker(3, 1, "X", {}))
    ended(error, tmp_path)
    said = capsys.readouterr().err
    assert f"last good checkpoint: {tmp_path}/checkpoints/step-3\n" in said
    assert f"continue with: subtoken-train fit --config {tmp_path}/recipe.yaml --resume\n" in said
    assert said.count("\n") == 4


def test_other_errors_keep_their_traceback_and_user_errors_their_words(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="bug"):
        ended(RuntimeError("bug"), tmp_path)
    assert "stopped by an error" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        ended(FileNotFoundError("a.png"), tmp_path)
    assert capsys.readouterr().err == ""


def test_the_other_processes_of_a_run_that_stops_say_nothing(tmp_path, capsys):
    assert ended(TrainingInterrupted(15, "after step 5"), tmp_path, rank=1) == 0
    assert capsys.readouterr().err == ""
    assert ended(TrainingInterrupted(15, "at once", alone=True), tmp_path, rank=1) == 143
    assert ended(OSError(28, "No space left on device"), tmp_path, rank=1) == 1


RECIPE = {
    "seed_everything": 0,
    "output_dir": "runs/a",
    "model": {
        "backbone": {"path": "a", "dtype": "float32"},
        "routing": {"selector": "linear", "kept_groups": 4},
        "optimizer": {"learning_rate": 0.1},
    },
    "data": {"train_file": "a.json", "batch_size": 8, "seed": 0, "num_workers": 0},
    "trainer": {"max_steps": 10, "devices": 1, "precision": None, "accumulate_grad_batches": 1},
}


def compared(tmp_path, *changes, dropped=()):
    now = copy.deepcopy(RECIPE)
    for key, value in changes:
        *groups, leaf = key.split(".")
        place = now
        for group in groups:
            place = place[group]
        place[leaf] = value
    before = {name: value for name, value in RECIPE.items() if name not in dropped}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before))
    return compare_recipes(tmp_path / "recipe.yaml", yaml.safe_dump(now))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_dir", "b"),
        ("trainer.devices", 2),
        ("model.backbone.path", "elsewhere"),
        ("data.train_file", "elsewhere.json"),
        ("data.num_workers", 4),
        ("data.batch_size", 4),
    ],
)
def test_what_may_change(tmp_path, key, value):
    assert compared(tmp_path, (key, value)) == ""


def test_what_is_noted(tmp_path):
    assert compared(tmp_path, ("trainer.max_steps", 20)) == "trainer.max_steps: 10, here 20"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed_everything", 1),
        ("model.backbone.dtype", "bfloat16"),
        ("model.optimizer.learning_rate", 0.2),
        ("data.seed", 1),
        ("trainer.precision", "bf16-mixed"),
        ("trainer.accumulate_grad_batches", 2),
    ],
)
def test_what_may_not(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"another recipe \({key}: .*, here {value}\); resume with .*recipe.yaml"):
        compared(tmp_path, (key, value))


def test_a_group_that_is_off(tmp_path):
    with pytest.raises(ValueError, match=r"model.routing: set, here None"):
        compared(tmp_path, ("model.routing", None))


def test_many_differences_are_counted(tmp_path):
    changes = [(f"model.routing.{name}", 1) for name in ("selector", "kept_groups")]
    changes += [("data.seed", 1), ("seed_everything", 1), ("model.backbone.dtype", "x")]
    with pytest.raises(ValueError, match="; and 1 more"):
        compared(tmp_path, *changes)


def test_keys_that_the_old_recipe_did_not_have(tmp_path):
    assert compared(tmp_path, dropped=("model", "data")) == ""


def test_a_recipe_saved_by_version_0_1_names_the_settings_of_every_reducer(tmp_path):
    own = {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 16}
    now = {**RECIPE, "model": {**RECIPE["model"], "reducer": own}}
    before = {**RECIPE, "model": {**RECIPE["model"], "reducer": {**own, "stage": "embeds", "layer": 2, "seed": 0}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before))
    assert compare_recipes(tmp_path / "recipe.yaml", yaml.safe_dump(now)) == ""
    before["model"]["reducer"]["page_size"] = 8
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before))
    with pytest.raises(ValueError, match=r"model.reducer.page_size: 8, here 4"):
        compare_recipes(tmp_path / "recipe.yaml", yaml.safe_dump(now))
