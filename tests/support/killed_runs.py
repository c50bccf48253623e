"""Kill a training run again and again, restart it each time, and compare it with a run that was left alone.

Every run is a process in a session of its own. It may be told to die by its own hand in the middle of writing a
checkpoint, where no outside signal hits reliably.

The embedded VLM with LoRA dropout, accumulation over two micro-batches and two data-loading workers. At the end the
weights, the optimiser and the log of consumed samples must be equal, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.places import ROOT

TIMEOUT = 600  # seconds that one run may take


class RunServer:
    """Starts one run at a time, in a session of its own, which prints into ``log``; use it in a ``with`` block."""

    def __init__(self, log: Path) -> None:
        self.log, self.pid = log, 0

    def __enter__(self) -> RunServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_group()

    def start(self, argv: list[str], die_writing: int = 0) -> int:
        """Start ``subtoken-train ARGV``, which may kill itself writing its nth checkpoint; its process id."""
        command = [sys.executable, __file__, str(die_writing), *argv]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.pid = self.process.pid
        return self.pid

    def wait(self) -> int:
        """The exit code of the run, negative for a signal."""
        code = self.process.wait(TIMEOUT)
        self.kill_group()
        return code

    def kill_group(self) -> None:
        """End what is left of the run: data-loading workers outlive a kill -9 of their parent by seconds."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()
            self.pid = 0


class Kill(NamedTuple):
    """What a killed run left: the step that the next one goes on from, or None, and folders that are no checkpoints."""

    resumed_from: int | None
    left_behind: list[str]


@dataclass
class Scene:
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
            "config": ROOT / "recipes/tiny_fastv25_s16k4.yaml", "model.backbone.path": ROOT / "checkpoints/tiny-llava",
            "data.train_file": self.folder / "scenes/train.json", "output_dir": self.folder / run,
        }  # fmt: skip
        return ["fit", *(f"--{key}={path}" for key, path in places.items()), *settings, *extra]

    def samples(self, run: str) -> list[list[str]]:
        """Ids of the records of every consumed micro-batch, in order; a line that is being written does not count."""
        path = self.folder / run / "logs/samples-rank0.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["ids"] for line in lines if line.endswith("\n")]

    def restart(self, run: str) -> list[str]:
        return self.argv(run, "--resume") if self.newest(run) else self.argv(run)

    def newest(self, run: str) -> Path | None:
        from subtoken_train.training.checkpoints import newest_complete

        return newest_complete(self.folder / run / "checkpoints")

    def ended(self, run: str) -> Kill:
        from subtoken_train.training.checkpoints import incomplete, read_marker

        newest = self.newest(run)
        names = [folder.name for folder in incomplete(self.folder / run / "checkpoints")]
        return Kill(read_marker(newest).step if newest else None, names)


def complete_run(server: RunServer, scene: Scene, run: str) -> None:
    server.start(scene.restart(run))
    ends(server, run, 0)


def ends(server: RunServer, run: str, *codes: int) -> None:
    if (code := server.wait()) not in codes:
        raise RuntimeError(f"{run} ended with {code}:\n{server.log.read_text()}")


def kill_at(server: RunServer, scene: Scene, run: str, batch: int, delay: float) -> Kill:
    pid = server.start(scene.restart(run))
    wait_until(lambda: len(scene.samples(run)) > batch, server)
    time.sleep(delay)
    os.kill(pid, 9)
    ends(server, run, -9, 0)  # 0: it was finished sooner
    return scene.ended(run)


def kill_writing(server: RunServer, scene: Scene, run: str, nth: int = 2) -> Kill:
    server.start(scene.restart(run), die_writing=nth)
    ends(server, run, -9)
    return scene.ended(run)


def wait_until(condition: Callable[[], bool], server: RunServer) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(server.log.read_text())
        time.sleep(0.005)


def differences(scene: Scene, first: str, second: str) -> list[str]:
    runs = first, second
    states = [torch.load(scene.newest(run) / "state.ckpt", weights_only=True) for run in runs]
    pairs = {key: [state[key] for state in states] for key in ("state_dict", "optimizer_states", "lr_schedulers")}
    for name in ("adapter_model.safetensors", "router.safetensors"):
        pairs[name] = [(scene.folder / run / "adapter" / name).read_bytes() for run in runs]
    pairs["samples"] = [scene.samples(run) for run in runs]
    return [name for name, pair in pairs.items() if not _equal(*pair)]


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def _die_writing(nth: int) -> None:
    """Kill this process at the nth flush of a checkpoint's file, when half of its bytes are on the disk."""
    flush, seen = os.fsync, 0

    def cut_and_die(descriptor: int) -> None:
        nonlocal seen
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/.state.ckpt." in path:
            seen += 1
            if seen == nth:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = cut_and_die


if __name__ == "__main__":
    if int(sys.argv[1]):
        _die_writing(int(sys.argv[1]))
    from subtoken_train.cli.main import main

    sys.exit(main(sys.argv[2:]))
