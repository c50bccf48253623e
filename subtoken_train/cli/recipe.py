"""Parse recipes into typed settings, for ``fit`` and ``check`` alike.

LightningCLI without its subcommands: a recipe's ``model``, ``data`` and ``trainer`` bands are the arguments of
SubTokenModule, a data module (``data_module_of``) and Trainer; the keys beside them are added here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import lightning as L
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from subtoken_train.artifact.hub import Destination
from subtoken_train.cli.command_line import FLAGS
from subtoken_train.cli.loggers import check_remote, run_loggers
from subtoken_train.cli.recipe_source import RecipeSource, read_source
from subtoken_train.cli.run_scores import check_attention, midway_evaluator
from subtoken_train.cli.trainer_parts import ACCELERATORS, KINDS, build_parts, named_parts
from subtoken_train.cli.wording import own_words, reworded, unknown_key
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.outputs import write_whole
from subtoken_train.reducers import REDUCERS
from subtoken_train.reducers.base import Reducer
from subtoken_train.training.memory import check_strategy
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.panels.midway_scores import (
    VALIDATION_SCORES,
    EarlyStoppingConfig,
    EvaluationConfig,
    MidwayEvaluation,
    StopEarly,
)
from subtoken_train.training.panels.per_layer import FirstGradients, RoutingPanel, SilentTensors, TrainedPanel
from subtoken_train.training.panels.run_progress import BarProgress, LineProgress, LogRecipe
from subtoken_train.training.panels.throughput import Throughput
from subtoken_train.training.preflight import check_cpus, check_devices
from subtoken_train.training.run_checkpoints import RandomState, RunCheckpoints
from subtoken_train.training.run_folder import has_work, requeued_with_work
from subtoken_train.training.strategies import PRESETS
from subtoken_train.training.trained_tensors import AtomicCheckpointIO
from subtoken_train.typed import shown


class RecipeParser(LightningArgumentParser):
    """Parser that raises a ``ValueError``, which ``RecipeCLI`` words, instead of printing its usage and exiting.

    No value is taken for the name of a further file. A reducer's settings are those of its class.

    Attributes:
        reducer: the recipe's token reducer.
    """

    reducer: type[Reducer]

    def add_class_arguments(self, theclass: type[Any], *args: Any, **kwargs: Any) -> Any:
        """Add a class's settings, without configuration files in the place of values."""
        settings = {**kwargs, "sub_configs": False}
        if theclass is SubTokenModule:
            settings["skip"] = {"reducer"}
        if theclass is L.Trainer:
            settings["skip"] = {*KINDS, "accelerator", "plugins", "max_time", "val_check_interval"}
        added = super().add_class_arguments(theclass, *args, **settings)
        if theclass is SubTokenModule:
            super().add_class_arguments(self.reducer, "model.reducer", sub_configs=False)
        if theclass is L.Trainer:  # as they stand: nothing that the parser could import
            for key in (*KINDS, "plugins"):
                self.add_argument(f"--trainer.{key}", type=_as_it_stands, default="auto" if key == "strategy" else None)
            self.add_argument("--trainer.accelerator", type=Literal[ACCELERATORS], default="auto")
            self.add_argument("--trainer.max_time", type=str | None, default=None)
            self.add_argument("--trainer.val_check_interval", type=_count_share_or_time, default=None)
        self._try_whole_numbers_first()
        return added

    def _try_whole_numbers_first(self) -> None:
        """Let a whole number stay one where ``int | float`` is asked for, whose parts are tried in order.

        That order is not the one that was written: typing's cache takes ``int | float`` and ``float | int`` for equal,
        and gives back the one that any library asked for first.
        """
        union: Any = Union
        for settings in map(vars, self._actions):
            hint = settings.get("_typehint")
            parts = get_args(hint)
            if get_origin(hint) in (Union, UnionType) and int in parts and float in parts:
                settings["_typehint"] = union[tuple(sorted(parts, key=lambda part: part is float))]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message``."""
        raise ValueError(message)


def _as_it_stands(value: Any) -> Any:
    """Take what ``recipe_source`` has checked already."""
    return value


def _count_share_or_time(value: Any) -> Any:
    """Return a text as the whole number or the share that it writes; a time stays a text."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


def data_module_of(keys: set[str]) -> type[OrderedDataModule[Any]]:
    """Return the data module of a ``data`` band by its keys: corpus (``train``), recall (``num_facts``) or records."""
    if "train" in keys:
        return CorpusDataModule
    return RecallDataModule if "num_facts" in keys else InstructionDataModule


def recipe_keys(parser: LightningArgumentParser) -> list[str]:
    """List every key that a recipe may hold, also those in optional groups (``model.routing``); no group itself."""
    keys = {key for key, _ in _typed_keys(parser)}
    return sorted(keys - _groups(keys))


