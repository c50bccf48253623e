"""One of two processes of a run in which something happens to one of them; argument: a folder. Run by a test."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from subtoken_train.training.checkpoints import newest_complete, state_path
from subtoken_train.training.run_checkpoints import RandomState, RunStopped
from tests.support.toy_fit import At, Toy, fit_toy, send


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
