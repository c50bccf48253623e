"""The data step of ``subtoken-train check``: where data come from, what one sample looks like, how many steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from subtoken_train.cli.check_lengths import document_line, length_lines
from subtoken_train.cli.check_time import time_line
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.corpus import load_rows
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.image_sources import count_named
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.unknown_tokens import say_unknown
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import clipped
from subtoken_train.families.family import Family
from subtoken_train.training.devices import count_devices
from subtoken_train.training.preflight import at_hand, first_sample, plan_steps
from subtoken_train.types import Region


def data_lines(cli: RecipeCLI, parts: CompressedBackbone, offline: bool, stops: list[str]) -> Iterator[str]:
    """The files (unless offline), the first record as the loss sees it, optimiser steps, records and epochs.

    Args:
        cli: the recipe.
        parts: its model, laid out.
        offline: whether nothing is read.
        stops: what would stop fit is appended, in words.
    """
    data, trainer = cli.datamodule, cli.config.trainer
    devices = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
    accumulate = trainer.accumulate_grad_batches
    batches = None
    if isinstance(data, CorpusDataModule):
        yield from _corpus_lines(data, offline)
        if not offline and (family := at_hand(parts.family, cli.model.backbone_config)) is not None:
            yield document_line(family, data)
            yield from _unknown_lines(data, family)
    elif isinstance(data, RecallDataModule):
        yield f"{data.train_samples:,} samples of {data.num_facts} facts, {data.num_questions} asked, drawn as needed"
    elif offline:
        yield f"{data.train_file} (not read: --offline)"
    else:
        yield from _record_lines(cli, parts, stops)
        limit = 1.0 if trainer.limit_train_batches is None else trainer.limit_train_batches
        batches = data.training_order(world_size=devices, limit=limit).batches_per_epoch
    plan = plan_steps(
        data.batch_size * accumulate * devices, trainer.max_steps, trainer.max_epochs, batches, accumulate
    )
    yield (
        f"{plan.samples_per_step:,} records per optimiser step: batch {data.batch_size} x accumulation {accumulate} x "
        f"{devices} device{'s' if devices > 1 else ''}"
    )
    if plan.steps is None:
        yield "optimiser steps: trainer.max_steps is not set; trainer.max_epochs and the data decide"
        return
    passes = "" if plan.epochs is None else f", {plan.epochs:.2f} epochs"
    yield f"{plan.steps:,} optimiser steps, {plan.steps * plan.samples_per_step:,} records{passes}"
    if not offline:
        yield time_line(cli, plan.steps * accumulate, stops)


def _corpus_lines(data: CorpusDataModule, offline: bool) -> Iterator[str]:
    """Where the text comes from and how a block is laid out; it is tokenised when training starts."""
    source, prefix = data.train_source, data.prefix_tokens
    name = source.name if source.config is None else f"{source.name}, {source.config}"
    rows: Any = None if offline else load_rows(source, data.streaming)
    number = "not read: --offline" if offline else f"{len(rows):,} rows" if hasattr(rows, "__len__") else "streamed"
    yield f"{name}, split {source.split} ({number})"
    reads = f"{prefix} read without loss, {data.block_length - data.context_length - prefix} predicted"
    region = reads if prefix else "all of it read and predicted: choices look ahead (the region reading)"
    yield f"blocks of {data.block_length:,} tokens: {data.context_length:,} of context, then {region}"


def _record_lines(cli: RecipeCLI, parts: CompressedBackbone, stops: list[str]) -> Iterator[str]:
    """Index the files, look for their images, and encode the first record."""
    data = cli.datamodule
    data.read()
    records = data.training_records
    texts = int((records.sizes()[:, 0] == 0).sum())
    mixed = f", {texts:,} of them without an image (in batches of their own)" if 0 < texts < len(records) else ""
    yield f"{data.train_file}: {len(records):,} records{mixed}"
    if data.val_file is not None:
        yield f"{data.val_file}: {len(InstructionRecords(data.val_file, data.image_folder)):,} records for validation"
    if folders := data.check_images(type(parts.family)):
        yield f"below {data.image_folder}: all {count_named(folders)} are there"
    if records.unread:
        names = clipped(", ".join(map(repr, records.unread)), 200)
        yield f"fields that are not read, and train nothing (docs/data_fields.md): {names}"
    ready = at_hand(parts.family, cli.model.backbone_config)
    if ready is None:
        yield f"first record not encoded: the processor of {cli.model.backbone_config.path} is not at hand"
        return
    sample = first_sample(ready, records, data.max_length, data.max_image_pixels, data.max_video_frames)
    counts = ", ".join(f"{sample.regions.count(r)} {r.label}" for r in Region if r in sample.regions)
    yield f"first record {sample.record_id!r}: {len(sample.input_ids)} tokens ({counts})"
    yield from length_lines(ready, data, stops)
    yield from _unknown_lines(data, ready)


def _unknown_lines(data: OrderedDataModule[Any], family: Family) -> Iterator[str]:
    """The share of unknown tokens, where there can be any."""
    if line := say_unknown(family.tokenizer, data.some_texts(), "training data"):
        yield line
