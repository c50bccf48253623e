"""Short fits: of the real command, of random tiny language models, of a module that trains in milliseconds."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.families.family import Family
from subtoken_train.training.run_checkpoints import RunCheckpoints
from tests.support.helpers import save_backbone
from tests.support.places import recipe
from tests.support.text_families import text_model

RECIPE = recipe("tiny_fastv25_s16k4")
OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
QUIET: dict[str, Any] = {"accelerator": "cpu", **OFF}
"""Of a trainer that prints, logs and saves nothing."""


def tiny_fit(folder: Path, family: Family) -> Callable[..., list[str]]:
    """Write backbone and scenes; a function from extra arguments to the argv of a short fit under ``folder``."""
    save_backbone(family, folder / "backbone")
    write_scenes(folder / "scenes", train=48, dev=10, test=10)
    settings = (
        "--data.batch_size=8 --trainer.max_steps=6 --trainer.log_every_n_steps=1 "
        "--trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
    ).split()

    def argv(*extra: str, output: str = "run") -> list[str]:
        places = {"config": RECIPE, "model.backbone.path": folder / "backbone", "output_dir": folder / output}
        places["data.train_file"] = folder / "scenes/train.json"
        return ["fit", *(f"--{name}={place}" for name, place in places.items()), *settings, *extra]

    return argv


QUEST = {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 8}
ROUTING = {"num_groups": 8, "kept_groups": 6, "query_conditioned": True, "budget": "global"}
RECALL = {"context_length": 64, "num_facts": 3, "num_questions": 2, "train_samples": 16, "batch_size": 4}
SIZES = {"hidden_size": 32, "intermediate_size": 48}


def save_language_model(folder: Path, kind: str = "llama", tokenizer: Any = None, **settings: Any) -> Path:
    torch.manual_seed(0)
    tokenizer = build_tokenizer() if tokenizer is None else tokenizer
    text_model(kind, 2, vocab_size=len(tokenizer), **{**SIZES, **settings}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text_recipe(path: Path, backbone: Path, data: dict[str, Any] = RECALL, **bands: Any) -> list[str]:
    model = {"backbone": {"path": str(backbone)}, "reducer": QUEST, "routing": ROUTING}
    model["lora"] = {"rank": 2, "alpha": 4, "dropout": 0.0}
    model["optimizer"] = {"learning_rate": 0.01, "warmup_steps": 0}
    trainer = {"accelerator": "cpu", "max_steps": 3, "enable_progress_bar": False, "enable_model_summary": False}
    whole = {"model": {**model, **bands}, "data": data, "trainer": trainer}
    path.write_text(yaml.safe_dump({**whole, "output_dir": str(path.parent / "run")}))
    return ["--config", str(path)]


def fit(
    module: L.LightningModule,
    data: L.LightningDataModule,
    callback: L.Callback | None = None,
    checkpoint: Path | None = None,
    **limits: Any,
) -> L.Trainer:
    """Fit, three epochs unless limits say otherwise; nothing is printed, logged or saved."""
    settings = QUIET | {"use_distributed_sampler": False, "num_sanity_val_steps": 0} | (limits or {"max_epochs": 3})
    trainer = L.Trainer(callbacks=[callback] if callback else [], **settings)
    trainer.fit(module, data, ckpt_path=checkpoint)
    return trainer


class Toy(L.LightningModule):
    """A linear layer under dropout; every batch is the same, so that nothing but the random state differs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(width, width), nn.Dropout(0.5)
        nn.init.ones_(self.layer.weight)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.dropout(self.layer(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.layer.parameters(), lr=0.01)


class At(Callback):
    """Calls ``action(trainer)`` at the start (or the end) of one micro-batch of the run."""

    def __init__(self, batch, action, end=False):
        self.batch, self.action, self.end = batch, action, end

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.end and trainer.fit_loop.total_batch_idx == self.batch:
            self.action(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.end and trainer.fit_loop.total_batch_idx == self.batch:
            self.action(trainer)


def send(number: int):
    return lambda trainer: os.kill(os.getpid(), number)


def fit_toy(
    module: Toy, folder: Path, *callbacks: Callback, batches: int = 6, resume=None, validate=0, every=1, **settings
) -> L.Trainer:
    """Train on ``batches`` equal micro-batches per epoch; checkpoints go to ``folder``."""
    data = [torch.ones(2, module.layer.in_features)] * batches
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, **settings}
    trainer = L.Trainer(
        logger=False, enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=str(folder.parent),
        callbacks=[*callbacks, RunCheckpoints(str(folder), every)], **settings,
    )  # fmt: skip
    validation = DataLoader(data[:validate], batch_size=None) if validate else None
    trainer.fit(module, DataLoader(data, batch_size=None), validation, ckpt_path=resume, weights_only=True)
    return trainer


def present_handlers() -> list:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
