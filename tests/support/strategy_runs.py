"""The same tiny run on one process and on several."""

import csv
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from subtoken_train.training.checkpoints import state_path
from tests.support.cpu_fit import run_fit
from tests.support.places import recipe
from tests.support.run_folders import adapter_tensors

RECIPE = recipe("tiny_fastv25_s16k4")
GLOBAL_BATCH = 4
SETTINGS = (
    "--data.group_by_length=false --model.optimizer.warmup_steps=0 --trainer.gradient_clip_val=0.5 "
    "--trainer.log_every_n_steps=1 --trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
).split()


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
        return adapter_tensors(self.folder / "adapter")

    def state(self, step: int) -> Path:
        """The checkpoint after a step, as ``trainer.save_checkpoint`` wrote it."""
        return state_path(self.folder / "checkpoints" / f"step-{step}")


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

    def argv(self, output: str, *extra: str, strategy: str | None = None) -> list[str]:
        """The command line of a run, as it is on any number of processes, with a strategy's shipped overlay."""
        overlay = [] if strategy is None else ["--config", str(RECIPE.parent / "strategy" / f"{strategy}.yaml")]
        places = {"model.backbone.path": "backbone", "data.train_file": "mixed.json", "data.image_folder": "scenes"}
        named = [f"--{key}={self.folder / name}" for key, name in {**places, "output_dir": output}.items()]
        return ["fit", "--config", str(RECIPE), *overlay, *SETTINGS, *named, *extra]

    def fit(self, strategy: str, output: str, *extra: str, processes: int = 2, torchrun: bool = False) -> Run:
        """Train in processes of their own; the global batch is the same for any number of them."""
        argv = self.argv(output, f"--data.batch_size={GLOBAL_BATCH // processes}", *extra, strategy=strategy)
        done = run_fit(argv, processes, torchrun)
        assert done.returncode == 0, done.stdout[-4000:]
        return Run(self.folder / output)

    def resume(self, strategy: str, stopped: Run, step: int, output: str, *extra: str) -> Run:
        """Go on, in a folder of its own, from a checkpoint of another run."""
        checkpoints = self.folder / output / "checkpoints"
        shutil.copytree(stopped.folder / "checkpoints" / f"step-{step}", checkpoints / f"step-{step}")
        return self.fit(strategy, output, *extra, "--resume")

    def reference(self, name: str, *extra: str) -> Run:
        """The run of one process, here."""
        from subtoken_train.cli.main import main

        if not (self.folder / name).exists():
            assert main([*self.argv(name, f"--data.batch_size={GLOBAL_BATCH}"), *extra]) == 0
        return Run(self.folder / name)
