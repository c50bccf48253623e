"""Compare what a recipe names with the classes that it may name (``ALLOWED``), before anything is imported.

A recipe is a file that travels: with an adapter, a paper, a message. Without ``--allow-code`` it names only code that
ships with this package or with Lightning and takes plain values, never a function, a class, or settings that lead to
one. There is no wildcard. ``docs/recipe_safety.md`` tells users the same.

The parser behind recipes (jsonargparse) imports what it is told to name: ``class_path`` entries wherever a class, a
function or anything at all may stand, texts in such places, mappings inside texts, other files in place of a group.
So this reads the plain values of a recipe, or of one option, before the parser sees them, and does not ask what types
they will have: everything outside of the trainer's own keys for classes must be free of such entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from subtoken_train.documents import InvalidYAML, parse_yaml
from subtoken_train.errors import unknown_name
from subtoken_train.typed import shown


@dataclass(frozen=True)
class Allowed:
    """Classes that a key of the trainer may name, and their settings.

    Attributes:
        names: plain words that are no class.
        classes: path -> settings that a recipe may give; every value is a number, a text, true, false or null.
        groups: settings of these names are lists or mappings of such values.
        many: whether the key takes a list of classes.
    """

    names: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    groups: tuple[str, ...] = ()
    many: bool = False

    def words(self) -> list[str]:
        """List the names that may be written in one word."""
        return [*self.names, *dict.fromkeys(path.rpartition(".")[2] for path in self.classes)]

    def path_of(self, name: str) -> str | None:
        """Return the path of a class named in full or by its last word; None if it is not listed."""
        if name in self.classes:
            return name
        return next((path for path in self.classes if path.rpartition(".")[2] == name), None)


_CALLBACKS = "lightning.pytorch.callbacks."
_LOGGERS = "lightning.pytorch.loggers."
_PROFILERS = "lightning.pytorch.profilers."
_ENVIRONMENTS = "lightning.fabric.plugins.environments."
_STRATEGIES = "subtoken_train.training.strategies."
_STOPPING = (
    *("monitor", "min_delta", "patience", "verbose", "mode", "strict", "check_finite", "stopping_threshold"),
    *("divergence_threshold", "check_on_train_epoch_end", "log_rank_zero_only"),
)
_DDP = (
    *("process_group_backend", "start_method", "timeout", "dim", "broadcast_buffers", "init_sync", "bucket_cap_mb"),
    *("find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph"),
    *("skip_all_reduce_unused_params", "batched_grad_copy"),
)
_WANDB = (
    *("name", "save_dir", "version", "offline", "dir", "id", "anonymous", "project", "log_model", "prefix"),
    *("checkpoint_name", "add_file_policy", "entity", "group", "job_type", "tags", "notes", "mode", "resume"),
)
_MLFLOW = (
    *("experiment_name", "run_name", "tracking_uri", "tags", "save_dir", "log_model", "prefix"),
    *("artifact_location", "run_id", "synchronous"),
)

ALLOWED = {
    "accelerator": Allowed(("auto", "cpu", "gpu", "cuda", "mps", "tpu"), {}),
    "strategy": Allowed(
        ("auto", "ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2"),
        {
            f"{_STRATEGIES}zero.ZeroStrategy": ("stage", "offload", "config"),
            f"{_STRATEGIES}Fsdp2Strategy": (),
            f"{_STRATEGIES}fsdp2.Fsdp2Strategy": (),
            "lightning.pytorch.strategies.DDPStrategy": _DDP,
            "lightning.pytorch.strategies.SingleDeviceStrategy": ("device",),
        },
        groups=("config",),
    ),
    "logger": Allowed(
        (),
        {
            f"{_LOGGERS}CSVLogger": ("save_dir", "name", "version", "prefix", "flush_logs_every_n_steps"),
            f"{_LOGGERS}TensorBoardLogger": (
                *("save_dir", "name", "version", "log_graph", "default_hp_metric", "prefix", "sub_dir"),
                *("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix"),
            ),
            f"{_LOGGERS}WandbLogger": _WANDB,
            f"{_LOGGERS}MLFlowLogger": _MLFLOW,
        },
        groups=("tags",),
        many=True,
    ),
    "callbacks": Allowed(
        (),
        {
            "subtoken_train.training.samples.SampleLog": (),
            f"{_CALLBACKS}DeviceStatsMonitor": ("cpu_stats",),
            f"{_CALLBACKS}EarlyStopping": _STOPPING,
            f"{_CALLBACKS}LearningRateMonitor": ("logging_interval", "log_momentum", "log_weight_decay"),
            f"{_CALLBACKS}ModelSummary": ("max_depth",),
            f"{_CALLBACKS}RichModelSummary": ("max_depth",),
            f"{_CALLBACKS}RichProgressBar": ("refresh_rate", "leave", "theme"),
            f"{_CALLBACKS}TQDMProgressBar": ("refresh_rate", "process_position", "leave"),
        },
        groups=("theme",),
        many=True,
    ),
    "profiler": Allowed(
        ("simple", "advanced", "pytorch"),
        {
            f"{_PROFILERS}SimpleProfiler": ("dirpath", "filename", "extended"),
            f"{_PROFILERS}AdvancedProfiler": ("dirpath", "filename", "line_count_restriction", "dump_stats"),
            f"{_PROFILERS}PassThroughProfiler": ("dirpath", "filename"),
            f"{_PROFILERS}PyTorchProfiler": (
                *("dirpath", "filename", "group_by_input_shapes", "emit_nvtx", "export_to_chrome", "row_limit"),
                *("sort_by_key", "record_module_names", "record_shapes", "profile_memory", "with_stack", "with_flops"),
            ),
        },
    ),
    "plugins": Allowed(
        (),
        {
            f"{_ENVIRONMENTS}SLURMEnvironment": ("auto_requeue", "requeue_signal"),
            f"{_ENVIRONMENTS}TorchElasticEnvironment": (),
            f"{_ENVIRONMENTS}LightningEnvironment": (),
        },
        many=True,
    ),
}
"""By key of the trainer: all that it may name."""

ZERO_SETTINGS = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "seq_parallel_size"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "activation_checkpointing"),
    *("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("optimizer", "scheduler", "fp16", "bf16", "torch_autocast"),
)
"""Keys of DeepSpeed's JSON in ``ZeroStrategy.config``; others compile, profile, load or tune by what they name.

