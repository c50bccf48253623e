"""What ``fit`` says and returns when training ends early, and which recipes may go on with a run."""

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


FULL = OSError(28, "No space left on device", "m.csv")
ENDS = [
    (TrainingInterrupted(2, "after step 5"), 130, "subtoken-train: SIGINT: stopped after step 5\n"),
    (TrainingInterrupted(15, "after step 5"), 143, "subtoken-train: SIGTERM: stopped after step 5\n"),
    (CheckpointFailed("the disk"), 1, "subtoken-train: the disk\n"),
    (FULL, 1, "stopped: No space left on device: m.csv; nothing that was there is lost: make room, or"),
    (ConnectionError("api.wandb.ai"), 1, "subtoken-train: stopped: api.wandb.ai\n"),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS)
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
    assert ended(FULL, tmp_path, rank=1) == 1


RECIPE = {
    "seed_everything": 0,
    "output_dir": "runs/a",
    "model": {
        "backbone": {"path": "a", "dtype": "float32"},
        "routing": {"selector": "linear", "kept_groups": 4},
        "optimizer": {"learning_rate": 0.1},
        "reducer": {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 16},
    },
    "data": {"train_file": "a.json", "batch_size": 8, "seed": 0, "num_workers": 0},
    "trainer": {"max_steps": 10, "devices": 1, "precision": None, "accumulate_grad_batches": 1},
}


def put(key, value):
    """The recipe with one value changed."""
    now = copy.deepcopy(RECIPE)
    place, (*groups, leaf) = now, key.split(".")
    for group in groups:
        place = place[group]
    place[leaf] = value
    return now


def compared(tmp_path, before, now):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before))
    return compare_recipes(tmp_path / "recipe.yaml", yaml.safe_dump(now))


def test_what_may_change_and_what_is_noted(tmp_path):
    free = {"output_dir": "b", "trainer.devices": 2, "model.backbone.path": "x", "data.train_file": "x.json"}
    for key, value in {**free, "data.num_workers": 4, "data.batch_size": 4}.items():
        assert compared(tmp_path, RECIPE, put(key, value)) == ""
    assert compared(tmp_path, RECIPE, put("trainer.max_steps", 20)) == "trainer.max_steps: 10, here 20"
    older = {key: value for key, value in RECIPE.items() if key not in ("model", "data")}
    assert compared(tmp_path, older, RECIPE) == ""
    all_reducers = {**RECIPE["model"]["reducer"], "stage": "embeds", "layer": 2, "seed": 0}
    assert compared(tmp_path, put("model.reducer", all_reducers), RECIPE) == ""  # as version 0.1 saved it


DECISIVE = {"seed_everything": 1, "model.backbone.dtype": "bfloat16", "model.optimizer.learning_rate": 0.2}
DECISIVE |= {"data.seed": 1, "trainer.precision": "bf16-mixed", "trainer.accumulate_grad_batches": 2}
DECISIVE |= {"model.reducer.page_size": 8}


@pytest.mark.parametrize(("key", "value"), DECISIVE.items())
def test_what_may_not(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"another recipe \({key}: .*, here {value}\); resume with .*recipe.yaml"):
        compared(tmp_path, RECIPE, put(key, value))


def test_groups_that_are_off_and_many_differences(tmp_path):
    with pytest.raises(ValueError, match=r"model.routing: set, here None"):
        compared(tmp_path, RECIPE, put("model.routing", None))
    other = put("model.routing", {"selector": 1, "kept_groups": 1})
    other |= {"seed_everything": 1, "data": {**RECIPE["data"], "seed": 1}}
    other["model"]["backbone"]["dtype"] = "x"
    with pytest.raises(ValueError, match="; and 1 more"):
        compared(tmp_path, RECIPE, other)
