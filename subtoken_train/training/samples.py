"""A log of the records that training consumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from subtoken_train.documents import read_text
from subtoken_train.outputs import room_for, write_whole


class SampleLog(Callback):
    """Writes the ids of every micro-batch to ``logs/samples-rank<rank>.jsonl``, one line each.

    A resumed run first drops the lines that its checkpoint does not contain, since it will see those records again: the
    file always lists what made the present weights, in order. Off unless a recipe asks for it:
    ``trainer.callbacks: samples``.
    """

    def __init__(self) -> None:
        self._path = Path()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the lines up to the checkpoint's place."""
        logs = Path(trainer.strategy.broadcast(trainer.default_root_dir)) / "logs"  # process 0 says where
        logs.mkdir(parents=True, exist_ok=True)
        self._path = logs / f"samples-rank{trainer.global_rank}.jsonl"
        lines = read_text(self._path, sys.maxsize).splitlines(keepends=True) if self._path.exists() else []
        kept = lines[: self._consumed(trainer)]
        write_whole(self._path, "".join(kept))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add a line: number of the micro-batch, optimiser steps before it, ids."""
        line = {"batch": self._consumed(trainer), "step": trainer.global_step, "ids": batch[0].record_ids}
        with room_for(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _consumed(self, trainer: L.Trainer) -> int:
        untyped: Any = trainer  # Lightning does not declare its data module
        return int(untyped.datamodule.batches_consumed())
