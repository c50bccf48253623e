"""Loggers: CSV and TensorBoard always, W&B and MLflow by overlay; what a run's logs hold.

Neither wandb nor mlflow is needed: a stub stands for Lightning's loggers of them. What the real packages make of it
(servers, files, their versions) is not tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from subtoken_train.cli.loggers import OVERVIEW, SortedTensorBoard, csv_parts, logged, run_loggers, tensorboard_tag
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.training.panels.run_progress import LogRecipe
from tests.support.commands import refused
from tests.support.places import RECIPES, recipe


def argv(name: str, folder: Path, *more: str) -> list[str]:
    overlay = RECIPES / "logging" / f"{name}.yaml"
    tiny = str(recipe("tiny_fastv25_s16k4"))
    return ["--config", tiny, "--config", str(overlay), "--output_dir", str(folder), *more]


class Remote(DummyLogger):
    """A service's logger: what it was made with, and which recipe it was told."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.settings, self.told = settings, []

    def log_hyperparams(self, params) -> None:
        self.told.append(params)


@pytest.fixture
def remote(monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(KINDS["logger"].names._classes, name, Remote)
    monkeypatch.setattr("subtoken_train.cli.loggers.find_spec", lambda package: True)


def test_a_missing_package_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("subtoken_train.cli.loggers.find_spec", lambda package: None)
    for name in ("wandb", "mlflow"):
        words = f"trainer.logger {name} needs the package {name}; 'pip install {name}' adds it"
        assert refused(capsys, "fit", *argv(name, tmp_path / "run")) == words
    assert not (tmp_path / "run").exists()


def test_a_service_gets_the_recipe_beside_csv_and_tensorboard(remote, tmp_path):
    for name, settings in (
        ("wandb", {"name": "mine", "project": "subtoken_train", "save_dir": str(tmp_path / "mine" / "logs")}),
        ("mlflow", {"run_name": "mine", "experiment_name": "subtoken_train"}),
    ):
        cli = RecipeCLI(argv(name, tmp_path / "mine"))
        *ours, logger = cli.trainer.loggers
        assert [type(each) for each in ours] == [CSVLogger, SortedTensorBoard]
        assert settings.items() <= logger.settings.items()
        next(each for each in cli.trainer.callbacks if isinstance(each, LogRecipe)).on_fit_start(cli.trainer, cli.model)
        (told,) = logger.told
        assert told["model"]["routing"]["kept_groups"] == 4
    own = f"--trainer.logger={{wandb: {{name: other, save_dir: {tmp_path}}}}}"
    logger = RecipeCLI(argv("wandb", tmp_path / "mine", own)).trainer.loggers[-1]
    assert (logger.settings["name"], logger.settings["save_dir"]) == ("other", str(tmp_path))


@pytest.mark.parametrize("given", [None, True, "mlflow", ["mlflow", {"mine": {"save_dir": "x"}}]])
def test_ours_come_first_and_the_given_ones_after_them(remote, monkeypatch, tmp_path, given):
    monkeypatch.setitem(KINDS["logger"].names._classes, "mine", CSVLogger)  # as another package's entry point
    found = [type(logger) for logger in run_loggers(given, tmp_path, False)]
    own = {"mlflow": [Remote]}.get(given, []) if not isinstance(given, list) else [Remote, CSVLogger]
    assert found == [CSVLogger, SortedTensorBoard, *own]
    assert run_loggers(False, tmp_path, False) == []


def test_without_tensorboard_the_csv_log_stays_and_the_other_is_named(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    monkeypatch.setattr("subtoken_train.cli.loggers.rank_zero_info", said.append)
    assert [type(logger) for logger in run_loggers(None, tmp_path, False)] == [CSVLogger]
    assert said[0].startswith("left out: TensorBoard's log, beside")
    assert "pip install 'subtoken_train[tensorboard]'" in said[0]


def test_a_resumed_run_keeps_its_csv_logs_and_one_that_replaces_another_begins_anew(tmp_path):
    names = ["csv", *[f"csv-{i}" for i in range(2, 11)]]
    for number, name in enumerate(names):
        (logger, _) = run_loggers(None, tmp_path, False)
        assert Path(logger.log_dir).name == name
        logger.log_metrics({"a": number}, step=number)
        logger.save()
    assert [path.parent.name for path in csv_parts(tmp_path)] == names
    assert Path(run_loggers(None, tmp_path, True)[0].log_dir).name == "csv"


def test_tensorboard_opens_on_loss_and_accuracy_and_ends_with_gradients():
    """It sorts tags, and opens the groups before the first slash that come first."""
    others = ["gradient_norm/total", "epoch", "eval/counting", "mask_entropy/layer_0", "weight_norm/router/layer_0"]
    tags = sorted(map(tensorboard_tag, [*others, *OVERVIEW]))
    assert {tag.split("/")[0] for tag in tags[: len(OVERVIEW)]} == {"1_overview"}
    assert tags[-2:] == ["3_weight_norm/router/layer_0", "4_gradient_norm/total"]
    assert {"train/loss", "eval/accuracy", "val/loss"} < set(OVERVIEW)
    flat = ["train/kv_fraction", "train/kept_visual_fraction", "epoch"]  # lines that say nothing at a glance
    assert [tag[0] for tag in map(tensorboard_tag, flat)] == ["2", "2", "3"]


def test_the_course_of_a_run_goes_through_all_its_parts(tmp_path):
    first, second = "step,train/loss,epoch\n1,0.5,0\n3,0.4,\n", "train/loss,step\n0.3,3\n0.2,5\n"
    for name, content in (("csv", first), ("csv-2", second)):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "metrics.csv").write_text(content)
    assert logged(tmp_path) == {"train/loss": {1: 0.5, 3: 0.3, 5: 0.2}, "epoch": {1: 0.0}}
    assert logged(tmp_path / "elsewhere") == {}
