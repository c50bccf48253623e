"""What stands in the way of a run: what ``fit`` refuses, found without weights, and what this machine cannot do.

And beside it what ``fit`` asks of an earlier run: what a resumed one may change in its recipe, and that one which is
replaced holds nothing that its successor reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.strategies import Strategy

from subtoken_train.artifact.hub import check_name, check_published
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.recipe_source import read_recipe
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import RecallDataModule
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import UncutError
from subtoken_train.resources import find_recipe
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
    """Everything that ``fit`` asks of a recipe on any machine, without weights.

    Args:
        cli: the recipe.
        parts: its model, laid out.
        offline: read no data.

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
            zero_settings(settings.stage, settings.offload, _plain(settings.config))
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


def _plain(value: Any) -> Any:
    return value.as_dict() if hasattr(value, "as_dict") else value


def check_held(cli: Any) -> None:
    """Refuse to replace a folder that holds what the run reads.

    Args:
        cli: the parsed recipe; only ``--overwrite`` replaces anything.

    Raises:
        ValueError: data, images, backbone, stage 1's adapter or a recipe lies in the run's folder. The run's own
            ``recipe.yaml`` may.
    """
    folder: Path = cli.output_dir
    if cli.place == folder:
        return
    for key, text in _texts({"data": cli.config.data.as_dict(), "model": cli.config.model.as_dict()}, ""):
        if _lies_in(Path(text), folder):
            raise ValueError(
                f"{key} ({text}) lies in {folder}, which this run would replace; choose another --output_dir"
            )
    for path in filter(None, map(find_recipe, cli.source.words.configs)):
        if _lies_in(path, folder) and path.resolve() != (folder / "recipe.yaml").resolve():
            raise ValueError(f"the recipe {path} lies in {folder}, which this run would replace; move it elsewhere")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text in nested settings, with its dotted key; any of them may name a file."""
    if isinstance(value, str | Path):
        yield key, str(value)
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from _texts(below, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _texts(below, key)


def _lies_in(path: Path, folder: Path) -> bool:
    try:
        return path.absolute().is_relative_to(folder.absolute()) or path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a text that is no path: too long, or with a null byte
        return False


# A checkpoint restores or presupposes these; others (devices, loggers, workers, intervals) may change freely.
_DECISIVE = (
    "seed_everything",
    "model.",
    "data.",
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
    "trainer.limit_train_batches",
)

# Files may have moved, memory may be saved; the order of the data refuses a batch that is not the same in total.
_FREE_LEAVES = ("path", "num_workers", "batch_size", "val_batch_size", "gradient_checkpointing")
_FREE_ENDINGS = ("_file", "_root", "_folder", "_dir")
_NOTED = ("trainer.max_steps", "trainer.max_epochs")
_MISSING = object()
_MAX_LISTED = 4


def compare_recipes(saved: Path, now: str) -> str:
    """Compare the recipe that a run keeps with the present one; returns a note on what may change but matters.

    Args:
        saved: the run's ``recipe.yaml``.
        now: the present recipe as YAML.

    Raises:
        ValueError: they differ in what the checkpoint restores or presupposes, or the saved one cannot be read.
    """
    before, after = dict(_flat(read_recipe(saved))), dict(_flat(yaml.safe_load(now)))
    differing = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    decisive = [key for key in differing if _is_decisive(key) and before.get(key, _MISSING) is not _MISSING]
    if decisive:
        listed = "; ".join(_change(key, before, after) for key in decisive[:_MAX_LISTED])
        more = f"; and {len(decisive) - _MAX_LISTED} more" if len(decisive) > _MAX_LISTED else ""
        raise UncutError(f"the run began with another recipe ({listed}{more}); resume with {saved}, or start anew")
    return "; ".join(_change(key, before, after) for key in differing if key in _NOTED)


def _change(key: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    return f"{key}: {before.get(key)}, here {after.get(key)}"


def _is_decisive(key: str) -> bool:
    leaf = key.rpartition(".")[2]
    return key.startswith(_DECISIVE) and leaf not in _FREE_LEAVES and not leaf.endswith(_FREE_ENDINGS)


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf, and ``set`` for every group: where it is off, its name holds null."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield prefix + key, "set"
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
