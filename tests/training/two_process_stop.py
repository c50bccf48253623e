"""One of two processes of a run that only the second is asked to stop; argument: a folder. Run by a test."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import torch

from subtoken_train.training.checkpoints import newest_complete, state_path
from subtoken_train.training.interrupt import TrainingInterrupted
from subtoken_train.training.rng import RandomState

from toy_fit import At, Toy, fit_toy, send


def main(folder: Path, rank: int) -> None:
    """Train unbroken, then in two parts; note the steps, the random numbers and whether the weights are the same."""
    settings = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2, "batches": 8, "every": 100}
    torch.manual_seed(rank)
    unbroken = Toy()
    fit_toy(unbroken, folder / "unbroken", RandomState(), **settings)
    torch.manual_seed(rank)
    parts, signals = Toy(), [At(2, send(signal.SIGTERM))] if rank == 1 else []
    try:
        fit_toy(parts, folder / "parts", RandomState(), *signals, **settings)
        stopped = ""
    except TrainingInterrupted as interrupted:
        stopped = str(interrupted)
    newest = newest_complete(folder / "parts")
    torch.manual_seed(99)
    resumed = Toy()
    fit_toy(resumed, folder / "parts", RandomState(), resume=state_path(newest), **settings)
    states = torch.load(newest / "state.ckpt", weights_only=True)["random_state"]
    found = {
        "stopped": stopped,
        "newest": newest.name,
        "same": torch.equal(unbroken.layer.weight, resumed.layer.weight),
        "moved": not torch.equal(unbroken.layer.weight, Toy().layer.weight),
        "states_differ": len(states) == 2 and not torch.equal(states[0]["torch"], states[1]["torch"]),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    import os

    main(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]))
