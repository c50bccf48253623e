"""What the programs that pre-train the embedded models share: a seeded run that resumes, its log and its schedule."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def attention_fp32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """SDPA in fp32 under any autocast."""
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **kwargs)


def warmed_cosine(step: int, first: int, last: int, warmup: int) -> float:
    """Share of the peak rate, from 0 at step ``first`` over a linear warm-up, to 0.02 at step ``last``."""
    progress = (step - first) / max(1, last - first)
    return min(1.0, (step + 1 - first) / warmup) * (0.5 * (1 + math.cos(math.pi * progress)) + 0.02)


def save_atomically(state: dict[str, object], path: Path) -> None:
    """Write a torch file so that a crash leaves the old one whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def parse_arguments(
    description: str, *, out: str, steps: int, batch_size: int, learning_rate: float, reads: str | None = None
) -> argparse.Namespace:
    """The options of a pre-training program; makes the work folder and registers the ``fp32`` attention.

    ``reads``: what ``--source`` holds, for a program that reads files; None: there is no such option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    if reads is not None:
        parser.add_argument("--source", type=Path, required=True, help=reads)
    parser.add_argument("--work", type=Path, required=True, help="state and log of this run; a second call resumes")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    AttentionInterface.register("fp32", attention_fp32)
    AttentionMaskInterface.register("fp32", sdpa_mask)
    return args


class PretrainingRun(ABC):
    """A run's state: modules, optimiser, step and seconds; lives in ``args.work`` and goes on from there."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.file = args, args.work / "state.pt"
        self.step, self.seconds = 0, 0.0
        self.progress: dict[str, float] = {}  # what else a run must remember
        state = torch.load(self.file, weights_only=True) if self.file.exists() else None
        if state is not None:
            self.step, self.seconds, self.progress = state["step"], state["seconds"], state["progress"]
        self.modules = self.build()
        self.new_optimizer()
        if state is not None:
            for name, module in self.modules.items():
                module.load_state_dict(state[name])
            self.optimizer.load_state_dict(state["optimizer"])
        self.clock = time.perf_counter()

    @abstractmethod
    def build(self) -> dict[str, nn.Module]:
        """What is trained, by name, as it is at ``self.step``; ``model`` is what the program is for."""

    @abstractmethod
    def train_step(self) -> dict[str, float]:
        """One optimiser step by way of ``update``; returns the losses by name."""

    @abstractmethod
    def evaluate(self) -> dict[str, object]:
        """Dev figures for the log."""

    def new_optimizer(self) -> None:
        """AdamW over everything in ``modules``."""
        self.parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )

    def update(self, loss: Tensor, scale: float) -> None:
        """Backward, clipping, and one optimiser step at ``scale`` times the peak learning rate."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def train(self) -> None:
        """Train to ``args.steps``; logs the losses every 50 steps, dev figures with each written state."""
        parameters = sum(parameter.numel() for parameter in self.modules["model"].parameters())
        print(f"{parameters:,} parameters, step {self.step}", flush=True)
        while self.step < self.args.steps:
            losses = self.train_step()
            if self.step % 50 == 0:
                print(f"step {self.step}", *(f"{name} {loss:.3f}" for name, loss in losses.items()), flush=True)
            if self.step % self.args.save_every == 0 or self.step == self.args.steps:
                self._save()

    def _save(self) -> None:
        """Log dev figures, write the state atomically."""
        seconds = round(self.seconds + time.perf_counter() - self.clock)
        record = {"step": self.step, "seconds": seconds, "dev": self.evaluate()}
        print(json.dumps(record), flush=True)
        with (self.args.work / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        state = {name: module.state_dict() for name, module in self.modules.items()}
        state |= {"optimizer": self.optimizer.state_dict(), "progress": self.progress}
        save_atomically(state | {"step": self.step, "seconds": seconds}, self.file)
