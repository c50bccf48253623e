"""A tiny run: random backbone on disk, a handful of scenes, settings that train in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from subtoken_train.datasets.scene_files import write_scenes

from helpers import save_backbone

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_fastv25_s16k4.yaml"


@pytest.fixture
def tiny_run(tmp_path, tiny_family):
    """A function from extra arguments to the argv of a short fit under ``tmp_path``."""
    save_backbone(tiny_family, tmp_path / "backbone")
    write_scenes(tmp_path / "scenes", train=48, dev=10, test=10)

    def argv(*extra: str, output: str = "run") -> list[str]:
        return [
            "fit",
            "--config",
            str(RECIPE),
            f"--model.backbone.path={tmp_path / 'backbone'}",
            f"--data.train_file={tmp_path / 'scenes' / 'train.json'}",
            "--data.batch_size=8",
            "--trainer.max_steps=6",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            f"--output_dir={tmp_path / output}",
            *extra,
        ]

    return argv
