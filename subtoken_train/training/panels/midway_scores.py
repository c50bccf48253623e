"""Scores in the middle of training: a small task, answered by the model as it is.

What is evaluated, and how, is a function that the command line hands in: ``training`` and ``evaluation`` do not know
each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import evaluation_mode
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, check_range
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.panels.readings import stepped, write
from subtoken_train.training.panels.throughput import Stopwatch

Evaluate = Callable[[CompressedBackbone], dict[str, float]]
"""Scores in 0..1 by name (``accuracy``, and one per kind of question) of a backbone in evaluation mode."""


@dataclass
class EvaluationConfig:
    """A small task to answer while training.

    Attributes:
        data: questions with reference answers, in LLaVA's instruction format; the last turn of each is asked.
        every_n_steps: optimiser steps between two evaluations.
        limit: only the first questions; None: all.
        image_folder: where image paths start; None: the data file's own folder.
        images_outside_folder: whether image paths may lead out of it.
        batch_size: prompts decoded together.
        max_length: prompt tokens, visual ones included.
        max_new_tokens: cap on an answer.
    """

    data: str
    every_n_steps: int = 500
    limit: int | None = 200
    image_folder: str | None = None
    images_outside_folder: bool = False
    batch_size: int = 32
    max_length: int = 2048
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "limit", "batch_size"):
            check_range(f"evaluation.{name}", getattr(self, name), 1, MAX_COUNT)
        for name in ("max_length", "max_new_tokens"):
            check_range(f"evaluation.{name}", getattr(self, name), 1, MAX_TOKENS)


class MidwayEvaluation(Callback):
    """Logs ``eval/NAME`` every so many optimiser steps.

    Weights, random state, dropout, checkpointing and the attention implementation are afterwards what they were:
    training goes on as if nothing had been asked. Under several processes each answers everything, in step with the
    others, so that sharded weights can be gathered.

    Args:
        evaluate: answers and scores.
        every_n_steps: optimiser steps between two evaluations.
        watch: is paused meanwhile.
    """

    def __init__(self, evaluate: Evaluate, every_n_steps: int, watch: Stopwatch) -> None:
        self.evaluate, self.every_n_steps, self.watch = evaluate, every_n_steps, watch

    def due(self, trainer: L.Trainer, batch_idx: int) -> bool:
        """Whether the micro-batch that just ended is followed by an evaluation."""
        return stepped(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate and log where it is time."""
        assert isinstance(pl_module, SubTokenModule)
        if not self.due(trainer, batch_idx):
            return
        parts = pl_module.parts
        decoder = parts.family.decoder.config
        attention = decoder._attn_implementation
        with self.watch.pause(), isolate_rng(), evaluation_mode(parts):
            scores = self.evaluate(parts)
        decoder._attn_implementation = attention  # generating may have wrapped it
        found = {f"eval/{name}": score for name, score in scores.items()}
        for name, score in found.items():
            pl_module.log(name, score, logger=False, prog_bar=name == "eval/accuracy")
        write(trainer, found, trainer.global_step)  # now: Lightning itself would wait for the next logging step
