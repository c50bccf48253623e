"""The same tiny run on one process and on several: a program that tests start, and that starts its ranks.

``continue CHECKPOINT --config ...`` goes on from a checkpoint and writes the adapter. ZeRO is the shipped class without
its check that refuses CPUs.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.training.checkpoints import state_path
from subtoken_train.training.strategies import PRESETS, ZeroStrategy
from tests.support.places import recipe
from tests.support.run_folders import adapter_tensors, logged

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 400  # seconds; a run takes ten on an idle machine
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""Stage 3 keeps small tensors whole, and in a tiny model all are small."""


class CpuZeroStrategy(ZeroStrategy):
    def check_accelerator(self) -> None:
        """Refuse nothing; and let DeepSpeed compile nothing: its shared-memory collectives give way to gloo's."""
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def mix_kinds() -> None:
    """Draw records as if all were of one kind: a step has text on one process and images on another, and goes on."""
    from subtoken_train.datasets.datamodule import InstructionDataModule

    InstructionDataModule.sizes = lambda self, records: None


def run_fit(argv: list[str], processes: int = 1, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command line on so many processes, gloo, one thread each; nothing is left running."""
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own}
    spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if torchrun else []
    command = [sys.executable, *spread, __file__, *argv, f"--trainer.devices={processes}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)


RECIPE = recipe("tiny_fastv25_s16k4")
GLOBAL_BATCH = 4
SETTINGS = (
    "--data.group_by_length=false --model.optimizer.warmup_steps=0 --trainer.gradient_clip_val=0.5 "
    "--trainer.log_every_n_steps=1 --trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
).split()


@dataclass(frozen=True)
class Run:
    folder: Path

    @property
    def losses(self) -> list[tuple[float, float]]:
        columns = (logged(self.folder, name) for name in ("train/loss", "train/balance"))
        return list(zip(*columns, strict=True))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
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
        checkpoints = self.folder / output / "checkpoints"
        shutil.copytree(stopped.folder / "checkpoints" / f"step-{step}", checkpoints / f"step-{step}")
        return self.fit(strategy, output, *extra, "--resume")

    def reference(self, name: str, *extra: str) -> Run:
        from subtoken_train.cli.main import main

        if not (self.folder / name).exists():
            assert main([*self.argv(name, f"--data.batch_size={GLOBAL_BATCH}"), *extra]) == 0
        return Run(self.folder / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, settings in PRESETS.items():
        KINDS["strategy"].names[name] = CpuZeroStrategy
        settings.update({"config": SPLIT} if settings["stage"] == 3 else {})
    from subtoken_train.cli.main import main

    mix_kinds()
    sys.exit(main())
