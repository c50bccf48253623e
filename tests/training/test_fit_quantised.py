"""Fits on 4- and 8-bit backbones with paged 8-bit AdamW: the loss falls, and a resumed run ends as an unbroken one.

Every family, from the command line, on random tiny models.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from subtoken_train.cli.main import main
from tests.support.commands import refused
from tests.support.helpers import interrupted_fit, save_backbone
from tests.support.run_folders import adapter_tensors, made_run, same_tensors
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_family
from tests.support.tiny_fits import save_language_model, text_recipe

STEPS = 12
TEXT = ("llama", "qwen2")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}


@pytest.fixture
def run(tiny_run, tmp_path):
    """A function from (family, kind, folder, more arguments) to the argv of a fit."""

    def argv(family: str, kind: str, output: str, *extra: str) -> list[str]:
        if family in TEXT:
            backbone = save_language_model(tmp_path / family, family, **SIZES)
            lora = {"rank": 8, "alpha": 16, "dropout": 0.1}
            base = ["fit", *text_recipe(tmp_path / f"{family}.yaml", backbone, lora=lora)]
        else:
            base = tiny_run("--data.batch_size=4", "--data.max_length=512")
        if family == "qwen2_5_vl":
            folder = save_backbone(qwen_family(), tmp_path / "qwen")
            base += [f"--model.backbone.path={folder}", "--model.reducer.keep_ratio=0.5"]
        return [
            *base,
            f"--model.backbone.quantization={kind}",
            "--model.backbone.dtype=bfloat16",
            "--trainer.precision=bf16-mixed",
            "--model.gradient_checkpointing=true",
            "--model.optimizer.name=paged_adamw_8bit",
            "--model.optimizer.learning_rate=0.01",
            "--model.optimizer.warmup_steps=0",
            f"--trainer.max_steps={STEPS}",
            "--trainer.log_every_n_steps=1",
            f"--output_dir={tmp_path / output}",
            *extra,
        ]

    return argv


def losses(folder: Path) -> list[float]:
    """The logged training loss of every step."""
    with (folder / "logs" / "csv" / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


@sampled(
    ("family", "kind"),
    [
        ("llava", "nf4"),
        ("qwen2", "int8"),
        ("llava", "int8"),
        ("qwen2_5_vl", "nf4"),
        ("qwen2_5_vl", "int8"),
        ("llama", "nf4"),
        ("llama", "int8"),
        ("qwen2", "nf4"),
    ],
    every=8,
)
def test_the_loss_falls_and_a_stop_changes_nothing(run, tmp_path, capfd, family, kind):
    pytest.importorskip("bitsandbytes")
    assert main(run(family, kind, "whole")) == 0
    curve = losses(tmp_path / "whole")
    assert len(curve) == STEPS
    assert sum(curve[-4:]) < 0.95 * sum(curve[:4])
    assert interrupted_fit(run(family, kind, "parts"), after_step=5) == 130
    assert main(run(family, kind, "parts", "--resume")) == 0
    whole = adapter_tensors(tmp_path / "whole" / "adapter")
    assert same_tensors(whole, adapter_tensors(tmp_path / "parts" / "adapter"))
    assert all(tensor.any() for name, tensor in whole.items() if "lora_B" in name)
    said = capfd.readouterr().err
    assert not any(noise in said for noise in ("kernels", "MatMul8bitLt", "Paged optimizers"))


@pytest.mark.slow
def test_without_bitsandbytes_nothing_is_touched(run, tmp_path, monkeypatch, capsys):
    folder = made_run(tmp_path / "run")
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    assert "quantization 'int8' needs bitsandbytes" in refused(
        capsys, *run("llava", "int8", "run", "--model.optimizer.name=adamw", "--overwrite")
    )
    assert "optimizer.name 'paged_adamw_8bit' needs bitsandbytes" in refused(
        capsys, *run("llava", "none", "run", "--overwrite")
    )
    assert (folder / "adapter").is_dir()
    assert (folder / "recipe.yaml").read_text() == "old"
