"""The trainer of a recipe: closed lists of what it may name, no path of a class, and the ranges of its settings.

A recipe writes a name, or a name with its settings (``strategy: {zero2: {offload: true}}``), which are plain values:
nothing in a recipe leads to other code (``docs/recipe_safety.md``). Types are checked with the trainer's signature;
``check_setting`` refuses what Lightning would take and fail on later, train nothing with, or never come back from.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from subtoken_train.documents import parse_yaml
from subtoken_train.errors import check_word, in_a_recipe, instead, refuse
from subtoken_train.registry import Registry
from subtoken_train.typed import shown, text_numbers


@dataclass(frozen=True)
class Nameable:
    """Names that a key of the trainer may hold, and their settings; a name of another package takes any settings.

    ``many``: the key takes a list; ``words`` name no class, and Lightning or ``run_loggers`` reads them.
    """

    names: Registry[Any]
    settings: Mapping[str, tuple[str, ...]]
    many: bool = False
    words: tuple[Any, ...] = (None,)


def _nameable(key: str, base: str, rows: Mapping[str, str], **more: Any) -> Nameable:
    """Make one of rows: by name the place of its class, and behind it the settings that a recipe may give it."""
    named = {name: row.split() for name, row in rows.items()}
    places = {name: place.replace("pl.", "lightning.pytorch.") for name, (place, *_) in named.items()}
    registry = Registry[Any](f"trainer.{key}", group=f"subtoken_train.{key}", package="", base=base, builtin=places)
    return Nameable(registry, {name: tuple(given) for name, (_, *given) in named.items() if given}, **more)


_ZERO = "subtoken_train.training.strategies:ZeroStrategy"
KINDS = {
    "strategy": _nameable(
        "strategy",
        "lightning.pytorch.strategies:Strategy",
        {
            "auto": "pl.strategies:DDPStrategy",
            "ddp": """pl.strategies:DDPStrategy process_group_backend find_unused_parameters gradient_as_bucket_view
            static_graph broadcast_buffers bucket_cap_mb""",
            **dict.fromkeys(("zero1", "zero2", "zero3"), f"{_ZERO} offload config"),
            "zero3_offload": f"{_ZERO} config",
            "fsdp2": "subtoken_train.training.strategies:Fsdp2Strategy",
        },
    ),
    "logger": _nameable(
        "logger",
        "lightning.pytorch.loggers:Logger",
        {
            "wandb": """pl.loggers:WandbLogger name save_dir version offline id project log_model prefix entity group
            job_type tags notes mode resume""",
            "mlflow": """pl.loggers:MLFlowLogger experiment_name run_name tracking_uri tags save_dir log_model prefix
            artifact_location run_id synchronous""",
        },
        many=True,
        words=(None, True, False),
    ),
    "callbacks": _nameable(
        "callbacks",
        "lightning.pytorch.callbacks:Callback",
        {
            "samples": "subtoken_train.training.panels.run_progress:SampleLog",
            "device_stats": "pl.callbacks:DeviceStatsMonitor cpu_stats",
            "learning_rate": "pl.callbacks:LearningRateMonitor logging_interval log_momentum log_weight_decay",
        },
        many=True,
    ),
}
"""By key of the trainer: all that a recipe may name there."""
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
ZERO_SETTINGS = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"),
    *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "seq_parallel_size"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "activation_checkpointing"),
)
"""Keys of DeepSpeed's JSON that ``config`` may hold: none that the recipe says elsewhere."""


