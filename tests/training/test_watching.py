"""What a run shows, on one short fit: every tag that docs/watching.md names, and nothing that it does not name."""

import csv
import math
import re
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import OVERVIEW
from tests.support.helpers import drawn_llava
from tests.support.run_folders import adapter_tensors, same_tensors
from tests.support.training_memory import tiny_fit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"
LAYERS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two fits with dropout that differ in the evaluation only: ``watched`` has one, and validation; the folder."""
    folder = tmp_path_factory.mktemp("watching")
    argv = tiny_fit(folder, drawn_llava(LAYERS))
    dev = folder / "scenes" / "dev.json"
    dropout = ["--model.lora.dropout=0.1", "--trainer.log_every_n_steps=2"]
    task = [
        f"--evaluation.data={dev}",
        "--evaluation.every_n_steps=3",
        "--evaluation.limit=6",
        "--evaluation.max_new_tokens=3",
    ]
    validation = [f"--data.val_file={dev}", "--trainer.val_check_interval=3", "--trainer.num_sanity_val_steps=0"]
    assert main(argv(*dropout, *task, *validation, output="watched")) == 0
    assert main(argv(*dropout, output="plain")) == 0
    return folder


@pytest.fixture(scope="module")
def events(runs) -> EventAccumulator:
    events = EventAccumulator(str(runs / "watched" / "logs" / "tb"))
    events.Reload()
    return events


def names(events: EventAccumulator) -> set[str]:
    """The names of what TensorBoard has, without what makes it sort them."""
    return {re.sub(r"^\d_(overview/)?", "", tag) for tag in events.Tags()["scalars"]}


def rows(run: Path) -> list[dict[str, float]]:
    """What was logged at each step, the rows of one step together."""
    steps: dict[float, dict[str, float]] = {}
    with (run / "logs" / "csv" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            found = {name: float(value) for name, value in row.items() if value}
            steps.setdefault(found["step"], {}).update(found)
    return [steps[step] for step in sorted(steps)]


def documented() -> set[str]:
    """The tags of the page's table, ``layer_N`` for every layer."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- tags:start -->")[2].partition("<!-- tags:end -->")[0]
    first_cells = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    return {tag for cell in first_cells for tag in re.findall(r"`([^`]+)`", cell)}


def test_the_page_names_the_tags_that_a_run_writes(events):
    written = {re.sub(r"layer_\d+", "layer_N", tag) for tag in names(events)}
    kinds = {tag for tag in written if tag.startswith("eval/")} - {"eval/accuracy"}
    assert kinds  # one per kind of question; the page speaks of eval/KIND
    assert written - kinds == documented()


def test_values_are_what_they_say(runs):
    panels = [row for row in rows(runs / "watched") if "tokens_per_s/after" in row]
    assert [row["step"] for row in panels] == [1, 3, 5]  # logging steps only; Lightning counts from 0
    for row in panels:
        assert row["train/kept_visual_fraction"] == 0.25
        assert row["train/kv_fraction"] == 0.25 * (1 + 4 / 16) / 2
        assert row["tokens_per_s/before"] > row["tokens_per_s/after"] > 0
        for layer in range(LAYERS):
            assert 0 <= row[f"mask_entropy/layer_{layer}"] <= 1
            assert 0.9 < row[f"router_entropy/layer_{layer}"] <= 1
            assert 1 / 16 <= row[f"group_usage_max/layer_{layer}"] <= 1 / 4 + 1e-6
        parts = [value for name, value in row.items() if re.match(r"gradient_norm/.*/layer_", name)]
        assert row["gradient_norm/total"] == pytest.approx(math.hypot(*parts), rel=1e-4)
    # the schedule warms up over 30 steps to 3e-3; the rate is that of the next step
    assert panels[0]["learning_rate/lora"] == pytest.approx(3e-3 * 3 / 30)


def test_an_evaluation_is_logged_at_its_own_step(runs):
    found = [row for row in rows(runs / "watched") if "eval/accuracy" in row]
    assert [row["step"] for row in found] == [2, 5]
    assert all(0 <= row["eval/accuracy"] <= 1 for row in found)


@pytest.mark.slow
def test_training_is_bit_equal_with_and_without_an_evaluation(runs):
    first, second = (adapter_tensors(runs / name / "adapter") for name in ("watched", "plain"))
    assert all(tensor.any() for name, tensor in first.items() if "lora_B" in name)  # it did train
    assert same_tensors(first, second)
    losses = [[row["train/loss"] for row in rows(runs / name) if "train/loss" in row] for name in ("watched", "plain")]
    assert losses[0] == losses[1]


def test_the_recipe_is_in_every_logger(runs, events):
    recipe = yaml.safe_load((runs / "watched" / "recipe.yaml").read_text())
    for log in ("csv", "tb"):
        noted = yaml.safe_load((runs / "watched" / "logs" / log / "hparams.yaml").read_text())
        assert noted["model"] == recipe["model"]
        assert noted["evaluation"] == recipe["evaluation"]
    assert events.Tags()["tensors"] == ["recipe/text_summary"]


def test_tensorboard_opens_on_what_matters(events):
    """Its first page sorts tags by name and opens the first two groups, a group being what stands before a slash."""
    tags = sorted(events.Tags()["scalars"])
    groups = list(dict.fromkeys(tag.split("/")[0] for tag in tags))
    first = {tag.partition("/")[2] for tag in tags if tag.startswith(f"{groups[0]}/")}
    assert first == {*OVERVIEW}
    assert groups[-1] == "4_gradient_norm"
