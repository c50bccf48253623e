"""A run's loggers, what its logs hold, and the picture that is drawn of them; no adapter is lost for it."""

import io
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image

from subtoken_train.artifact.whole_folder import PICTURE_FILE
from subtoken_train.cli.fit_course import csv_parts, draw_run, logged, picture_of_run, scores_beside_anchor
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import OVERVIEW, RecipeCLI, SortedTensorBoard, run_loggers, tensorboard_tag
from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.errors import pip_line
from subtoken_train.training.panels.run_progress import LogRecipe
from tests.support.commands import refused
from tests.support.places import RECIPES, recipe
from tests.support.training_memory import tiny_fit

WIDTH = 440


def run(folder: Path, rows: dict[str, list[float]], part: str = "csv", task: str = "dev.json") -> Path:
    """A run's folder with a log: one row per step, and a recipe that names the evaluation's data."""
    log = folder / "logs" / part / "metrics.csv"
    log.parent.mkdir(parents=True)
    table = {"step": range(len(next(iter(rows.values())))), **rows}
    lines = [",".join(map(str, row)) for row in [tuple(table), *zip(*table.values(), strict=True)]]
    log.write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(f"evaluation: {{data: {task}}}\n")
    return folder


def size(picture: bytes | None) -> tuple[int, int]:
    assert picture is not None
    with Image.open(io.BytesIO(picture)) as image:
        assert image.format == "PNG"
        return image.size


@pytest.mark.parametrize(
    ("rows", "charts"),
    [
        ({"train/loss": [2.0, 1.0], "group_usage_entropy/layer_0": [1.0, 0.9], "eval/accuracy": [0.1, 0.2]}, 3),
        ({"train/loss": [float("nan")] * 2, "group_usage_entropy/layer_0": [float("nan"), 1.0]}, 2),
    ],
    ids=["all", "diverged"],
)
def test_a_chart_for_each_thing_that_was_logged(tmp_path, rows, charts):
    assert size(draw_run(run(tmp_path / "run", rows))) == (WIDTH * charts, 300)


def test_what_is_not_there_is_not_drawn_and_what_cannot_be_drawn_is_said(tmp_path, capsys):
    assert picture_of_run(tmp_path) is None
    assert picture_of_run(run(tmp_path / "run", {"epoch": [0.0]})) is None
    assert capsys.readouterr().err == ""
    assert picture_of_run(run(tmp_path / "odd", {"train/loss": ["much"]})) is None
    assert capsys.readouterr().err == "no picture of the training: could not convert string to float: 'much'\n"


def test_the_anchor_stands_beside_its_run_where_it_answered_the_same(tmp_path):
    routed = run(tmp_path / "mine", {"eval/accuracy": [0.1, 0.2]})
    assert list(scores_beside_anchor(routed, logged(routed))) == ["this run"]
    anchor = run(tmp_path / "mine_anchor", {"eval/accuracy": [0.3, 0.4]})
    run(tmp_path / "mine_anchor", {"eval/accuracy": [0.5]}, part="csv-2")  # of the step that was done again
    assert scores_beside_anchor(routed, logged(routed)) == {"this run": {0: 0.1, 1: 0.2}, "anchor": {0: 0.5, 1: 0.4}}
    assert list(scores_beside_anchor(anchor, logged(anchor))) == ["this run", "routed run"]
    (anchor / "recipe.yaml").write_text("evaluation: {data: other.json}\n")
    assert list(scores_beside_anchor(routed, logged(routed))) == ["this run"]
    assert scores_beside_anchor(anchor, {}) == {}


@pytest.mark.slow
def test_fit_leaves_it_beside_the_adapter_and_on_the_card_and_export_takes_it_along(tiny_family, tmp_path):
    assert main(tiny_fit(tmp_path, tiny_family)("--trainer.max_steps=2")) == 0
    adapter, out = tmp_path / "run" / "adapter", tmp_path / "out"
    picture = (adapter / PICTURE_FILE).read_bytes()
    assert size(picture) == (2 * WIDTH, 300)  # loss and groups; nothing was evaluated midway
    assert f"]({PICTURE_FILE})" in (adapter / "README.md").read_text()
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert (out / PICTURE_FILE).read_bytes() == picture
    assert f"]({PICTURE_FILE})" in (out / "README.md").read_text()
    (adapter / PICTURE_FILE).write_text("no picture")
    assert main(["export", str(adapter), str(out), "--overwrite"]) == 0
    assert not (out / PICTURE_FILE).exists()
    assert PICTURE_FILE not in (out / "README.md").read_text()


def argv(name: str, folder: Path, *more: str) -> list[str]:
    overlay = RECIPES / "logging" / f"{name}.yaml"
    return ["--config", str(recipe("tiny_fastv25_s16k4")), "--config", str(overlay), "--output_dir", str(folder), *more]


class Remote(DummyLogger):
    """A service's logger: what it was made with, and which recipe it was told."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.settings, self.told = settings, []

    def log_hyperparams(self, params) -> None:
        self.told.append(params)


def test_a_missing_package_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("subtoken_train.cli.recipe.find_spec", lambda package: None)
    for name in ("wandb", "mlflow"):
        words = f"trainer.logger {name} needs the package {name}; 'pip install {name}' adds it"
        assert refused(capsys, "fit", *argv(name, tmp_path / "run")) == words
    assert not (tmp_path / "run").exists()


def test_a_service_gets_the_recipe_beside_csv_and_tensorboard(monkeypatch, tmp_path):
    monkeypatch.setattr("subtoken_train.cli.recipe.find_spec", lambda package: True)
    for name, settings in (
        ("wandb", {"name": "mine", "project": "subtoken_train", "save_dir": str(tmp_path / "mine" / "logs")}),
        ("mlflow", {"run_name": "mine", "experiment_name": "subtoken_train"}),
    ):
        monkeypatch.setitem(KINDS["logger"].names._classes, name, Remote)
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


def test_without_tensorboard_the_csv_log_stays_and_the_other_is_named(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    monkeypatch.setattr("subtoken_train.cli.recipe.rank_zero_info", said.append)
    assert [type(logger) for logger in run_loggers(None, tmp_path, False)] == [CSVLogger]
    assert said[0].startswith("left out: TensorBoard's log, beside")
    assert pip_line("tensorboard") in said[0]


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
