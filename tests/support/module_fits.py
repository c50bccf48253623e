"""Fits of a module on a data module by a bare trainer of Lightning, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def fit(
    module: L.LightningModule,
    data: L.LightningDataModule,
    callback: L.Callback | None = None,
    checkpoint: Path | None = None,
    **limits: Any,
) -> L.Trainer:
    """Fit, three epochs unless limits say otherwise; nothing is printed, logged or saved."""
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[callback] if callback else [],
        **(limits or {"max_epochs": 3}),
    )
    trainer.fit(module, data, ckpt_path=checkpoint)
    return trainer
