"""Recipes as typed settings: the one parser that ``fit`` and ``check`` share.

LightningCLI without its subcommands: a recipe's ``model``, ``data`` and ``trainer`` bands are the arguments of
SubTokenModule, a data module (``data_module_of``) and Trainer; the keys beside them are added here.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from subtoken_train.cli.wording import check_recipe_file, recipe_keys, worded
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.training.checkpoint_io import AtomicCheckpointIO
from subtoken_train.training.interrupt import SaveOnInterrupt
from subtoken_train.training.memory import check_strategy
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.monitor import RunMonitor
from subtoken_train.training.rng import RandomState

_CHECKPOINT_DEFAULTS = {
    "checkpoint.filename": "step-{step}",
    "checkpoint.auto_insert_metric_name": False,
    "checkpoint.every_n_train_steps": 500,
    "checkpoint.save_last": True,
    "checkpoint.save_top_k": 1,
    "checkpoint.enable_version_counter": False,
}


class RecipeParser(LightningArgumentParser):
    """Errors are a ``ValueError``, which ``RecipeCLI`` words, instead of a usage dump and an exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message``."""
        raise ValueError(message)


class RecipeCLI(LightningCLI):
    """Parses a recipe and builds model and data (neither loads anything yet), and the trainer unless told not to.

    Args:
        argv: ``--config RECIPE`` and overrides.
        with_trainer: False leaves ``trainer`` None.
    """

    def __init__(self, argv: list[str], with_trainer: bool = True) -> None:
        self._with_trainer = with_trainer
        for path in recipe_paths(argv):
            check_recipe_file(path)
        super().__init__(
            SubTokenModule,
            data_module_of(argv),
            args=argv,
            run=False,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={"default_env": False, "prog": "subtoken-train", "allow_abbrev": False},
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """The parser with short errors."""
        parser = RecipeParser(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="recipe (YAML); later files and flags override")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The keys that are neither model, data nor trainer."""
        parser.add_argument("--output_dir", type=str, default="runs/unnamed", help="folder of this run")
        parser.add_argument("--overwrite", type=bool, default=False, help="replace an existing run")
        parser.add_argument("--resume", type=bool, default=False, help="go on from the run's last checkpoint")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(_CHECKPOINT_DEFAULTS)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; what is wrong with a recipe is one worded line."""
        try:
            super().parse_arguments(parser, args)
        except ValueError as error:
            raise ValueError(worded(str(error), recipe_keys(parser))) from None

    def before_instantiate_classes(self) -> None:
        """Settings that follow from others."""
        check_strategy(self.config.model.backbone.quantization, self.config.trainer.strategy)
        self.config.checkpoint.dirpath = str(self.output_dir / "checkpoints")
        self.config.trainer.default_root_dir = str(self.output_dir)
        self.config.trainer.use_distributed_sampler = False  # the data module shares records out itself

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.output_dir)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """The recipe's trainer with both loggers, Rich progress, atomic checkpoints and our callbacks."""
        if not self._with_trainer:
            return None
        settings = self.config_init.trainer
        last = self.output_dir / "checkpoints" / "last.ckpt"
        ours = [RandomState(), RunMonitor(settings.log_every_n_steps or 50), SaveOnInterrupt(last)]
        if settings.enable_progress_bar is not False:
            ours.append(RichProgressBar())
        settings.callbacks = [*(settings.callbacks or []), *ours]
        if settings.logger is None:
            folder = str(self.output_dir)
            csv = _unused_name(self.output_dir / "logs", "csv") if self.config.resume else "csv"
            settings.logger = [CSVLogger(folder, "logs", csv), TensorBoardLogger(folder, "logs", "tb")]
        if settings.plugins is None:
            settings.plugins = [AtomicCheckpointIO()]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError) as error:  # e.g. accelerator: cuda on a machine without one
            raise ValueError(f"trainer: {error}") from None

    def save_recipe(self, path: Path) -> None:
        """Write the resolved recipe, so that ``--config PATH --resume`` goes on with it."""
        self.config.overwrite = self.config.resume = False  # meant for this call alone
        self.parser.save(self.config, str(path), overwrite=True, skip_check=True, multifile=False)


def data_module_of(argv: list[str]) -> type[OrderedDataModule[Any]]:
    """Which data a recipe's ``data`` band speaks of: a corpus (``train``), recall (``num_facts``) or records."""
    keys: set[str] = set()
    for path in recipe_paths(argv):
        band = (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}).get("data")
        keys |= set(band) if isinstance(band, dict) else set()
    if "train" in keys:
        return CorpusDataModule
    return RecallDataModule if "num_facts" in keys else InstructionDataModule


def recipe_paths(argv: list[str]) -> list[str]:
    """The files that ``--config`` names, in order."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    spaced = [following for word, following in pairs if word in ("--config", "-c") and following]
    return spaced + [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]


def _unused_name(folder: Path, name: str) -> str:
    """``csv``, ``csv-2``, ``csv-3``...: a resumed run must not delete the log of the first part."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(candidate for candidate in names if not (folder / candidate).exists())


def expand_flags(argv: list[str]) -> list[str]:
    """Bare ``--overwrite`` and ``--resume`` as the booleans that they are in a recipe.

    Raises:
        ValueError: a flag before ``--config``, which the recipe would silently override.
    """
    configs = [place for place, word in enumerate(argv) if word.split("=")[0] in ("--config", "-c")]
    early = [word for word in argv[: configs[0]] if word.startswith("--")] if configs else []
    if early:
        raise ValueError(f"{early[0]} stands before --config and would be overridden by it; put --config first")
    return [f"{word}=true" if word in ("--overwrite", "--resume") else word for word in argv]
