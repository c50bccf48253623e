"""What stands in the way of a run: what ``fit`` refuses, found without weights, and what this machine cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from lightning.pytorch.strategies import Strategy

from subtoken_train.artifact.hub import check_name, check_published
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.training.devices import check_cpus, check_devices, count_devices
from subtoken_train.training.preflight import at_hand
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import check_kind, check_parts, strategy_class
from subtoken_train.training.strategies.zero import ZeroStrategy
from subtoken_train.training.strategies.zero_settings import zero_settings

_THERE: dict[str, Callable[[], bool]] = {
    "gpu": torch.cuda.is_available,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "tpu": lambda: find_spec("torch_xla") is not None,
}


def check_ready(cli: RecipeCLI, parts: CompressedBackbone, offline: bool) -> None:
    """Everything that ``fit`` asks of a recipe, and of its model laid out, on any machine; offline, no data are read.

    Raises:
        ValueError: what ``fit`` would say.
    """
    kind, trainer, data = _strategy(cli), cli.config.trainer, cli.datamodule
    check_kind(kind, str(trainer.precision or "32-true"), cli.model)
    check_parts(kind, parts)
    if issubclass(kind, ZeroStrategy):
        if trainer.accelerator == "cpu":
            raise ValueError("trainer.strategy: ZeRO runs on CUDA GPUs; take trainer.strategy ddp or fsdp2 on a CPU")
        settings = getattr(trainer.strategy, "init_args", None)
        if settings is not None:
            own = settings.config
            zero_settings(settings.stage, settings.offload, own.as_dict() if hasattr(own, "as_dict") else own)
    cli.check_watchers(read=not offline)
    if (destination := cli.destination) is not None:
        check_published(cli.model.backbone_config.path)
        check_name(destination.repo_id)
    check_cpus(trainer.devices, trainer.accelerator)
    if isinstance(data, CorpusDataModule):
        data.check_end(trainer.max_steps, trainer.limit_train_batches)
    elif isinstance(data, RecallDataModule) and (family := at_hand(parts.family, cli.model.backbone_config)):
        next(data.samples(family, 1))
        devices = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
        data.training_order(world_size=devices, limit=trainer.limit_train_batches or 1.0)


def machine_lines(cli: RecipeCLI) -> Iterator[str]:
    """Why this machine cannot run a recipe that is valid; nothing where it can."""
    trainer, model = cli.config.trainer, cli.model
    accelerator = trainer.accelerator
    if not _THERE.get(accelerator, lambda: True)():
        yield f"trainer.accelerator {accelerator}: there is none"
    else:
        try:
            check_devices(trainer.devices, accelerator)
        except ValueError as error:
            yield str(error)
    if issubclass(_strategy(cli), ZeroStrategy):
        if accelerator == "auto" and not torch.cuda.is_available():
            yield "trainer.strategy: ZeRO runs on CUDA GPUs, and there is none"
        if find_spec("deepspeed") is None:
            yield "trainer.strategy needs DeepSpeed: pip install 'subtoken_train[deepspeed]'"
    eight_bit = model.optimizer_config.name == "paged_adamw_8bit"
    if (eight_bit or model.backbone_config.quantization != "none") and find_spec("bitsandbytes") is None:
        yield "quantised weights and optimisers need bitsandbytes: pip install 'subtoken_train[gpu]'"
    if model.backbone_config.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        yield "model.backbone.attention flash_attention_2 needs flash-attn, which is not installed"


def folder_lines(cli: RecipeCLI) -> Iterator[str]:
    """What stands in the way where the run would be written, unless a flag says what becomes of it."""
    if not cli.config.overwrite and not cli.config.resume:
        try:
            RunFolder(cli.output_dir, cli.output_dir).check(resume=False)
        except ValueError as error:
            yield str(error)


def _strategy(cli: RecipeCLI) -> type[Strategy]:
    """The class of the recipe's strategy, from its name or its path; nothing is built."""
    given = cli.config.trainer.strategy
    if isinstance(given, str):
        return strategy_class(given)
    module, _, name = given.class_path.rpartition(".")
    kind: type[Strategy] = getattr(import_module(module), name)
    return kind
