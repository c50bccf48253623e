"""Overlays say what strategy they are, go on top of any recipe, and keep a paper recipe's records per step."""

from __future__ import annotations

import re

import yaml

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.training.preflight import count_devices
from tests.support.places import RECIPES, recipe
from tests.support.sampling import sampled

OVERLAYS = sorted((RECIPES / "strategy").glob("*.yaml"))
PAPER = recipe("llava7b_fastv25_s16k4")


def test_every_strategy_has_an_overlay():
    assert {path.stem for path in OVERLAYS} - {"slurm"} == set(KINDS["strategy"].names) - {"auto"}


@sampled("path", OVERLAYS, every=4, ids=lambda path: path.stem)
def test_an_overlay_on_a_recipe(path):
    text = path.read_text()
    assert text.startswith("# overlay · ")
    assert f"recipes/strategy/{path.stem}." in text
    assert list(yaml.safe_load(text)) == ["trainer"]
    plain = RecipeCLI(["--config", str(PAPER)]).config
    laid_over = RecipeCLI(["--config", str(PAPER), "--config", str(path)]).config
    assert laid_over.trainer.strategy == ("ddp" if path.stem == "slurm" else path.stem)
    assert laid_over.model == plain.model

    def records(config) -> int:
        trainer = config.trainer
        processes = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
        return processes * config.data.batch_size * trainer.accumulate_grad_batches

    assert records(laid_over) == records(plain)


def test_the_batch_script_starts_what_its_overlay_says():
    script = (RECIPES / "strategy" / "slurm.sbatch").read_text()
    trainer = yaml.safe_load((RECIPES / "strategy" / "slurm.yaml").read_text())["trainer"]
    asked = {name: int(value) for name, value in re.findall(r"#SBATCH --([\w-]+)=(\d+)\n", script)}
    assert asked["nodes"] == trainer["num_nodes"]
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == trainer["devices"]
