"""The same tiny run on one process and on several."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subtoken_train.datasets.scene_files import write_scenes

from cpu_fit import run_fit
from helpers import save_backbone

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny_fastv25_s16k4.yaml"
GLOBAL_BATCH = 4
TEXT_ONLY = [{"from": "human", "value": "what is blue ?"}, {"from": "gpt", "value": "red 8"}]


@dataclass(frozen=True)
class Run:
    """A finished run's folder."""

    folder: Path

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(loss, balance) of every step."""
        with (self.folder / "logs" / "csv" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["train/loss"]]
        return [(float(row["train/loss"]), float(row["train/balance"])) for row in rows]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """LoRA and routers of the adapter folder."""
        files = ("adapter_model.safetensors", "router.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(self.folder / "adapter" / file).items()}


def assert_same(run: Run, reference: Run, tolerance: float = 1e-5) -> None:
    """Equal losses in every step, equal weights at the end, and none of LoRA-B where it started, at zero."""
    assert len(run.losses) == len(reference.losses)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(reference.losses), atol=tolerance, rtol=0)
    ours, theirs = run.weights, reference.weights
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=tolerance, rtol=0, msg=lambda text, name=name: name + text)
    assert all(tensor.abs().max() > 1e-3 for name, tensor in ours.items() if "lora_B" in name)


@dataclass
class Arena:
    """Data and backbone that runs share; references are made once."""

    folder: Path

    def argv(self, output: str, *extra: str) -> list[str]:
        """The command line of a run, as it is on any number of processes."""
        return [
            "fit",
            "--config",
            str(RECIPE),
            f"--model.backbone.path={self.folder / 'backbone'}",
            f"--data.train_file={self.folder / 'mixed.json'}",
            f"--data.image_folder={self.folder / 'scenes'}",
            "--data.group_by_length=false",
            "--model.optimizer.warmup_steps=0",
            "--trainer.gradient_clip_val=0.5",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            f"--output_dir={self.folder / output}",
            *extra,
        ]

    def fit(self, output: str, *extra: str, processes: int = 2, torchrun: bool = False) -> Run:
        """Train in processes of their own; the global batch is the same for any number of them."""
        batch = f"--data.batch_size={GLOBAL_BATCH // processes}"
        done = run_fit(self.argv(output, batch, *extra), processes, torchrun)
        assert done.returncode == 0, done.stdout[-4000:]
        return Run(self.folder / output)

    def reference(self, name: str, *extra: str) -> Run:
        """The run of one process, here."""
        from subtoken_train.cli.main import main

        if not (self.folder / name).exists():
            assert main([*self.argv(name, f"--data.batch_size={GLOBAL_BATCH}"), *extra]) == 0
        return Run(self.folder / name)


@pytest.fixture(scope="module")
def arena(tmp_path_factory) -> Arena:
    """Random tiny LLaVA of three layers; 22 records with an image and, at the end of batches, 22 of text only."""
    from subtoken_train.backbones.llava import LlavaFamily

    from tiny_llava import build_model, build_processor

    folder = tmp_path_factory.mktemp("arena")
    torch.manual_seed(0)
    save_backbone(LlavaFamily(build_model(text_layers=3).eval(), build_processor()), folder / "backbone")
    write_scenes(folder / "scenes", train=22, dev=10, test=10)
    records = json.loads((folder / "scenes" / "train.json").read_text())
    text = [{"id": f"text-{number}", "conversations": TEXT_ONLY} for number in range(22)]
    (folder / "mixed.json").write_text(json.dumps(records + text))
    return Arena(folder)
