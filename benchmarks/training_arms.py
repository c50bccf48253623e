"""The sides of ``training_cost.py``: our fit and transformers' Trainer, each a training loop that takes turns.

A loop runs in a thread of its own and hands over after every optimiser step, so that two whole training loops, with
their loaders, callbacks and loggers, take steps in turn in one process. Only one thread runs at a time.
"""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.training_cases import Case, join
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.ordered import AccumulationWindows
from subtoken_train.engine.build import assemble
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.optimizer import OptimizerConfig
from subtoken_train.types import Batch

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny" / "tiny_fastv25_s16k4.yaml"
"""For the trainer's settings alone: its callbacks and loggers are those of every recipe."""
LEARNING_RATE, CLIP, LOG_EVERY = 1e-4, 1.0, 10
Loop = Callable[[Callable[[], None]], None]
"""A training loop; calls its argument after every optimiser step."""


class Turns:
    """A loop in a thread of its own that waits after every step until ``advance`` lets it take the next one."""

    def __init__(self, loop: Loop) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Let the loop take one step, and wait for it; the first call also sets the loop up."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Let the loop end; it must have taken all its steps."""
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, loop: Loop) -> None:
        self._go.acquire()
        try:
            loop(self._pause)
        except BaseException as error:  # raised again where the turns are given
            self._error = error
            self._done.release()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()


def our_fit(
    case: Case, reducer: Reducer, routing: RoutingConfig | None, steps: int, device: str, dtype: torch.dtype
) -> Loop:
    """A fit as ``subtoken-train fit`` runs it, without validation and handlers of signals."""
    compressed, _ = assemble(case.family(device, dtype), case.lora, reducer, routing)
    rates = OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant")
    module = SubTokenModule(
        backbone=BackboneConfig(), lora=case.lora, reducer=reducer, routing=routing, optimizer=rates
    )
    module.compressed = compressed
    loader = DataLoader(case.records(case.batch_size * steps), case.batch_size, collate_fn=join)

    def loop(after_step: Callable[[], None]) -> None:
        class Handover(Callback):
            def on_train_batch_end(self, *_: object) -> None:
                after_step()

        with tempfile.TemporaryDirectory() as folder:
            trainer = _recipe_trainer(steps, device, dtype, folder)
            trainer.callbacks.append(Handover())
            trainer.fit(module, AccumulationWindows(loader, 1))

    return loop


def _recipe_trainer(steps: int, device: str, dtype: torch.dtype, folder: str) -> L.Trainer:
    settings = {
        "max_steps": steps, "accelerator": "gpu" if device.startswith("cuda") else "cpu", "devices": 1,
        "precision": "32-true" if dtype == torch.float32 else "bf16-mixed", "gradient_clip_val": CLIP,
        "log_every_n_steps": LOG_EVERY, "enable_model_summary": "false", "enable_progress_bar": "false",
    }  # fmt: skip
    words = [f"--trainer.{name}={value}" for name, value in settings.items()]
    trainer: L.Trainer = RecipeCLI(["--config", str(RECIPE), *words, f"--output_dir={folder}"]).trainer
    return trainer


def plain_trainer(case: Case, steps: int, device: str, dtype: torch.dtype) -> Loop:
    """Peft and transformers' Trainer, as their documentation shows them; nothing reduced, nothing routed."""
    model = case.model(device, dtype)
    targets = case.family("meta", dtype).lora_pattern
    lora = LoraConfig(r=case.lora.rank, lora_alpha=case.lora.alpha, lora_dropout=0.0, target_modules=targets)
    records = case.records(case.batch_size * steps)
    peft_model = get_peft_model(model, lora)

    def loop(after_step: Callable[[], None]) -> None:
        class Handover(transformers.TrainerCallback):
            def on_step_end(self, *_: object, **__: object) -> None:
                after_step()

        with tempfile.TemporaryDirectory() as folder:
            transformers.Trainer(
                model=peft_model,
                args=_plain_arguments(case, steps, device, dtype, folder),
                train_dataset=records,
                data_collator=plain_batch,
                callbacks=[Handover()],
            ).train()

    return loop


def _plain_arguments(
    case: Case, steps: int, device: str, dtype: torch.dtype, folder: str
) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=case.batch_size, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0, max_grad_norm=CLIP,
        bf16=dtype == torch.bfloat16, logging_steps=LOG_EVERY, report_to="none", save_strategy="no",
        remove_unused_columns=False, disable_tqdm=True, use_cpu=not device.startswith("cuda"),
    )  # fmt: skip


def plain_batch(records: list[Batch]) -> dict[str, Tensor]:
    """A batch as a transformers model takes it."""
    batch = join(records)
    ids = batch.input_ids_BN
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": batch.labels_BN}
    return arguments if batch.pixel_values is None else {**arguments, "pixel_values": batch.pixel_values}
