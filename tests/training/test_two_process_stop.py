"""Two processes: what happens to one of them stops both at the same step; each goes on with its own random state."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from subtoken_train.training.checkpoints import newest_complete, state_path
from subtoken_train.training.run_checkpoints import RandomState, RunStopped
from tests.support.eval_runs import free_port
from tests.support.training_memory import At, Toy, fit_toy, send


@pytest.mark.slow
def test_both_stop_and_go_on_alike(tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    environment = {**os.environ, **common, "OMP_NUM_THREADS": "1"}
    environment.pop("PL_GLOBAL_SEED", None)  # of a run in this process: both would start from it
    processes = [
        subprocess.Popen([sys.executable, __file__, tmp_path], env={**environment, "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found == {
            "stopped": "SIGTERM: stopped after step 2",
            "diverged": "the loss is NaN or infinite after step 2; it was not saved",
            "failed": "the checkpoint of step 4: File too large",
            "newest": "step-2",
            "same": True,
            "moved": True,
            "states_differ": True,
        }


def reason(module: Toy, folder: Path, *callbacks: Callback, **settings: object) -> str:
    """Train, and say what ended it."""
    try:
        fit_toy(module, folder, *callbacks, **settings)
    except RunStopped as stopped:
        return str(stopped)
    return ""


def poison(trainer: L.Trainer) -> None:
    """Make this process's loss NaN."""
    trainer.lightning_module.layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))


def fill_disk(trainer: L.Trainer) -> None:
    """Let no file of this process grow beyond 100 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def main(folder: Path, rank: int) -> None:
    """Train unbroken, then in two parts; note the steps, the random numbers and whether the weights are the same."""
    settings = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2, "batches": 16, "every": 100}
    torch.manual_seed(rank)
    unbroken = Toy()
    fit_toy(unbroken, folder / "unbroken", RandomState(), **settings)
    torch.manual_seed(rank)
    signals = [At(2, send(signal.SIGTERM))] if rank == 1 else []
    stopped = reason(Toy(), folder / "parts", RandomState(), *signals, **settings)
    newest = newest_complete(folder / "parts")
    torch.manual_seed(99)
    resumed = Toy()
    fit_toy(resumed, folder / "parts", RandomState(), resume=state_path(newest), **settings)
    states = torch.load(newest / "state.ckpt", weights_only=True)["random_state"]
    broken = [At(3, poison)] if rank == 1 else []
    diverged = reason(Toy(), folder / "broken", *broken, **settings)
    full = [At(3, fill_disk)] if rank == 0 else []
    failed = reason(Toy(width=300), folder / "full", *full, **settings)
    found = {
        "stopped": stopped,
        "diverged": diverged,
        "failed": failed.partition(" could not be written")[0] + failed[-16:],
        "newest": newest.name,
        "same": torch.equal(unbroken.layer.weight, resumed.layer.weight),
        "moved": not torch.equal(unbroken.layer.weight, Toy().layer.weight),
        "states_differ": len(states) == 2 and not torch.equal(states[0]["torch"], states[1]["torch"]),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]))
