"""Kill a training run again and again, restart it each time, and compare it with a run that was left alone.

The embedded VLM with LoRA dropout, accumulation over two micro-batches and two data-loading workers. At the end the
weights, the optimiser and the log of consumed samples must be equal, bit for bit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.places import ROOT
from tests.support.run_server import RunServer

TIMEOUT = 600  # seconds that one run may take


@dataclass
class Kill:
    """How a run ended before its time.

    Attributes:
        kind: ``random`` (SIGKILL from outside) or ``writing`` (SIGKILL half-way through a checkpoint's file).
        batches: micro-batches that the run's own log held when it ended.
        resumed_from: optimiser step of the checkpoint that the next run goes on from; None: none was whole yet.
        left_behind: names of folders that are not checkpoints.
    """

    kind: str
    batches: int
    resumed_from: int | None
    left_behind: list[str]


@dataclass
class Scene:
    """A folder with data, and the settings of its runs.

    Attributes:
        folder: holds ``scenes/`` and the runs.
        steps: optimiser steps of a run.
        batch_size: records of a micro-batch.
    """

    folder: Path
    steps: int
    batch_size: int = 4

    def argv(self, run: str, *extra: str) -> list[str]:
        settings = (
            "--data.num_workers=2 --model.lora.dropout=0.1 --model.optimizer.warmup_steps=2 "
            "--trainer.accumulate_grad_batches=2 --trainer.log_every_n_steps=1 --trainer.enable_model_summary=false "
            "--trainer.callbacks=samples --checkpoint.every_n_train_steps=1 "
            f"--data.batch_size={self.batch_size} --trainer.max_steps={self.steps}"
        ).split()
        places = {
            "config": ROOT / "recipes/tiny_fastv25_s16k4.yaml",
            "model.backbone.path": ROOT / "checkpoints/tiny-llava",
            "data.train_file": self.folder / "scenes/train.json",
            "output_dir": self.folder / run,
        }
        return ["fit", *(f"--{key}={path}" for key, path in places.items()), *settings, *extra]

    def samples(self, run: str) -> list[list[str]]:
        """Ids of the records of every consumed micro-batch, in order; a line that is being written does not count."""
        path = self.folder / run / "logs/samples-rank0.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["ids"] for line in lines if line.endswith("\n")]

    def restart(self, run: str) -> list[str]:
        """The command that goes on with a run, or starts it where no checkpoint is whole yet."""
        return self.argv(run, "--resume") if self.newest(run) else self.argv(run)

    def newest(self, run: str) -> Path | None:
        from subtoken_train.training.checkpoints import newest_complete

        return newest_complete(self.folder / run / "checkpoints")

    def ended(self, run: str, kind: str) -> Kill:
        """What a run that was ended left behind."""
        from subtoken_train.training.checkpoints import incomplete, read_marker

        newest = self.newest(run)
        names = [folder.name for folder in incomplete(self.folder / run / "checkpoints")]
        return Kill(kind, len(self.samples(run)), read_marker(newest).step if newest else None, names)


def complete_run(server: RunServer, scene: Scene, run: str) -> None:
    server.start(scene.restart(run))
    if code := server.wait():
        raise RuntimeError(f"{run} ended with {code}:\n{server.log.read_text()}")


def kill_at(server: RunServer, scene: Scene, run: str, batch: int, delay: float) -> Kill:
    """SIGKILL ``delay`` seconds after micro-batch ``batch`` has begun."""
    pid = server.start(scene.restart(run))
    wait_until(lambda: len(scene.samples(run)) > batch, server)
    time.sleep(delay)
    os.kill(pid, 9)
    if (code := server.wait()) not in (-9, 0):  # 0: it was finished sooner
        raise RuntimeError(f"{run} ended with {code}:\n{server.log.read_text()}")
    return scene.ended(run, "random")


def kill_writing(server: RunServer, scene: Scene, run: str, nth: int = 2) -> Kill:
    """Let a run die half-way through the file of its ``nth`` checkpoint."""
    server.start(scene.restart(run), die_writing=nth)
    if (code := server.wait()) != -9:
        raise RuntimeError(f"{run} ended with {code}:\n{server.log.read_text()}")
    return scene.ended(run, "writing")


def wait_until(condition: Callable[[], bool], server: RunServer) -> None:
    """Wait for a run to come so far."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(server.log.read_text())
        time.sleep(0.005)


def differences(scene: Scene, first: str, second: str) -> list[str]:
    """What is not equal, bit for bit, in two finished runs; empty: they are the same."""
    found = []
    for name in ("adapter_model.safetensors", "router.safetensors"):
        if (scene.folder / first / "adapter" / name).read_bytes() != (
            scene.folder / second / "adapter" / name
        ).read_bytes():
            found.append(name)
    states = [_state(scene, run) for run in (first, second)]
    found += [
        key for key in ("state_dict", "optimizer_states", "lr_schedulers") if not _equal(*(s[key] for s in states))
    ]
    if scene.samples(first) != scene.samples(second):
        found.append("samples")
    return found


def _state(scene: Scene, run: str) -> dict[str, Any]:
    newest = scene.newest(run)
    assert newest is not None
    state: dict[str, Any] = torch.load(newest / "state.ckpt", weights_only=True)
    return state


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