Those of the last two lines are refused by ``zero_settings``, which says where the recipe says them.
"""


_SPEC = ("class_path", "init_args", "dict_kwargs")
GROUPS = {
    **dict.fromkeys(("model", "data", "trainer", "checkpoint", "model.backbone", "model.reducer", "data.train"), ""),
    **dict.fromkeys(("evaluation", "early_stopping", "model.lora", "model.routing", "model.stage2"), " or null"),
    **dict.fromkeys(("model.stage2.output_lora", "model.optimizer", "model.distillation", "data.val"), " or null"),
    "model.loss_options": " or null",
    "model.routing.selector_options": "",
}
"""Keys that hold keys; a text there would be read as the name of another file."""
_MAX_TEXT = 4096
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ClassCheck:
    """Check of one recipe's pieces in order: its files, then the options.

    Settings may stand without a ``class_path`` where an earlier piece has named it, as in
    ``--trainer.logger.init_args.project``.
    """

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def complaints(self, piece: dict[str, Any]) -> Iterator[str]:
        """Yield what a piece names that is not listed, each as the start of a sentence.

        Raises:
            ValueError: a group of keys is something else, or a key is no name.
        """
        for key, value in piece.items():
            if key == "trainer" and isinstance(value, dict):
                _check_names(value, key)
                for inner, content in value.items():
                    name = inner.removesuffix("+")
                    if name in ALLOWED:
                        yield from self._named(name, content)
                    else:
                        yield from _plain(content, f"{key}.{inner}")
            else:
                yield from _plain(value, key)

    def _named(self, key: str, value: Any) -> Iterator[str]:
        """Check a value of one of the trainer's keys for classes."""
        allowed, place = ALLOWED[key], f"trainer.{key}"
        value = loaded(value, place)
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, str):
            if value not in allowed.names:
                yield from self._class(key, value)
        elif isinstance(value, dict):
            yield from self._spec(key, value)
        elif isinstance(value, list) and allowed.many:
            for each in value:
                yield from self._named(key, each)
        else:
            raise ValueError(f"{place} is {shown(value)}; it must be a name or a class_path with its init_args")

    def _class(self, key: str, name: object) -> Iterator[str]:
        path = ALLOWED[key].path_of(name) if isinstance(name, str) else None
        if path is None and isinstance(name, str) and name.isidentifier() and ALLOWED[key].names:
            raise unknown_name(f"trainer.{key}", name, ALLOWED[key].words())
        if path is None:
            yield f"trainer.{key} names {shown(name)}"
        else:
            self._last[key] = path

    def _spec(self, key: str, value: dict[str, Any]) -> Iterator[str]:
        """Check ``{class_path, init_args}``, or settings of the class that was named before."""
        place = f"trainer.{key}"
        _check_names(value, place)
        if "class_path" in value:
            self._last.pop(key, None)
            yield from self._class(key, value["class_path"])
        groups = [{name: each for name, each in value.items() if name not in _SPEC}]
        for group in _SPEC[1:]:
            given = value.get(group)
            if isinstance(given, dict):
                groups.append(given)
            elif given is not None:
                raise ValueError(f"{place}.{group} is {shown(given)}; it must be a group of keys")
        if not any(groups) or ("class_path" in value and key not in self._last):
            return  # nothing more, or complained of already
        if key not in self._last:
            yield f"{place} has settings for a class, but no class_path before them names it"
            return
        for settings in groups:  # each by itself: a name that stands in two of them is read twice
            yield from _settings(ALLOWED[key], self._last[key], settings, place)