def never_null(parser: LightningArgumentParser) -> set[str]:
    """Return the keys and groups whose types hold no None; the parser itself takes null for any of them."""
    typed = dict(_typed_keys(parser))
    hints = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    optional = {key for key, hint in hints.items() if hint is not None and _holds_none(hint)}
    groups = {group for group in _groups(typed) if not any(group.startswith(f"{each}.") for each in optional)}
    return {key for key, hint in typed.items() if not _holds_none(hint)} | groups - optional


def _typed_keys(parser: LightningArgumentParser) -> Iterator[tuple[str, Any]]:
    """Yield every key that a recipe may hold, and its type; None: not known."""
    for action in parser._actions:
        if action.dest.rpartition(".")[2] != "help":
            yield from _keys_below(action.dest, getattr(action, "_typehint", None))


def _groups(keys: Iterable[str]) -> set[str]:
    return {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}


def _holds_none(hint: Any) -> bool:
    """Return whether None is a value of a type; True where the parser does not know the type."""
    if get_origin(hint) in (Union, UnionType):
        return any(map(_holds_none, get_args(hint)))
    return hint in (None, Any, type(None))


def check_known(content: dict[str, Any], keys: Iterable[str], prefix: str = "") -> None:
    """Refuse what the parser lets pass: an unknown key that holds nothing, and an empty list in place of a group."""
    keys = set(keys)
    groups = _groups(keys)
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in groups and isinstance(value, dict):
            check_known(value, keys, f"{key}.")
        elif key in groups and value is not None:
            raise ValueError(f"{key} is {shown(value)}; it must be a group of keys")
        elif key.removesuffix("+") not in keys | groups and value in ({}, []):
            raise ValueError(unknown_key("key", key, keys))


def check_nulls(content: dict[str, Any], whole: set[str], prefix: str = "") -> None:
    """Raise a worded ``ValueError`` for a null where it is no value; ``whole``: see ``never_null``."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            check_nulls(value, whole, f"{key}.")
        elif value is None and key in whole:
            raise ValueError(f"{key} is null; give it a value, or leave the key out")


def _keys_below(name: str, hint: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of the optional groups in a type hint, nested ones too, or ``name`` itself; each with its type."""
    groups = [part for part in get_args(hint) if dataclasses.is_dataclass(part)]
    if not groups:
        yield name, hint
    for group in groups:
        for key, inner in get_type_hints(group).items():
            yield from _keys_below(f"{name}.{key}", inner)


