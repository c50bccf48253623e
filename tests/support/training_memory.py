"""Short fits of the real command and of a module that trains in milliseconds; predicted and measured memory of steps.

Measured are live tensors (``LiveTensors``) over two optimiser steps of ``SubTokenModule``, two batches each, under
Lightning's trainer on a CPU; predicted by ``training/memory.py``. Models: the embedded VLM, and random ones of the real
classes (D = 256, F = 704, 4 layers, 8 heads, V = 2,048; Qwen shapes: 2 key-value heads; ``-32k``: V = 32,000).
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.benchmarking.rounds import LiveTensors, tensors_of
from subtoken_train.datasets.scenes import write_scenes
from subtoken_train.engine.build import assemble
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.load import load_weights
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.loss import DistillationConfig
from subtoken_train.training.memory import Step, estimate_memory
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.optimizer import OptimizerConfig
from subtoken_train.training.run_checkpoints import RunCheckpoints
from subtoken_train.types import Batch, Region
from tests.support.helpers import save_backbone
from tests.support.places import ROOT, recipe
from tests.support.text_families import text_model

RECIPE = recipe("tiny_fastv25_s16k4")
OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
QUIET: dict[str, Any] = {"accelerator": "cpu", **OFF}  # of a trainer that prints, logs and saves nothing


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


EMBEDDED = "tiny-llava"
_TEXT: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED, _WIDE = {**_TEXT, "num_key_value_heads": 2}, {**_TEXT, "vocab_size": 32000}
_VISION: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 84,
    "patch_size": 14,
}  # fmt: skip
_CLIP = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 64}
_LLAMA = {**_TEXT, "model_type": "llama"}
_TOWER = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256}
_QWEN_IDS = {"image_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6, "video_token_id": 7}


def _model(kind: str, **settings: Any) -> Any:
    kind_of = AutoModelForCausalLM if "vision_config" not in settings else AutoModelForImageTextToText
    return kind_of.from_config(AutoConfig.for_model(kind, **settings))


def _llava(text: dict[str, Any] = _LLAMA) -> Any:
    return _model("llava", vision_config={**_CLIP, "image_size": 168}, text_config=text, image_token_index=4)


def _qwen_vl(kind: str, vision: dict[str, Any], sections: tuple[int, ...] = (4, 6, 6), **text: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return _model(kind, text_config={**_GROUPED, "rope_parameters": rope, **text}, vision_config=vision, **_QWEN_IDS)


OF_CASES: dict[str, Callable[[], Any]] = {
    "llava": _llava,
    "qwen2_5_vl": partial(_qwen_vl, "qwen2_5_vl", {**_TOWER, "depth": 2, "fullatt_block_indexes": [1]}),
    "llama": partial(_model, "llama", **_TEXT), "qwen2": partial(_model, "qwen2", **_GROUPED),
    "llava-32k": partial(_llava, {**_WIDE, "model_type": "llama"}), "llama-32k": partial(_model, "llama", **_WIDE),
}  # fmt: skip
"""Models of the cases."""

TEXT, ANSWER = 24, 40
"""Text tokens of a record before and after the question's end; a language model's query is as long as its context."""


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str = "bfloat16"
    quantization: str = "none"
    checkpointing: bool = False
    reducer: str = "none"
    routed: bool = True
    batch: int = 2
    dropout: float = 0.05
    optimizer: str = "adamw"
    distilled: bool = False

    @property
    def precision(self) -> str:
        return "32-true" if self.dtype == "float32" else "bf16-mixed"


def make_parts(case: Case, folder: Path) -> CompressedBackbone:
    path = folder / case.model
    if not path.exists() and case.model == EMBEDDED:
        shutil.copytree(ROOT / "checkpoints" / EMBEDDED, path)
    elif not path.exists():
        torch.manual_seed(0)
        OF_CASES[case.model]().save_pretrained(path)
    kind = json.loads((path / "config.json").read_text())["model_type"]
    config = BackboneConfig(path=str(path), dtype=case.dtype, quantization=case.quantization)
    family = FAMILIES[kind](load_weights(FAMILIES[kind], config), None)
    settings = {"fastv": {"keep_ratio": 0.25}, "quest": {"keep_ratio": 0.5, "window": 32}}
    reducer = build_reducer(case.reducer, **settings.get(case.reducer, {}))
    routing = RoutingConfig(num_groups=16, kept_groups=4) if case.routed else None
    parts, _ = assemble(family, LoraSettings(rank=16, dropout=case.dropout), reducer, routing)
    if case.checkpointing:
        enable_checkpointing(family, parts.bank)
    return parts


def make_batch(case: Case, parts: CompressedBackbone) -> Batch:
    """Records of one image (or context) and text; of several, the last is a token shorter."""
    torch.manual_seed(0)
    family, image = parts.family, parts.family.image_token_id
    pixels = grid = None
    if image is None:
        compressed, middle = 128, [Region.CONTEXT] * 128
    elif family.name == "llava":
        vision, compressed = family.model.config.vision_config, family.visual_tokens()
        pixels, middle = torch.randn(case.batch, 3, vision.image_size, vision.image_size), [Region.VISUAL] * compressed
    else:
        compressed, grid = 144, torch.tensor([[1, 24, 24]] * case.batch)
        channels = 3 * 2 * family.model.config.vision_config.patch_size**2
        pixels, middle = torch.randn(case.batch * 576, channels), [Region.VISUAL] * 144
    codes = torch.tensor([Region.SYSTEM] + middle + [Region.QUERY] * TEXT + [Region.ANSWER] * ANSWER)
    regions = codes.repeat(case.batch, 1)
    if case.batch > 1:
        regions[-1, -1] = Region.PADDING
    ids = torch.randint(10, 60, regions.shape)
    if image is not None:
        ids[regions == Region.VISUAL] = image
    labels = torch.where(regions == Region.ANSWER, ids, -100)
    rank = torch.full((case.batch,), len(codes) - ANSWER - 1)
    counts = torch.full((case.batch,), int(image is not None))
    return Batch(ids, labels, regions, rank, pixels, counts, [f"r{i}" for i in range(case.batch)], grid)


def as_step(case: Case, batch: Batch) -> Step:
    regions = batch.regions_BN[0]
    pixels = batch.pixel_values
    return Step(
        batch_size=case.batch, length=len(regions),
        compressed=int(((regions == Region.VISUAL) | (regions == Region.CONTEXT)).sum()), labelled=ANSWER,
        pixel_bytes=0 if pixels is None else pixels.numel() * 4 // case.batch, checkpointing=case.checkpointing,
        autocast=case.precision != "32-true", dropout=case.dropout > 0, on_cpu=True, quantization=case.quantization,
        optimizer=case.optimizer, distilled=case.distilled,
    )  # fmt: skip


def measure(case: Case, folder: Path) -> dict[str, Any]:
    parts = make_parts(case, folder)
    batch = make_batch(case, parts)
    estimate = estimate_memory(parts, as_step(case, batch))
    module = SubTokenModule(
        backbone=BackboneConfig(), reducer=parts.reducer, routing=None if parts.bank is None else parts.bank.config,
        optimizer=OptimizerConfig(name=case.optimizer), gradient_checkpointing=case.checkpointing,
        distillation=DistillationConfig() if case.distilled else None,
    )  # fmt: skip
    module.compressed = parts
    settings = {"max_steps": 2, "accumulate_grad_batches": 2, "precision": case.precision, "gradient_clip_val": 1.0}
    trainer = L.Trainer(**QUIET, **settings)
    data = DataLoader([(batch, int((batch.labels_BN >= 0).sum()), 1)] * 4, batch_size=None)
    pixels = [] if batch.pixel_values is None else [batch.pixel_values]
    with LiveTensors([*tensors_of(parts), *pixels]) as live:
        trainer.fit(module, data)
    moved = all(bool(p.any()) for name, p in parts.named_parameters() if "lora_B" in name)
    assert moved, "a LoRA got no gradient"
    return {"error": estimate.total / live.peak - 1, "parts": dict(estimate.parts)}