def _settings(allowed: Allowed, path: str, settings: dict[str, Any], place: str) -> Iterator[str]:
    """Yield settings of a listed class that are not listed, or are more than a plain value."""
    name = path.rpartition(".")[2]
    for key, value in settings.items():
        content = loaded(value, f"{place}.{key}")
        if content is None:
            continue
        if key not in allowed.classes[path]:
            yield f"{place} gives {name} the setting {shown(key)}"
        elif key == "config":
            yield from _zero_config(content, place)
        elif (key in allowed.groups) != isinstance(content, dict | list):
            yield f"{place} gives {name}.{key} {'one value' if key in allowed.groups else 'a group of values'}"
        else:
            yield from _plain(content, f"{place}.{key}", free_keys=True)


def _zero_config(content: Any, place: str) -> Iterator[str]:
    """Check DeepSpeed's own settings."""
    if not isinstance(content, dict):
        yield f"{place} names a file of DeepSpeed settings"
        return
    for key in content:
        if key not in ZERO_SETTINGS:
            yield f"{place} gives DeepSpeed the setting {shown(key)}"
    yield from _plain(content, f"{place}.config", free_keys=True)


def _plain(value: Any, place: str, free_keys: bool = False) -> Iterator[str]:
    """Yield anything that the parser would import or open."""
    value = loaded(value, place)
    if place in GROUPS and isinstance(value, str):
        raise ValueError(f"{place} is {shown(value)}; it must be a group of keys{GROUPS[place]}")
    if isinstance(value, dict):
        if not free_keys:
            _check_names(value, place)
        for key, each in value.items():
            if str(key).strip("+") in _SPEC or str(key).startswith("__"):
                yield f"{place} holds {shown(key)}"
            else:
                yield from _plain(each, f"{place}.{key}", free_keys)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _plain(each, place, free_keys)


def loaded(value: Any, place: str) -> Any:
    """Return a text as the parser reads it: a list or mapping written in a text becomes one.

    Raises:
        ValueError: longer than a setting is, or past the bounds of ``documents.parse_yaml``.
    """
    if not isinstance(value, str):
        return value
    if len(value) > _MAX_TEXT:
        raise ValueError(f"{place} is a text of {len(value):,} characters; the limit is {_MAX_TEXT:,}")
    if not any(sign in value for sign in "[{:-&*!?|>"):
        return value
    try:
        parse_yaml(value, place)  # depth, aliases, repeated keys
        known = True
    except InvalidYAML:
        known = False
    try:  # the parser's own loader: the two do not accept the very same texts
        content = yaml.load(value, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError):
        return value
    if not isinstance(content, dict | list):
        return value
    if not known:
        raise ValueError(f"{place} is {shown(value)}: neither clearly a text nor clearly a group of values")
    return content


def _check_names(group: dict[Any, Any], place: str) -> None:
    """Refuse keys that are no names, as ``a.b: 1`` or numbers. A ``+`` at the end appends to a list."""
    for key in group:
        if not isinstance(key, str) or not key.removesuffix("+").isidentifier():
            raise ValueError(f"{place}: {shown(key)} is not a key; keys are names, one under the other")
