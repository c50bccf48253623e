"""Loggers: CSV and TensorBoard always, W&B and MLflow by overlay.

Neither wandb nor mlflow is needed: stubs stand for the packages, and Lightning's own loggers run on them. What the real
packages make of it (servers, files, their versions) is not tested.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import lightning.pytorch.loggers.mlflow as lightning_mlflow
import lightning.pytorch.loggers.wandb as lightning_wandb
import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from lightning.pytorch.utilities import rank_zero_only

from subtoken_train.cli.loggers import OVERVIEW, SortedTensorBoard, csv_parts, logged, run_loggers, tensorboard_tag
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.training.panels.run_progress import LogRecipe
from tests.support.commands import refused
from tests.support.places import RECIPES, recipe

RECIPE = recipe("tiny_fastv25_s16k4")


def argv(name: str, folder: Path) -> list[str]:
    overlay = RECIPES / "logging" / f"{name}.yaml"
    return ["--config", str(RECIPE), "--config", str(overlay), "--output_dir", str(folder)]


def stub(monkeypatch, name: str, **content) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeRun:
    """A W&B run."""

    def __init__(self, **settings) -> None:
        self.settings, self.logged, self.recipe = settings, [], {}
        self.config = types.SimpleNamespace(update=lambda params, **_: self.recipe.update(params))

    def log(self, metrics) -> None:
        self.logged.append(metrics)

    def define_metric(self, *args, **settings) -> None:
        pass


@pytest.fixture
def wandb_runs(monkeypatch) -> list[FakeRun]:
    """The runs that a stub of wandb made."""
    made: list[FakeRun] = []

    def init(**settings):
        made.append(FakeRun(**settings))
        return made[-1]

    stub(monkeypatch, "wandb", init=init, run=None)
    stub(monkeypatch, "wandb.sdk")
    stub(monkeypatch, "wandb.sdk.lib", RunDisabled=type("RunDisabled", (), {}))
    stub(monkeypatch, "wandb.wandb_run", Run=FakeRun)
    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", True)
    return made


class FakeClient:
    """An MLflow server."""

    def __init__(self, uri) -> None:
        self.uri, self.runs, self.batches = uri, [], []

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name, lifecycle_stage="active")

    def create_run(self, experiment_id, tags):
        self.runs.append((experiment_id, tags))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id"))

    def log_batch(self, run_id, metrics=(), params=()):
        self.batches += [*metrics, *params]


@pytest.fixture
def mlflow_stub(monkeypatch) -> None:
    """A stub of mlflow."""
    entry = types.SimpleNamespace
    stub(monkeypatch, "mlflow", set_tracking_uri=lambda uri: None)
    stub(monkeypatch, "mlflow.tracking", MlflowClient=FakeClient)
    stub(monkeypatch, "mlflow.entities", Param=entry, Metric=entry)
    stub(monkeypatch, "mlflow.utils")
    stub(monkeypatch, "mlflow.utils.mlflow_tags", MLFLOW_RUN_NAME="run")
    monkeypatch.setattr(lightning_mlflow, "_MLFLOW_AVAILABLE", True)
    monkeypatch.setattr(lightning_mlflow, "_get_resolve_tags", lambda: lambda tags: tags)


def test_a_missing_package_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("subtoken_train.cli.loggers.find_spec", lambda package: None)
    for name in ("wandb", "mlflow"):
        words = f"trainer.logger {name} needs the package {name}; 'pip install {name}' adds it"
        assert refused(capsys, "fit", *argv(name, tmp_path / "run")) == words
    assert not (tmp_path / "run").exists()


def begin(cli: RecipeCLI, step: int = 3) -> None:
    """What a fit says first to all its loggers, and a loss."""
    next(each for each in cli.trainer.callbacks if isinstance(each, LogRecipe)).on_fit_start(cli.trainer, cli.model)
    for logger in cli.trainer.loggers:
        logger.log_metrics({"train/loss": 0.5}, step=step)


def test_wandb_gets_the_recipe_and_the_metrics_beside_csv_and_tensorboard(wandb_runs, tmp_path, monkeypatch):
    cli = RecipeCLI(argv("wandb", tmp_path / "mine"))
    kinds = ["CSVLogger", "SortedTensorBoard", "WandbLogger"]
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == kinds
    with monkeypatch.context() as patch:
        patch.setattr(rank_zero_only, "rank", 1)
        begin(cli)
        assert wandb_runs == []  # only the first process makes a run
        assert not (tmp_path / "mine").exists()
    cli = RecipeCLI(argv("wandb", tmp_path / "mine"))
    begin(cli)
    (run,) = wandb_runs
    settings = {"name": "mine", "project": "subtoken_train", "dir": str(tmp_path / "mine" / "logs")}
    assert settings.items() <= run.settings.items()
    assert run.recipe["model"]["routing"]["kept_groups"] == 4
    assert run.logged == [{"train/loss": 0.5, "trainer/global_step": 3}]


def test_mlflow_gets_the_recipe_and_the_metrics(mlflow_stub, tmp_path):
    cli = RecipeCLI(argv("mlflow", tmp_path / "mine"))
    logger = cli.trainer.loggers[-1]
    begin(cli)
    client = logger.experiment
    assert client.runs == [("subtoken_train", {"run": "mine"})]
    noted = {entry.key: entry.value for entry in client.batches}
    assert (noted["model/routing/kept_groups"], noted["train/loss"]) == ("4", 0.5)


def test_a_run_that_replaces_another_begins_its_logs_anew(tmp_path):
    (tmp_path / "mine" / "logs" / "csv").mkdir(parents=True)
    parts = [run_loggers(None, tmp_path / "mine", anew)[0].log_dir for anew in (True, False)]
    assert parts == [f"{tmp_path}/mine/logs/{name}" for name in ("csv", "csv-2")]


def test_what_a_recipe_says_itself_stays(wandb_runs, tmp_path):
    own = [f"--trainer.logger={{wandb: {{name: other, save_dir: {tmp_path}}}}}"]
    logger = RecipeCLI([*argv("wandb", tmp_path / "mine"), *own]).trainer.loggers[-1]
    assert (logger._wandb_init["name"], logger._wandb_init["dir"]) == ("other", str(tmp_path))


@pytest.mark.parametrize("given", [None, True, "mlflow", ["mlflow", {"mine": {"save_dir": "x"}}]])
def test_ours_come_first_and_the_given_ones_after_them(mlflow_stub, monkeypatch, tmp_path, given):
    monkeypatch.setitem(KINDS["logger"].names._classes, "mine", CSVLogger)  # as another package's entry point
    found = [type(logger) for logger in run_loggers(given, tmp_path, False)]
    own = {"mlflow": [MLFlowLogger]}.get(given, []) if not isinstance(given, list) else [MLFlowLogger, CSVLogger]
    assert found == [CSVLogger, SortedTensorBoard, *own]
    assert run_loggers(False, tmp_path, False) == []


def test_without_tensorboard_the_csv_log_stays_and_the_other_is_named(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    monkeypatch.setattr("subtoken_train.cli.loggers.rank_zero_info", said.append)
    assert [type(logger) for logger in run_loggers(None, tmp_path, False)] == [CSVLogger]
    assert said[0].startswith("left out: TensorBoard's log, beside")
    assert "pip install 'subtoken_train[tensorboard]'" in said[0]


def test_a_resumed_run_keeps_its_csv_logs(tmp_path):
    for number, name in enumerate(["csv", "csv-2", *[f"csv-{i}" for i in range(3, 11)]]):
        (logger, _) = run_loggers(None, tmp_path, False)
        assert Path(logger.log_dir).name == name
        logger.log_metrics({"a": number}, step=number)
        logger.save()
    assert [path.parent.name for path in csv_parts(tmp_path)] == ["csv", *[f"csv-{i}" for i in range(2, 11)]]


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
