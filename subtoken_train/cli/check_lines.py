"""The lines of ``subtoken-train check`` on settings and data, what ``fit`` would refuse, and the obstacles to a run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

import torch

from subtoken_train.artifact.card import routing_words
from subtoken_train.artifact.hub import check_name, check_published
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.run_plan import Reading, on_cpu, size_words, steps_of
from subtoken_train.cli.terminal import about
from subtoken_train.cli.trainer_parts import KINDS, build_parts
from subtoken_train.datasets.chats import asked_words, chat_sample, reads_chats, wholly_read
from subtoken_train.datasets.collate import EncodedSample, encode
from subtoken_train.datasets.corpus import load_rows
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule, RecallDataModule
from subtoken_train.datasets.image_sources import count_named, open_picture
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.text_batches import TextSample
from subtoken_train.datasets.unknown_tokens import say_unknown, spread
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_TOKENS, pip_line, refuse
from subtoken_train.families.backbone_config import resolve
from subtoken_train.families.family import Family
from subtoken_train.families.load import machine_memory
from subtoken_train.families.lora import LoraSettings
from subtoken_train.training.loss import CrossEntropy
from subtoken_train.training.preflight import NominalPrompt, at_hand, check_devices, count_devices, seconds_per_batch
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import ZeroStrategy, check_kind, check_parts
from subtoken_train.types import Region

T = TypeVar("T")
MOST = 200
"""Records that are encoded, with their images."""
_OPTIMIZERS = {"adamw": "AdamW", "paged_adamw_8bit": "paged 8-bit AdamW"}


def settings_lines(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt, offline: bool) -> Iterator[str]:
    """Write backbone, reducer, routing, LoRA, stage 2 and optimiser, a line each."""
    module, family, reducer = cli.model, parts.family, parts.reducer
    backbone, optimizer, depth = module.backbone_config, module.optimizer_config, family.shape.num_layers
    pixels = "" if family.nominal_image is None else " of {} x {} pixels".format(*family.nominal_image)
    seen = f"{prompt.tokens:,} visual tokens per image{pixels}" if prompt.region == "visual" else "text only"
    quantised = "" if backbone.quantization == "none" else f" ({backbone.quantization} decoder)"
    yield f"backbone   {backbone.path}, {backbone.dtype}{quantised}, {backbone.attention}, {depth} layers, {seen}"
    most, named = "" if reducer.fixed_count else "at most ", f"{reducer.name}, keeps {reducer.keep_ratio:g}"
    named += f" ({most}{reducer.kept_words(prompt.tokens, depth)} of {prompt.tokens})"
    yield f"reducer    {', '.join(filter(None, [named, reducer.words]))}"
    routing = module.routing_config
    yield f"routing    {'none, a token-only arm' if routing is None else routing_words(routing)}"
    yield f"LoRA       {_lora_words(module.lora_settings)}"
    if (stage2 := module.stage2_config) is not None:
        read = "not read: --offline; its LoRA is assumed to be as above"
        if module.first_stage is not None and not offline:
            read = f"{module.first_stage.reading}; its LoRA, as above, is frozen"
        yield f"stage 2    on {stage2.adapter} ({read})"
        if stage2.output_lora is not None:
            yield f"o_proj     LoRA {_lora_words(stage2.output_lora)}"
    if module.loss.name != CrossEntropy.name:
        own = (f"{key} {value}" for key, value in asdict(module.loss).items())
        yield f"loss       {', '.join([module.loss.name, *own])}"
    if (teacher := module.distillation_config) is not None:
        yield f"teacher    the uncompressed backbone, weight {teacher.weight:g}, temperature {teacher.temperature:g}"
    routers = "" if (rate := optimizer.router_learning_rate) is None else f" (routers {rate:g})"
    rates = f"{optimizer.learning_rate:g}{routers}, weight decay {optimizer.weight_decay + 0:g}"
    steps = f"{optimizer.warmup_steps:,} warm-up steps, then {optimizer.schedule}"
    yield f"optimiser  {_OPTIMIZERS[optimizer.name]} at {rates}, {steps}"
    checkpointing = "with" if module.gradient_checkpointing else "without"
    yield f"trainer    precision {cli.config.trainer.precision or '32-true'}, {checkpointing} gradient checkpointing"
    yield f"output     {cli.output_dir}"


def _lora_words(lora: LoraSettings) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha}, dropout {lora.dropout:g}"


def check_ready(cli: RecipeCLI, parts: CompressedBackbone, offline: bool) -> None:
    """Check all that ``fit`` asks of a recipe and of its model laid out, on any machine; offline, no data are read."""
    kind, trainer, data = KINDS["strategy"].names[cli.strategy], cli.config.trainer, cli.datamodule
    check_kind(kind, str(trainer.precision or "32-true"), cli.model)
    check_parts(kind, parts)
    build_parts("callbacks", trainer.callbacks)
    if issubclass(kind, ZeroStrategy) and trainer.accelerator == "cpu":
        raise ValueError("trainer.strategy: ZeRO runs on CUDA GPUs; use trainer.strategy ddp or fsdp2 on a CPU")
    cli.check_watchers(read=not offline)
    if (destination := cli.destination) is not None:
        check_published(cli.model.backbone_config.path)
        check_name(destination.repo_id)
    devices = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
    if isinstance(data, RecallDataModule) and (family := at_hand(parts.family, cli.model.backbone_config)):
        next(data.samples(family, 1))
        data.training_order(world_size=devices, limit=trainer.limit_train_batches or 1.0)


def obstacles(cli: RecipeCLI, peak: int) -> Iterator[str]:
    """Say why this machine cannot run a valid recipe, and what lies where it would write; ``peak``: bytes of a step."""
    trainer, model, cuda = cli.config.trainer, cli.model, torch.cuda.is_available()
    there = {"mps": torch.backends.mps.is_available(), "tpu": find_spec("torch_xla") is not None}
    zero = issubclass(KINDS["strategy"].names[cli.strategy], ZeroStrategy)
    eight_bit = model.optimizer_config.name == "paged_adamw_8bit" or model.backbone_config.quantization != "none"
    flash, why = model.backbone_config.attention == "flash_attention_2", list[str]()
    if not {**there, "gpu": cuda, "cuda": cuda}.get(trainer.accelerator, True):
        why.append(f"trainer.accelerator {trainer.accelerator}: this machine has none")
    else:
        why += _said(partial(check_devices, trainer.devices, trainer.accelerator))
    if zero and trainer.accelerator == "auto" and not cuda:
        why.append("trainer.strategy: ZeRO runs on CUDA GPUs, and this machine has none")
    if on_cpu(trainer) and peak > (room := machine_memory()):
        few = f"a step takes {size_words(peak)}, and there are {size_words(room)} of memory and no GPU"
        why.append(f"{few}; a smaller model: subtoken-train data smollm2, or smaller batches: --data.batch_size 1")
    for needed, package, words in (
        (zero, "deepspeed", f"trainer.strategy needs DeepSpeed: {pip_line('deepspeed')}"),
        (eight_bit, "bitsandbytes", f"8-bit or 4-bit needs bitsandbytes: {pip_line('gpu')}"),
        (flash, "flash_attn", "model.backbone.attention flash_attention_2 needs flash-attn, which is not installed"),
    ):
        why += [words] if needed and find_spec(package) is None else []
    yield from (f"this machine cannot run it: {line}" for line in why)
    if not cli.config.overwrite and not cli.config.resume:
        for line in _said(partial(RunFolder(cli.output_dir).check, resume=False)):
            yield f"it cannot write its output: {line}"


def _said(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def _encoded(family: Family, record: Record, data: InstructionDataModule, length: int) -> EncodedSample:
    images = [open_picture(each, record.id, data.max_image_pixels, data.max_video_frames) for each in record.images]
    return encode(record, family, length, images)


def _each(places: Sequence[int], make: Callable[[int], T]) -> tuple[list[T], list[str]]:
    made, broken = list[T](), list[str]()
    for place in places:
        try:
            made.append(make(place))
        except ValueError as error:
            broken.append(str(error))
    return made, broken


def _tokens_of(tokens: Sequence[int], total: int | None, what: str) -> str:
    those = f"all {total:,} {what}" if len(tokens) == total else f"{len(tokens):,} {what}"
    those += "" if total in (None, len(tokens)) else f" of {total:,}"
    return f"tokens of {those}: {min(tokens):,} shortest, {median_low(tokens):,} median, {max(tokens):,} longest"


def _length_lines(family: Family, data: InstructionDataModule, reading: Reading) -> Iterator[str]:
    records, most = data.training_records, data.max_length
    places = spread(len(records), MOST)
    samples, broken = _each(places, lambda place: _encoded(family, records[place], data, MAX_TOKENS))
    tokens = [len(sample.input_ids) for sample in samples]
    reading.tokens += tokens
    if tokens:
        longer = [sample.needed for sample, length in zip(samples, tokens, strict=True) if length > most]
        share = f"{len(longer):,} ({100 * len(longer) / len(tokens):.3g} %)" if longer else "none"
        line = f"{_tokens_of(tokens, len(records), 'records')}; max_length {most:,} cuts {share}"
        inside = [needed for needed in longer if needed > most]
        yield line + (f", {len(inside):,} of them in a question, where fit stops" if inside else "")
        if inside:
            cut = f"data.max_length {most:,} cuts the questions of {len(inside):,} of {len(tokens):,} records"
            reading.stops.append(f"{cut}; raise it to {max(inside):,}, or drop them")
    yield from _broken_lines(broken, places, reading)


def _broken_lines(broken: Sequence[str], places: Sequence[int], reading: Reading) -> Iterator[str]:
    if broken:
        yield f"{len(broken):,} of {len(places):,} cannot be used: {broken[0]}"
        reading.stops.append(broken[0])


def _chat_lines(family: Family, data: CorpusDataModule, reading: Reading) -> Iterator[str]:
    rows, limits = data.conversations(), data.chat_limits
    if words := asked_words(family.tokenizer, limits):
        yield words

    def chat_of(place: int) -> TextSample:
        chat = chat_sample(rows[place], family, replace(limits, length=MAX_TOKENS))
        if len(chat.input_ids) > limits.length:
            chat_sample(rows[place], family, limits)
        return chat

    chats, broken = _each(places := spread(len(rows), MOST), chat_of)
    tokens = [len(chat.input_ids) for chat in chats]
    reading.tokens += tokens
    if tokens:
        cut = sum(length > limits.length for length in tokens)
        yield f"{_tokens_of(tokens, len(rows), 'chats')}; block_length {limits.length:,} cuts {cut or 'none'}"
        if words := wholly_read([chat.context_length for chat in chats], limits):
            yield words
    yield from _broken_lines(broken, places, reading)


def _document_line(family: Family, data: CorpusDataModule) -> str:
    texts, total = data.some_texts(family.tokenizer)
    texts = texts[:MOST]
    refuse((not texts, f"{data.train_source.name} holds no text"))
    tokens = [len(ids) for ids in family.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
    line = _tokens_of(tokens, total, "documents")
    if total != len(tokens):
        return line
    if (blocks := (sum(tokens) + len(tokens)) // data.block_length) == 0:
        few = f"{data.train_source.name} has {sum(tokens):,} tokens, fewer than one block of block_length"
        raise ValueError(f"{few} {data.block_length:,}; lower block_length or add text")
    return f"{line}; {sum(tokens):,} together, about {blocks:,} blocks"


MOST_BYTES = 2**26
"""Largest weights that are loaded for a measurement."""
_BATCHES = 4


def time_line(cli: RecipeCLI, batches: int, reading: Reading) -> str:
    """Write the expected time of ``batches`` training batches, or why it cannot be told before a run."""
    data, trainer, module = cli.datamodule, cli.config.trainer, cli.model
    folder = Path(resolve(module.backbone_config.path))
    whole = str(trainer.precision or "32-true") == "32-true" and module.backbone_config.quantization == "none"
    for why, words in (
        (not on_cpu(trainer), "training is to run on an accelerator"),
        (folder.is_file(), "the backbone is a GGUF file"),
        (not folder.is_dir(), "the backbone is not on this machine"),
        (
            sum(path.stat().st_size for path in folder.glob("*.safetensors")) > MOST_BYTES,
            f"the backbone has more than {MOST_BYTES // 2**20} MiB",
        ),
        (not whole, "in this precision"),
        (module.has_teacher or module.stage2_config is not None, "with a teacher or in stage 2"),
    ):
        if why:
            return f"expected time: not measured ({words}); fit shows its pace from the first steps on"
    try:
        seconds = seconds_per_batch(module, data.samples(module.family, min(_BATCHES, batches), data.batch_size))
    except ValueError as error:  # of a record that cannot be used, which the line of lengths may not have looked at
        reading.stops.append(str(error))
        return f"expected time: not measured ({error})"
    if seconds is None:
        few = f"the data do not fill one batch of {data.batch_size:,}"
        reading.stops.append(f"{few}; lower data.batch_size or add data")
        return "expected time: not measured (there are too few data for one batch)"
    reading.seconds = seconds * batches
    pace = f"{seconds:.2g} s a batch, measured now on this machine"
    return f"expected time: {about(reading.seconds)} ({pace}; start, logs, validation and checkpoints are not in it)"


def data_lines(cli: RecipeCLI, parts: CompressedBackbone, offline: bool, reading: Reading) -> Iterator[str]:
    """Write the files (unless offline), the first record as the loss sees it, optimiser steps, records and epochs."""
    data, trainer = cli.datamodule, cli.config.trainer
    devices = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
    accumulate, batches = trainer.accumulate_grad_batches, None
    if isinstance(data, CorpusDataModule):
        family = None if offline else at_hand(parts.family, cli.model.backbone_config)
        chats = family is not None and reads_chats(data.train_source, family.tokenizer)
        yield from _corpus_lines(data, offline, chats)
        if family is not None:
            yield from _chat_lines(family, data, reading) if chats else [_document_line(family, data)]
            yield from _unknown_lines(data, family)
    elif isinstance(data, RecallDataModule):
        yield f"{data.train_samples:,} samples of {data.num_facts} facts, {data.num_questions} asked, drawn as needed"
    elif offline:
        yield f"{data.train_file} (not read: --offline)"
    else:
        yield from _record_lines(cli, parts, reading)
        limit = 1.0 if trainer.limit_train_batches is None else trainer.limit_train_batches
        batches = data.training_order(world_size=devices, limit=limit).batches_per_epoch
    plan = reading.plan = steps_of(cli, batches)
    factors = f"batch {data.batch_size} x accumulation {accumulate} x {devices} device{'s' if devices > 1 else ''}"
    yield f"{plan.samples_per_step:,} records per optimiser step: {factors}"
    if plan.steps is None:
        yield "optimiser steps: trainer.max_steps is not set; trainer.max_epochs and the data decide"
        return
    passes = "" if plan.epochs is None else f", {plan.epochs:.2f} epochs"
    yield f"{plan.steps:,} optimiser steps, {plan.steps * plan.samples_per_step:,} records{passes}"
    if not offline:
        yield time_line(cli, plan.steps * accumulate, reading)


def _corpus_lines(data: CorpusDataModule, offline: bool, chats: bool) -> Iterator[str]:
    source, prefix = data.train_source, data.prefix_tokens
    name = source.name if source.config is None else f"{source.name}, {source.config}"
    rows: Any = None if offline else load_rows(source)
    number = "not read: --offline" if offline else f"{len(rows):,} rows"
    yield f"{name}, split {source.split} ({number})"
    if chats:
        yield (
            f"chats of {data.block_length:,} tokens at most in the tokenizer's template, answers alone predicted; of a "
            f"question of more than {prefix} tokens all but its end is context, {data.context_length:,} tokens at most"
        )
        return
    reads = f"{prefix} read without loss, {data.block_length - data.context_length - prefix} predicted"
    region = reads if prefix else "all of it predicted: what chooses by the question looks ahead (the region reading)"
    yield f"blocks of {data.block_length:,} tokens: {data.context_length:,} of context, then {region}"


def _record_lines(cli: RecipeCLI, parts: CompressedBackbone, reading: Reading) -> Iterator[str]:
    data = cli.datamodule
    data.read()
    records = data.training_records
    texts = int((records.sizes()[:, 0] == 0).sum())
    mixed = f", {texts:,} of them without an image (in batches of their own)" if 0 < texts < len(records) else ""
    yield f"{data.train_file}: {len(records):,} records{mixed}"
    if data.val_file is not None:
        yield f"{data.val_file}: {len(InstructionRecords(data.val_file, data.image_folder)):,} records for validation"
    if folders := data.check_images(type(parts.family), parts.reducer):
        yield f"below {data.image_folder}: all {count_named(folders)} are there"
    if (ready := at_hand(parts.family, cli.model.backbone_config)) is None:
        yield f"first record not encoded: the processor of {cli.model.backbone_config.path} is not on this machine"
        return
    sample = _encoded(ready, records[0], data, data.max_length)
    counts = ", ".join(f"{sample.regions.count(r)} {r.label}" for r in Region if r in sample.regions)
    yield f"first record {sample.record_id!r}: {len(sample.input_ids)} tokens ({counts})"
    yield from _length_lines(ready, data, reading)
    yield from _unknown_lines(data, ready)


def _unknown_lines(data: OrderedDataModule[Any], family: Family) -> Iterator[str]:
    if line := say_unknown(family.tokenizer, data.some_texts(family.tokenizer), "training data"):
        yield line
