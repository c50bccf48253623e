"""A module that trains in milliseconds, for what the callbacks around training do."""

import os
import signal
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader

from subtoken_train.training.run_checkpoints import RunCheckpoints


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
    """An action that signals this process."""
    return lambda trainer: os.kill(os.getpid(), number)


def fit_toy(
    module: Toy, folder: Path, *callbacks: Callback, batches: int = 6, resume=None, validate=0, every=1, **settings
) -> L.Trainer:
    """Train on ``batches`` equal micro-batches per epoch; checkpoints go to ``folder``."""
    data = [torch.ones(2, module.layer.in_features)] * batches
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, **settings}
    trainer = L.Trainer(
        logger=False,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(folder.parent),
        callbacks=[*callbacks, RunCheckpoints(str(folder), every)],
        **settings,
    )
    validation = DataLoader(data[:validate], batch_size=None) if validate else None
    trainer.fit(module, DataLoader(data, batch_size=None), validation, ckpt_path=resume, weights_only=True)
    return trainer


def present_handlers() -> list:
    """The present handlers of the signals that a run takes over."""
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
