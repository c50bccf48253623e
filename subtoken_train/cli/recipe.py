"""A recipe as typed settings, for ``fit``, ``check`` and all that reads recipes: its model, data, and trainer."""

import sys
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

import lightning as L
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from subtoken_train.artifact.hub import Destination
from subtoken_train.cli.command_line import FLAGS
from subtoken_train.cli.recipe_source import RecipeSource, read_source, reducer_group, unknown_key
from subtoken_train.cli.trainer_parts import ACCELERATORS, KINDS, build_parts, named_parts
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule, RecallDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_SEED, check_package, check_range, in_a_recipe, refuse
from subtoken_train.evaluation.runner.data_file import answer_records, scores_by_kind
from subtoken_train.families.backbone_config import check_backbone
from subtoken_train.reducers import REDUCERS
from subtoken_train.training.memory import check_strategy
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.panels import midway_scores
from subtoken_train.training.panels.per_layer import RoutingPanel, SilentTensors, TrainedPanel
from subtoken_train.training.panels.run_progress import BarProgress, LineProgress, LogRecipe
from subtoken_train.training.panels.throughput import Throughput
from subtoken_train.training.preflight import check_devices
from subtoken_train.training.run_checkpoints import RandomState, RunCheckpoints
from subtoken_train.training.run_folder import has_work, requeued_with_work
from subtoken_train.training.strategies import PRESETS
from subtoken_train.training.trained_tensors import AtomicCheckpointIO
from subtoken_train.typed import Settings, SettingsPlan, built, filled, plan_of

LOGS = "logs"
_NO_RECIPE = "no recipe is given; pass one with --config ('subtoken-train recipes ls' lists the shipped ones)"


_DATA: dict[str, type[OrderedDataModule[Any]]] = {
    "train": CorpusDataModule,
    "num_facts": RecallDataModule,
    "train_file": InstructionDataModule,
}


def recipe_plan(reducer: str, data: type[OrderedDataModule[Any]]) -> SettingsPlan:
    """Return all keys of a recipe, with their types and defaults."""
    trainer, module = plan_of(L.Trainer), plan_of(SubTokenModule)
    # as they stand: ``named_parts`` has checked the names
    ours: dict[str, Any] = dict.fromkeys((*KINDS, "plugins", "profiler"), Any)
    ours |= {"accelerator": Literal[ACCELERATORS], "max_time": str | None}
    ours["val_check_interval"] = int | float | str | None
    hints = {name: hint for name, hint in trainer.hints.items() if name not in ours} | ours
    bands: dict[str, Any] = {
        "seed_everything": int,
        "trainer": SettingsPlan(dict, hints, {**trainer.defaults, "accelerator": "auto", "strategy": "auto"}),
        "model": SettingsPlan(
            SubTokenModule,
            {name: hint for name, hint in module.hints.items() if name != "reducer"}
            | {"reducer": plan_of(REDUCERS.find(reducer))},  # type: ignore[arg-type]
            module.defaults,
        ),
        "data": plan_of(data),
        "output_dir": str,
        **dict.fromkeys(FLAGS, bool),
        "push_to_hub": str | None,
        "evaluation": midway_scores.EvaluationConfig | None,
        "early_stopping": midway_scores.EarlyStoppingConfig | None,
        "checkpoint": plan_of(RunCheckpoints),
    }
    defaults = {"seed_everything": 0, "output_dir": "runs/unnamed", **dict.fromkeys(FLAGS, False)}
    return SettingsPlan(dict, bands, defaults | dict.fromkeys(("push_to_hub", "evaluation", "early_stopping")))