class RecipeCLI(LightningCLI):
    """Parser of a recipe that builds model and data (neither loads anything yet).

    What a recipe names is built with the trainer, at the first use of ``trainer``, and not before.

    Args:
        source: ``--config RECIPE`` and overrides, or what ``read_source`` made of them.

    Attributes:
        replaces: whether ``--overwrite`` renames a run that is there.
    """

    def __init__(self, source: list[str] | RecipeSource) -> None:
        self.source = read_source(source) if isinstance(source, list) else source
        self._trainer: L.Trainer | None = None
        self.replaces = False
        super().__init__(
            SubTokenModule,
            data_module_of(self.source.data_keys()),
            args=self.source.arguments(),
            run=False,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"default_env": False, "prog": "subtoken-train", "allow_abbrev": False},
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return the parser with short errors."""
        parser = RecipeParser(**kwargs)
        parser.reducer = REDUCERS.find(self.source.reducer)
        parser.add_argument("-c", "--config", action="config", help="recipe (YAML); later files and flags override")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys that are neither model, data nor trainer."""
        parser.add_argument("--output_dir", type=str, default="runs/unnamed", help="folder of this run")
        parser.add_argument("--overwrite", type=bool, default=False, help="replace an existing run")
        parser.add_argument("--resume", type=bool, default=False, help="continue from the run's last checkpoint")
        parser.add_argument("--push_to_hub", type=str | None, default=None, help="user/name to publish the adapter as")
        parser.add_argument("--private", type=bool, default=False, help="publish it in a private repository")
        parser.add_argument("--evaluation", type=EvaluationConfig | None, default=None)
        parser.add_argument("--early_stopping", type=EarlyStoppingConfig | None, default=None)
        parser.add_lightning_class_args(RunCheckpoints, "checkpoint")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; a mistake in a recipe becomes one line."""
        keys, whole = recipe_keys(parser), never_null(parser)
        for content in self.source.contents:
            check_known(content, keys)
        for content in (*self.source.contents, *self.source.pieces):
            check_nulls(content, whole)
        try:
            super().parse_arguments(parser, args)
        except ValueError as error:
            raise ValueError(reworded(str(error), keys)) from None

    def before_instantiate_classes(self) -> None:
        """Fill in the settings that follow from others."""
        check_strategy(self.config.model.backbone.quantization, self.strategy)
        if requeued_with_work(self.output_dir, self.config.overwrite):
            self.config.resume, self.config.overwrite = True, False
        self.replaces = self.config.overwrite and not self.config.resume and has_work(self.output_dir)
        self.config.checkpoint.folder = str(self.output_dir / "checkpoints")
        self.config.trainer.default_root_dir = str(self.output_dir)
        self.config.trainer.use_distributed_sampler = False  # the data module shares records out itself
        check_remote(self.config.trainer.logger)

    def instantiate_classes(self) -> None:
        """Build model and data, and nothing that the recipe names in its trainer."""
        try:
            self.config_init = self.parser.instantiate_classes(self.config)
        except ValueError as error:
            raise ValueError(own_words(str(error))) from None
        self.model, self.datamodule = self.config_init.model, self.config_init.data

    @property
    def strategy(self) -> str:
        """Name of the recipe's strategy."""
        given = named_parts("strategy", self.config.trainer.strategy)
        return given[0][0] if given else "auto"

    @property
    def trainer(self) -> L.Trainer:
        """The recipe's trainer with all that the recipe names; built at the first use."""
        if self._trainer is None:
            self._trainer = self.instantiate_trainer()
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer) -> None:
        """Replace the trainer."""
        self._trainer = trainer

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.output_dir)

    @property
    def destination(self) -> Destination | None:
        """Repository to publish the adapter in; None: not published. ``ValueError`` if only --private is given."""
        repo_id, private = self.config.push_to_hub, self.config.private
        if private and repo_id is None:
            raise ValueError("--private only applies when publishing; add --push_to_hub user/name, or leave it out")
        return None if repo_id is None else Destination(repo_id, private)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.output_dir / "checkpoints"

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build the recipe's trainer with its loggers, progress, atomic checkpoints and our callbacks."""
        stop_mode = self._early_stopping_mode()
        settings = self.config_init.trainer
        ours = [LogRecipe(self.resolved()), RandomState(), *self._watchers(stop_mode)]
        if settings.enable_progress_bar is not False:
            ours.append(BarProgress() if sys.stdout.isatty() else LineProgress(settings.log_every_n_steps or 50))
        given = build_parts("callbacks", settings.callbacks)
        if settings.enable_model_summary is None and not any(isinstance(each, ModelSummary) for each in given):
            settings.enable_model_summary = False  # one row and no FLOPs; 'check' counts what trains
        settings.callbacks = [*given, *ours]
        settings.logger = run_loggers(settings.logger, self.output_dir, self.replaces)
        plain = settings.strategy in (None, "auto", "ddp")
        settings.strategy = self.strategy if plain else build_parts("strategy", settings.strategy, **PRESETS)[0]
        settings.profiler = next(iter(build_parts("profiler", settings.profiler)), None)
        check_cpus(settings.devices, settings.accelerator)
        check_devices(settings.devices, settings.accelerator)
        settings.plugins = [AtomicCheckpointIO()]
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError) as error:  # e.g. accelerator: cuda on a machine without one
            raise ValueError(f"trainer: {error}") from None

    def check_watchers(self, read: bool) -> None:
        """Raise a worded ``ValueError`` where early stopping or the evaluation (its data, if read) could not run."""
        self._early_stopping_mode()
        task, attention = self.config_init.evaluation, self.config.model.backbone.attention
        if task is not None and read:
            midway_evaluator(task, attention)
        elif task is not None:
            check_attention(attention)

    def _early_stopping_mode(self) -> str | None:
        """Return ``min`` or ``max`` for early stopping, checked against the scores that the run will have."""
        stopping, data = self.config_init.early_stopping, self.config.data
        if stopping is None:
            return None
        scores = ["eval/accuracy"] if self.config_init.evaluation else []
        if any(data.get(key) for key in ("val_file", "val", "val_samples")):
            scores += VALIDATION_SCORES
        return str(stopping.checked_mode(scores))

    def _watchers(self, stop_mode: str | None) -> list[Callback]:
        """Return panels, the evaluation in the middle of training, and early stopping."""
        task, stopping, throughput = self.config_init.evaluation, self.config_init.early_stopping, Throughput()
        callbacks: list[Callback] = [throughput, RoutingPanel(), TrainedPanel(), FirstGradients(), SilentTensors()]
        midway = None
        if task is not None:
            evaluate = midway_evaluator(task, self.config.model.backbone.attention)
            midway = MidwayEvaluation(evaluate, task.every_n_steps, throughput.watch)
            callbacks.append(midway)
        if stop_mode is not None:
            callbacks.append(StopEarly(stopping, stop_mode, midway if stopping.monitor == "eval/accuracy" else None))
        return callbacks

    def resolved(self) -> dict[str, Any]:
        """Return the recipe with every default and override, as plain values."""
        content: dict[str, Any] = yaml.safe_load(self.recipe_text())
        return content

    def save_recipe(self, path: Path) -> None:
        """Write the resolved recipe, so that ``--config PATH --resume`` goes on with it."""
        write_whole(path, self.recipe_text())

    def recipe_text(self) -> str:
        """Return the resolved recipe as YAML, without what was for this call alone."""
        config = self.config.clone()
        for flag in FLAGS:
            del config[flag]
        config.push_to_hub = None
        return str(self.parser.dump(config, skip_validation=True))
