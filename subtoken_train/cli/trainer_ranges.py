"""Check the ranges of Lightning's own settings against one table, before the trainer is built.

The parser checks types; this refuses numbers (and the few texts) that Lightning would take and fail on later,
train nothing with, or never come back from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from subtoken_train.cli.trainer_parts import ACCELERATORS, KINDS
from subtoken_train.errors import unknown_name
from subtoken_train.typed import shown

Check = Callable[[Any], str | None]
"""Says what is wrong with a value ("it must be ..."); None: nothing, or nothing that a range could say."""
_MANY = 10**9
_DEVICES = re.compile(r"auto|-1|\d+(,\d+)*,?")
_CLOCK = re.compile(r"\d{1,4}:[0-2]?\d:[0-5]?\d:[0-5]?\d")


def number(value: Any) -> float | int | None:
    """Return a number, also from its text (YAML 1.1 leaves ``1e-4`` one); None for anything else, booleans included."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(low: int, high: int = _MANY, also: int | None = None) -> Check:
    def check(value: Any) -> str | None:
        got = number(value)
        if got is None or low <= got <= high or (also is not None and got == also):
            return None
        start = "" if also is None else f"{also} or "
        return f"it must be {start}a whole number from {low} to {high:,}"

    return check


def _clip_at(value: Any) -> str | None:
    got = number(value)
    return None if got is None or 0 <= got < math.inf else "it must be a finite number, 0 or more"


def _share(least: int) -> Check:
    """Allow a whole number of batches, ``least`` or more, or a share of all, 0 to 1, as a float."""

    def check(value: Any) -> str | None:
        got = number(value)
        if got is None:
            return _clock(value) if isinstance(value, str) else None
        whole = isinstance(value, int)
        if (whole and least <= got <= _MANY) or (not whole and math.isfinite(got) and least * 1e-9 <= got <= 1):
            return None
        return f"it must be a whole number of batches, {least} or more, or a share of all of them, up to 1.0"

    return check


def _clock(value: Any) -> str | None:
    if not isinstance(value, str) or _CLOCK.fullmatch(value):
        return None
    return "it must be DD:HH:MM:SS (days, hours, minutes, seconds)"


def _devices(value: Any) -> str | None:
    if isinstance(value, list):
        ids = [each for each in value if isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1024]
        good = 0 < len(ids) == len(value) == len(set(ids))
        return None if good else "a list names devices, each once: [0, 1]"
    if isinstance(value, str) and not _DEVICES.fullmatch(value):
        return "it must be auto, -1 (all), a count, or a list of device numbers"
    if isinstance(value, str) and "," in value:
        return _devices([int(each) for each in value.split(",") if each])
    return None if value == "auto" else _whole(1, 1024, also=-1)(value)


def _clipping(value: Any) -> str | None:
    known = not isinstance(value, str) or value in ("norm", "value")
    return None if known else "it must be norm or value"


def _precision(value: Any) -> str | None:
    engine = isinstance(value, str) and value.startswith("transformer-engine")
    return "LoRA does not know its layers; use bf16-mixed" if engine else None


def _never(refused: bool, why: str) -> Check:
    return lambda value: f"leave it out: {why}" if value is refused else None


def _accelerator(value: Any) -> str | None:
    if isinstance(value, str) and value not in ACCELERATORS:
        raise unknown_name("trainer.accelerator", value, ACCELERATORS)
    return None


def _no_plugins(value: Any) -> str:
    return "leave it out: Lightning finds the launcher's environment (SLURM, torchrun) itself"


def _any(value: Any) -> None:
    """Allow anything: true or false, or a text that the parser or the trainer knows."""


_UNRANGED = (
    *("enable_progress_bar", "enable_model_summary", "enable_autolog_hparams", "default_root_dir", "model_registry"),
    *("deterministic", "benchmark", "inference_mode", "detect_anomaly", "sync_batchnorm", "use_distributed_sampler"),
)
_LIMIT, _OPTIONAL_COUNT = _share(0), _whole(0)
SETTINGS: dict[str, Check] = {
    **dict.fromkeys((*KINDS, *_UNRANGED), _any),
    "accelerator": _accelerator,
    "plugins": _no_plugins,
    "devices": _devices,
    "num_nodes": _whole(1, 4096),
    "precision": _precision,
    "fast_dev_run": _OPTIONAL_COUNT,
    "max_epochs": _whole(1, also=-1),
    "min_epochs": _OPTIONAL_COUNT,
    "max_steps": _whole(1, also=-1),
    "min_steps": _OPTIONAL_COUNT,
    "max_time": _clock,
    "limit_train_batches": _share(1),
    "limit_val_batches": _LIMIT,
    "limit_test_batches": _LIMIT,
    "limit_predict_batches": _LIMIT,
    "overfit_batches": _LIMIT,
    "val_check_interval": _share(1),
    "check_val_every_n_epoch": _whole(1),
    "num_sanity_val_steps": _whole(0, also=-1),
    "log_every_n_steps": _whole(1),
    "enable_checkpointing": _never(False, "every run keeps checkpoints"),
    "accumulate_grad_batches": _whole(1, 10**6),
    "gradient_clip_val": _clip_at,
    "gradient_clip_algorithm": _clipping,
    "barebones": _never(True, "every run logs and keeps checkpoints"),
    "reload_dataloaders_every_n_epochs": _OPTIONAL_COUNT,
}
"""Every key of the trainer."""


def check_setting(key: str, value: Any) -> None:
    """Raise a worded ``ValueError`` where a value of ``trainer.<key>`` is out of range."""
    if value is not None and (words := SETTINGS[key](value)):
        raise ValueError(f"trainer.{key} is {shown(value)}; {words}")
