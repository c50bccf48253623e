"""What ``subtoken_config.json`` says, read as data: every key, type and range is checked before anything is built."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subtoken_train.artifact.agreement import check_adapter_files, check_merged_files
from subtoken_train.artifact.identity import Identity
from subtoken_train.artifact.whole_folder import CONFIG_FILE
from subtoken_train.documents import check_file_name, read_json
from subtoken_train.engine.build import Stage2Config
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.load import BackboneConfig, check_backbone
from subtoken_train.families.lora import LoraSettings, check_lora
from subtoken_train.reducers import REDUCERS, split_settings
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.typed import checked, shown, typed

SCHEMA_VERSION = 4
"""1: without ``stage2``. 2: with it; a reader of 1 would leave its output LoRA out. 3: with ``merged``. 4: a reducer's
settings are its own; up to 3 they were those of every method."""
_OWN_SETTINGS = 4
_SINCE = {
    **dict.fromkeys(("backbone", "lora", "reducer", "routing", "identity", "training", "versions"), 1),
    "stage2": 2,
    "merged": 3,
}
_TRAINING = {"name": str, "steps": int, "seed": int | None}
"""What is read of ``training`` beside the card."""


@dataclass
class AdapterConfig:
    """What ``subtoken_config.json`` holds."""

    backbone: BackboneConfig
    lora: LoraSettings
    reducer: Reducer
    routing: RoutingConfig | None
    identity: Identity
    training: dict[str, Any] = field(default_factory=dict)
    """How it came to be: recipe digest, steps, seed; for the reader, never for loading."""
    stage2: Stage2Config | None = None
    """Set where routers were trained on the frozen LoRA of ``stage2.adapter``, which this folder holds as well."""
    merged: bool = False
    """Whether the folder holds the backbone with the LoRA in its weights, instead of the LoRA."""


def read_config(folder: Path) -> AdapterConfig:
    """A folder's configuration, once its other files are known to say the same; no weight is read.

    Raises:
        ValueError: ``subtoken_config.json`` is missing, broken or newer, holds other keys, types or ranges than it
            should, or contradicts ``adapter_config.json`` or the tensors' shapes.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not an adapter folder: it has no {CONFIG_FILE}")
    config = _parsed(read_json(path), path)
    try:
        check_lora(config.lora)
        check_backbone(config.backbone)
        if config.stage2 is not None and config.stage2.output_lora is not None:
            check_lora(config.stage2.output_lora)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if config.merged:
        check_merged_files(folder)
    else:
        output = None if config.stage2 is None else config.stage2.output_lora
        check_adapter_files(folder, config.identity.model_type, config.backbone.path, config.lora, output)
    return config


def _parsed(record: Any, path: Path) -> AdapterConfig:
    if not isinstance(record, dict):
        raise ValueError(f"{path} is {shown(record)}; it must be a group of keys")
    schema = checked(int, record.get("schema_version"), f"{path}: schema_version")
    if schema > SCHEMA_VERSION:
        raise ValueError(f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}; please upgrade")
    if schema < 1:
        raise ValueError(f"{path} has schema {schema}; schemas count from 1")
    wanted = [key for key, since in _SINCE.items() if since <= schema]
    missing = [key for key in wanted if key not in record]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    checked(dict[str, Any], record["versions"], f"{path}: versions")
    content = {key: record[key] for key in record if key not in ("schema_version", "versions")}
    content["reducer"] = _reducer(record["reducer"], schema, f"{path}: reducer")
    config = typed(AdapterConfig, content, str(path))
    for key, kind in _TRAINING.items():
        if key in config.training:
            checked(kind, config.training[key], f"{path}: training.{key}")
    if "name" in config.training:
        check_file_name(config.training["name"], f"{path}: training.name")
    return config


def _reducer(record: Any, schema: int, place: str) -> Reducer:
    """The token reducer, by the settings of the class that it names."""
    if not isinstance(record, dict):
        raise ValueError(f"{place} is {shown(record)}; it must be a group of keys")
    if schema < _OWN_SETTINGS:
        record, others = split_settings(record)
        for setting, value in others.items():
            warnings.warn(
                f"{place}: {setting} {shown(value)} is left out; it is no setting of {record.get('name')}",
                SubTokenWarning,
                stacklevel=2,
            )
    try:
        method = REDUCERS.find(checked(str, record.get("name"), f"{place}: name"))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return typed(method, record, place)