def named_parts(key: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the names that ``trainer.<key>`` holds, each with its settings; nothing is imported."""
    kind = KINDS[key]
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = parse_yaml(value, f"trainer.{key}")
    if any(value is word for word in kind.words):
        return []
    parts = [_part(key, each) for each in (value if isinstance(value, list) and kind.many else [value])]
    names = [name for name, _ in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"trainer.{key} names {twice!r} twice; once is enough")
    return parts


def _part(key: str, value: Any) -> tuple[str, dict[str, Any]]:
    kind, settings = KINDS[key], dict[str, Any]()
    if isinstance(value, dict) and len(value) == 1:
        ((value, settings),) = value.items()
    path = settings if value == "class_path" else value.get("class_path") if isinstance(value, dict) else value
    if isinstance(path, str) and "." in path:
        last = path.rpartition(".")[2]
        names = (name for name, place in kind.names.builtin.items() if place.endswith(f":{last}"))
        hint = instead(f"trainer.{key}", last) or "write " + (next(names, None) or f"one of {', '.join(kind.names)}")
        own = f"or give your own class a name by an entry point of the group {kind.names.group} (docs/recipe_safety.md)"
        raise ValueError(f"trainer.{key} names {shown(path)}: a recipe names no class; {hint}, {own}")
    if not isinstance(value, str) or not isinstance(settings, dict | None):
        form = f"write a name, or a name with its settings: {key}: {{NAME: {{SETTING: VALUE}}}}"
        raise ValueError(f"trainer.{key} is {shown(value)}; {form}")
    check_word(f"trainer.{key}", value, kind.names)
    allowed, place = kind.settings.get(value, ()), f"trainer.{key} {value}"
    for name, each in (settings or {}).items() if value in kind.names.builtin else ():
        config, group = name == "config", isinstance(each, dict)
        refuse((not allowed, f"{place} takes no settings, and the recipe gives it {shown(name)}"))
        check_word(f"setting of {place}:", name, allowed)
        refuse(
            (config and not group, f"{place}.config is {shown(each)}; write DeepSpeed's settings below it"),
            (group and name not in ("tags", "config"), f"{place}.{name} is a group of values; it must be one value"),
        )
        for inner in each if config else ():
            check_word("setting of DeepSpeed", inner, ZERO_SETTINGS)
    return value, settings or {}


@in_a_recipe
def build_parts(key: str, value: Any, **defaults: Mapping[str, Any]) -> list[Any]:
    """Build what ``trainer.<key>`` names; ``defaults``: name -> settings that stand where the recipe gives none."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    built = []
    for name, settings in named_parts(key, value):
        try:
            built.append(KINDS[key].names[name](**{**defaults.get(name, {}), **settings}))
        except (TypeError, AttributeError, MisconfigurationException) as error:  # a value that the class does not take
            raise ValueError(f"trainer.{key} {name} cannot be built: {error}") from None
    return built


Check = Callable[[Any], str | None]
"""Says what is wrong with a value ("it must be ..."); None: nothing, or nothing that a range could say."""
_MANY = 10**9


def number(value: Any) -> float | int | None:
    """Return a number, also from its text (YAML 1.1 leaves ``1e-4`` one); None for anything else, booleans included."""
    if isinstance(value, str):
        return next(text_numbers(value, float), None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _unless(good: Callable[[Any], object], words: str) -> Check:
    return lambda value: None if good(value) else words


def _whole(low: int, high: int = _MANY, also: int | None = None) -> Check:
    start = "" if also is None else f"{also} or "
    words = f"it must be {start}a whole number from {low} to {high:,}"
    return _unless(lambda value: (got := number(value)) is None or low <= got <= high or got == also, words)


def _batches(least: int) -> Check:
    """Allow a whole number of batches, ``least`` or more, or a share of all, 0 to 1, as a float."""
    words = f"it must be a whole number of batches, {least} or more, or a share of all of them, up to 1.0"

    def check(value: Any) -> str | None:
        if (got := number(value)) is None:
            return _clock(value)
        return None if (least <= got <= _MANY if isinstance(value, int) else least * 1e-9 <= got <= 1) else words

    return check


_clock = _unless(
    lambda value: value is None or re.fullmatch(r"\d{1,4}:[0-2]?\d:[0-5]?\d:[0-5]?\d", str(value)),
    "it must be DD:HH:MM:SS (days, hours, minutes, seconds)",
)


def _devices(value: Any) -> str | None:
    if isinstance(value, str) and not re.fullmatch(r"auto|-1|\d+(,\d+)*,?", value):
        return "it must be auto, -1 (all), a count, or a list of device numbers"
    if isinstance(value, str) and "," in value:
        value = [int(each) for each in value.split(",") if each]
    if isinstance(value, list):
        ids = [each for each in value if isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1024]
        return None if 0 < len(ids) == len(value) == len(set(ids)) else "a list names devices, each once: [0, 1]"
    return None if value == "auto" else _whole(1, 1024, also=-1)(value)


_FREE = (
    *("enable_progress_bar", "enable_model_summary", "enable_autolog_hparams", "default_root_dir", "model_registry"),
    *("deterministic", "benchmark", "inference_mode", "detect_anomaly", "sync_batchnorm", "use_distributed_sampler"),
)
SETTINGS: dict[str, Check] = {
    **dict.fromkeys((*KINDS, *_FREE), lambda value: None),  # true or false, or what the parser or the trainer knows
    **dict.fromkeys(("fast_dev_run", "min_epochs", "min_steps", "reload_dataloaders_every_n_epochs"), _whole(0)),
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), _batches(0)),
    "overfit_batches": _batches(0),
    **dict.fromkeys(("limit_train_batches", "val_check_interval"), _batches(1)),
    **dict.fromkeys(("max_epochs", "max_steps"), _whole(1, also=-1)),
    **dict.fromkeys(("check_val_every_n_epoch", "log_every_n_steps"), _whole(1)),
    "num_sanity_val_steps": _whole(0, also=-1),
    "accelerator": lambda value: (
        check_word("trainer.accelerator", value, ACCELERATORS) if isinstance(value, str) else None
    ),
    "devices": _devices,
    "num_nodes": _whole(1, 4096),
    "accumulate_grad_batches": _whole(1, 10**6),
    "max_time": _clock,
    "gradient_clip_val": _unless(
        lambda value: 0 <= (number(value) or 0) < math.inf, "it must be a finite number, 0 or more"
    ),
    "gradient_clip_algorithm": _unless(
        lambda value: not isinstance(value, str) or value in ("norm", "value"), "it must be norm or value"
    ),
    "precision": _unless(
        lambda value: not str(value).startswith("transformer-engine"), "LoRA does not know its layers; use bf16-mixed"
    ),
    "profiler": lambda value: "leave it out; profile the whole command (py-spy record -- subtoken-train fit ...)",
    "plugins": lambda value: "leave it out: Lightning finds the launcher's environment (SLURM, torchrun) itself",
    "enable_checkpointing": _unless(lambda value: value is not False, "leave it out: every run keeps checkpoints"),
    "barebones": _unless(lambda value: value is not True, "leave it out: every run logs and keeps checkpoints"),
}
"""Every key of the trainer."""


def check_setting(key: str, value: Any) -> None:
    """Raise a worded ``ValueError`` where a value of ``trainer.<key>`` is out of range."""
    if value is not None and (words := SETTINGS[key](value)):
        raise ValueError(f"trainer.{key} is {shown(value)}; {words}")
