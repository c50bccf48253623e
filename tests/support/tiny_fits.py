"""Short fits of the real command: random backbone on disk, a handful of scenes, settings that train in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.families.family import Family
from tests.support.helpers import save_backbone
from tests.support.places import recipe

RECIPE = recipe("tiny_fastv25_s16k4")


def tiny_fit(folder: Path, family: Family) -> Callable[..., list[str]]:
    """Write backbone and scenes; a function from extra arguments to the argv of a short fit under ``folder``."""
    save_backbone(family, folder / "backbone")
    write_scenes(folder / "scenes", train=48, dev=10, test=10)

    def argv(*extra: str, output: str = "run") -> list[str]:
        return [
            "fit",
            "--config",
            str(RECIPE),
            f"--model.backbone.path={folder / 'backbone'}",
            f"--data.train_file={folder / 'scenes' / 'train.json'}",
            "--data.batch_size=8",
            "--trainer.max_steps=6",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            f"--output_dir={folder / output}",
            *extra,
        ]

    return argv