def laid_over(into: dict[str, Any], content: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return settings with others on top, key by key; what the trainer names is one value."""
    result = dict(into)
    for name, value in content.items():
        before, deeper = result.get(name), isinstance(value, dict) and within != "trainer"
        below = before if isinstance(before, dict) else {}
        result[name] = laid_over(below, value, within or name) if deeper else value
    return result


class RecipeCLI:
    """A recipe (``--config RECIPE`` and overrides) read into model and data, neither of which loads anything yet.

    What it names is built at the first use of ``trainer``; ``replaces``: ``--overwrite`` renames a run that is there.
    """

    def __init__(self, source: list[str] | RecipeSource) -> None:
        self.source = read_source(source) if isinstance(source, list) else source
        refuse((not self.source.contents, _NO_RECIPE))
        self._plan, self.config = self._read()
        self._settle()
        if any(key == "print_config" for key, _ in self.source.words.options):
            print(self.recipe_text(), end="")
            raise SystemExit(0)
        L.seed_everything(self.config.seed_everything, workers=True)
        self._build()

    @in_a_recipe
    def _build(self) -> None:
        plans, config = self._plan.hints, self.config
        self.model: SubTokenModule = built(plans["model"], config.model)
        check_backbone(self.model.backbone_config)
        self.datamodule: Any = built(plans["data"], config.data)
        self._checkpoints: RunCheckpoints = built(plans["checkpoint"], config.checkpoint)
        self.evaluation = None if config.evaluation is None else midway_scores.EvaluationConfig(**config.evaluation)
        stopping = config.early_stopping
        self.early_stopping = None if stopping is None else midway_scores.EarlyStoppingConfig(**stopping)

    @in_a_recipe
    def _read(self) -> tuple[SettingsPlan, Settings]:
        plan, whole = recipe_plan(self.source.reducer, _DATA[self.source.data_kind]), dict[str, Any]()
        for content in (*self.source.contents, *self.source.pieces):
            whole = laid_over(whole, content)
        own = [f"model.reducer.{key}" for key in plan.hints["model"].hints["reducer"].hints]
        for key in reducer_group(whole):  # another package's, which no shipped schema knows
            if f"model.reducer.{key}" not in own:
                raise ValueError(unknown_key("key", f"model.reducer.{key}", own))
        config = filled(plan, whole)
        check_range("seed_everything", config.seed_everything, 0, MAX_SEED)
        return plan, config

    def _settle(self) -> None:
        config = self.config
        check_strategy(config.model.backbone.quantization, self.strategy)
        if requeued_with_work(self.output_dir, config.overwrite):
            config.resume, config.overwrite = True, False
        self.replaces = config.overwrite and not config.resume and has_work(self.output_dir)
        config.checkpoint.folder = str(self.checkpoints)
        config.trainer.default_root_dir = str(self.output_dir)
        config.trainer.use_distributed_sampler = False  # the data module shares records out itself
        for kind, _ in named_parts("logger", config.trainer.logger):
            if kind in KINDS["logger"].names.builtin and find_spec(kind) is None:
                raise ValueError(f"trainer.logger {kind} needs the package {kind}; 'pip install {kind}' adds it")

    @property
    def strategy(self) -> str:
        """Name of the recipe's strategy."""
        given = named_parts("strategy", self.config.trainer.strategy)
        return given[0][0] if given else "auto"

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(self.config.output_dir)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.output_dir / "checkpoints"

    @property
    def destination(self) -> Destination | None:
        """Repository to publish the adapter in; None: not published. ``ValueError`` if only --private is given."""
        repo_id, private = self.config.push_to_hub, self.config.private
        if private and repo_id is None:
            raise ValueError("--private only applies when publishing; add --push_to_hub user/name, or leave it out")
        return None if repo_id is None else Destination(repo_id, private)

    @cached_property
    def trainer(self) -> L.Trainer:
        """The recipe's trainer, built at the first use."""
        return self.build_trainer()

    def build_trainer(self) -> L.Trainer:
        """Build the recipe's trainer with its loggers, progress, atomic checkpoints and our callbacks."""
        stop_mode, settings = self._early_stopping_mode(), Settings(self.config.trainer)
        task, stopping, throughput, midway = self.evaluation, self.early_stopping, Throughput(), None
        ours: list[Callback] = [LogRecipe(self.resolved()), RandomState(), throughput]
        ours += [RoutingPanel(), TrainedPanel(), SilentTensors()]
        if task is not None:
            evaluate = midway_evaluator(task, self.config.model.backbone.attention)
            midway = midway_scores.MidwayEvaluation(evaluate, task.every_n_steps, throughput.watch)
            ours.append(midway)
        if stopping is not None and stop_mode is not None:
            scored = midway if stopping.monitor == "eval/accuracy" else None
            ours.append(midway_scores.StopEarly(stopping, stop_mode, scored))
        if settings.enable_progress_bar is not False:
            ours.append(BarProgress() if sys.stdout.isatty() else LineProgress(settings.log_every_n_steps or 50))
        settings.enable_model_summary = bool(settings.enable_model_summary)  # one row, no FLOPs; 'check' counts
        settings.callbacks = [*build_parts("callbacks", settings.callbacks), *ours, self._checkpoints]
        settings.logger = run_loggers(settings.logger, self.output_dir, self.replaces)
        plain = settings.strategy in (None, "auto", "ddp")
        settings.strategy = self.strategy if plain else build_parts("strategy", settings.strategy, **PRESETS)[0]
        check_devices(settings.devices, settings.accelerator)
        settings.plugins = [AtomicCheckpointIO()]
        try:
            return L.Trainer(**settings)
        except (MisconfigurationException, TypeError, ImportError) as error:  # e.g. cuda on a machine without it
            raise ValueError(f"trainer: {error}") from None

    def check_watchers(self, read: bool) -> None:
        """Raise a worded ``ValueError`` where early stopping or the evaluation (its data, if read) could not run."""
        self._early_stopping_mode()
        if self.evaluation is not None and read:
            midway_evaluator(self.evaluation, self.config.model.backbone.attention)
        elif self.evaluation is not None:
            _check_attention(self.config.model.backbone.attention)

    def _early_stopping_mode(self) -> str | None:
        if self.early_stopping is None:
            return None
        scores = ["eval/accuracy"] if self.evaluation else []
        if any(self.config.data.get(key) for key in ("val_file", "val", "val_samples")):
            scores += midway_scores.VALIDATION_SCORES
        return self.early_stopping.checked_mode(scores)

    def resolved(self) -> dict[str, Any]:
        """Return the recipe with every default and override, as plain values, without what was for this call alone."""
        return dict(_plain({key: value for key, value in self.config.items() if key not in (*FLAGS, "push_to_hub")}))

    def recipe_text(self) -> str:
        """Return the resolved recipe as YAML; with the file as ``--config``, ``--resume`` goes on with it."""
        return yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return str(value) if isinstance(value, str | Path) else value


def midway_evaluator(config: midway_scores.EvaluationConfig, attention: str) -> midway_scores.Evaluate:
    """Return a function from a backbone to mean scores on the ``evaluation`` band: ``accuracy``, and each kind's."""
    _check_attention(attention)
    records = InstructionRecords(config.data, config.image_folder, config.images_outside_folder)

    def evaluate(backbone: CompressedBackbone) -> dict[str, float]:
        sizes = {name: getattr(config, name) for name in ("max_length", "batch_size", "max_new_tokens", "limit")}
        run = answer_records(backbone, records, **sizes)
        kinds = scores_by_kind(run)
        named = {"accuracy": run["scores"], **(kinds if len(kinds) > 1 else {})}
        return {name: sum(found) / len(found) for name, found in named.items()}

    return evaluate


def _check_attention(attention: str) -> None:
    if attention == "eager":
        raise ValueError("evaluation decodes from a packed cache, which eager attention cannot; use attention: sdpa")


OVERVIEW = ("train/loss", "val/loss", "eval/accuracy", "val/token_accuracy")
_LAST = {"epoch": 3, "weight_norm": 3, "gradient_norm": 4}


def tensorboard_tag(name: str) -> str:
    """Rename a metric for TensorBoard's first page, which sorts tags and opens the first two groups alone."""
    return f"1_overview/{name}" if name in OVERVIEW else f"{_LAST.get(name.partition('/')[0], 2)}_{name}"


class SortedTensorBoard(TensorBoardLogger):
    """TensorBoard's log, under tags that sort by what is looked at first; other loggers have the plain names."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics under ``tensorboard_tag``."""
        super().log_metrics({tensorboard_tag(name): value for name, value in metrics.items()}, step)


def run_loggers(given: Any, folder: Path, anew: bool) -> list[Logger]:
    """Return loggers below ``folder``/logs, and the given ones; a later part logs into ``csv-2``, unless ``anew``."""
    if given is False:
        return []
    names = (f"csv-{number}" if number > 1 else "csv" for number in count(1))
    part = next(name for name in names if anew or not (folder / LOGS / name).exists())
    ours: list[Logger] = [CSVLogger(str(folder), LOGS, part)]
    try:
        check_package("tensorboard", "tensorboard", f"TensorBoard's log, beside {folder / LOGS / part},")
    except ValueError as missing:
        rank_zero_info(f"left out: {missing}")
    else:
        ours.append(SortedTensorBoard(str(folder), LOGS, "tb", default_hp_metric=False))
    remote = {"wandb": {"name": folder.name, "save_dir": str(folder / LOGS)}, "mlflow": {"run_name": folder.name}}
    return [*ours, *build_parts("logger", given, **remote)]
