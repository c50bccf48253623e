"""``subtoken-train`` with the strategies that CPU tests can run; a program that tests start, and that starts its ranks.

``continue CHECKPOINT --config ...`` goes on from a checkpoint and writes the adapter.

The ZeRO strategy here is the shipped class without its one check that refuses CPUs.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.training.strategies import PRESETS, ZeroStrategy

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 400
"""Seconds; a run takes ten on an idle machine."""
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""Stage 3 keeps small tensors whole, and in a tiny model all are small."""


class CpuZeroStrategy(ZeroStrategy):
    def check_accelerator(self) -> None:
        """Refuse nothing; and let DeepSpeed compile nothing: its shared-memory collectives give way to gloo's."""
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def mix_kinds() -> None:
    """Draw records as if all were of one kind, so that a step has text on one process and images on another.

    The shipped order never does; a strategy must not hang where another data module does.
    """
    from subtoken_train.datasets.datamodule import InstructionDataModule

    InstructionDataModule.sizes = lambda self, records: None


def run_fit(argv: list[str], processes: int = 1, torchrun: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command line on so many processes, gloo, one thread each; nothing is left running."""
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own}
    spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if torchrun else []
    start = [sys.executable, *spread, __file__]
    command = [*start, *argv, f"--trainer.devices={processes}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for name, settings in PRESETS.items():
        KINDS["strategy"].names[name] = CpuZeroStrategy
        settings.update({"config": SPLIT} if settings["stage"] == 3 else {})
    from subtoken_train.cli.main import main

    mix_kinds()
    sys.exit(main())
