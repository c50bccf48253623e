"""Read ``subtoken_config.json`` as data, and check it, and the headers of the folder's other files, before building."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors import safe_open
from torch import Tensor

from subtoken_train.artifact.whole_folder import CONFIG_FILE
from subtoken_train.documents import check_file_name, read_json
from subtoken_train.engine.build import Stage2Config
from subtoken_train.errors import SubTokenWarning, at_place, clipped, refuse
from subtoken_train.evictions import EVICTIONS
from subtoken_train.families import FAMILIES
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone
from subtoken_train.families.backbone_files import PEFT_FILE, check_local_files, read_kinds
from subtoken_train.families.decoder import FUSED, QV
from subtoken_train.families.load import named_family
from subtoken_train.families.lora import OUTPUT_ADAPTER, LoraSettings
from subtoken_train.reducers import ONCE_OF_ALL, REDUCERS, split_settings
from subtoken_train.reducers.base import Reducer
from subtoken_train.registry import Registry
from subtoken_train.routing import SELECTORS, RoutingConfig
from subtoken_train.typed import checked, shown, typed
from subtoken_train.types import Identity

_DTYPES = ("F32", "F16", "BF16")


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of a file's tensors, by name; only its header is read."""
    refuse((not path.is_file(), f"{path} is missing: the adapter folder is incomplete"))
    kinds = read_kinds(path)
    for name, (_, dtype) in kinds.items():
        refuse((dtype not in _DTYPES, f"{path}: tensor {name[:120]} is of type {dtype}; allowed: {', '.join(_DTYPES)}"))
    return {name: shape for name, (shape, _) in kinds.items()}


def read_exactly(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a file's tensors in ``expected``'s dtypes; they must have its names and shapes, no more, and no NaN."""
    shapes = read_shapes(path)
    missing, extra = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or extra:
        lacks, odd = (f"{len(names)} tensors {[name[:80] for name in names[:2]]}" for names in (missing, extra))
        raise ValueError(f"{path} does not fit this model: {lacks} are missing, {odd} are not expected")
    for name, shape in shapes.items():
        if 0 in shape or shape != list(expected[name].shape):
            raise ValueError(f"{path}: tensor {name} has shape {shape}, expected {list(expected[name].shape)}")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in shapes}
    check_finite(tensors, path)
    return {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}


def check_finite(tensors: Mapping[str, Tensor], place: Path) -> None:
    """Raise ``ValueError`` if a tensor holds NaN or infinity; ``place`` is the file or folder."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{place}: tensor {name} holds NaN or infinity; it was damaged, or its training diverged")


LORA_FILE = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".pyc", ".py")
_FREE = (
    "auto_mapping inference_mode init_lora_weights loftq_config lora_dropout megatron_core peft_version revision "
    "task_type"
)
"""Settings of peft that do not change what the tensors mean; all others are peft's own, but for those of a recipe."""

SCHEMA_VERSION = 7
"""1: without ``stage2``. 2: with it; a reader of 1 would leave its output LoRA out. 3: with ``merged``. 4: a reducer's
settings are its own; up to 3 they were those of every method. 5: further settings of reducers and routing (``ranking``,
``fill`` and others), which are today's defaults where a folder does not name them. 6: an anchor's ``matches``.
7: ``packages``, and a selector's own settings."""

_SINCE = {
    **dict.fromkeys(("backbone", "lora", "reducer", "routing", "identity", "training", "versions"), 1),
    "stage2": 2,
    "merged": 3,
    "packages": 7,
}
_TRAINING = {"name": str, "steps": int, "seed": int | None, "distillation": dict[str, Any], "loss": dict[str, Any]}
"""Keys of ``training`` that are read beside the card."""

_REGISTRIES: dict[str, Registry[Any]] = {
    "family": FAMILIES, "reducer": REDUCERS, "eviction": EVICTIONS, "selector": SELECTORS
}  # fmt: skip
_REQUIREMENT = re.compile(r"(?P<package>[A-Za-z0-9][\w.-]{0,127})==[A-Za-z0-9][\w.+!-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class Package:
    """An installed package that brought a method of an adapter; an eviction ranks for a context reducer."""

    kind: Literal["family", "reducer", "eviction", "selector"]
    name: str
    requirement: str

    def check(self, place: str) -> None:
        """Raise ``ValueError`` where the method is not there, or the requirement is none."""
        if (found := _REQUIREMENT.fullmatch(self.requirement)) is None:
            raise ValueError(f"{place}: packages: {shown(self.requirement)} is not written package==version")
        if self.name not in _REGISTRIES[self.kind]:
            named = f"{place}: {self.kind} {clipped(repr(self.name), 60)} comes from package {found['package']}"
            instead = f"if you trust it: pip install {self.requirement}"
            raise ValueError(f"{named}, which is not installed here, or is without it; {instead}")


@dataclass
class AdapterConfig:
    """Content of ``subtoken_config.json``, but for versions and packages, which are those of where it is written."""

    backbone: BackboneConfig
    lora: LoraSettings
    reducer: Reducer
    routing: RoutingConfig | None
    identity: Identity
    training: dict[str, Any] = field(default_factory=dict)
    """Origin of the adapter: recipe digest, steps, seed; for the reader, never for loading."""
    stage2: Stage2Config | None = None
    """Set where routers were trained on the frozen LoRA of ``stage2.adapter``, which this folder holds as well."""
    merged: bool = False  # True where the folder holds the backbone with the LoRA in its weights, instead of the LoRA

    def packages(self) -> list[dict[str, Any]]:
        """Return, each as a ``Package``, what installed packages brought and reading the adapter needs."""
        named = {"family": self.identity.model_type, "reducer": self.reducer.name, "eviction": self.reducer.name}
        named |= {} if self.routing is None else {"selector": self.routing.selector}
        found = [(kind, name, _REGISTRIES[kind].origin(name)) for kind, name in named.items()]
        return [{"kind": kind, "name": name, "requirement": origin} for kind, name, origin in found if origin]


def read_config(folder: Path) -> AdapterConfig:
    """Read a folder's configuration and check that its other files agree; no weight is read."""
    path = folder / CONFIG_FILE
    refuse((not path.is_file(), f"{folder} is not an adapter folder: it has no {CONFIG_FILE}"))
    config = _parsed(read_json(path), path)
    with at_place(f"{path}: "):
        check_backbone(config.backbone)
    if config.merged:
        _check_merged_files(folder)
        return config
    with at_place(f"{folder}: identity.model_type: "):
        pattern = named_family(config.identity.model_type).lora_pattern
    _check_lora_files(folder, config.lora, pattern, config.backbone.path)
    if config.stage2 is not None and (output := config.stage2.output_lora) is not None:
        _check_lora_files(folder / OUTPUT_ADAPTER, output, pattern.replace(QV, "o_proj"), config.backbone.path)
    return config


def _parsed(record: Any, path: Path) -> AdapterConfig:
    record = checked(dict[str, Any], record, str(path))
    schema = checked(int, record.get("schema_version"), f"{path}: schema_version")
    words = f"{path} has schema {schema}, this version reads 1 to {SCHEMA_VERSION}; a newer one reads more"
    refuse((not 1 <= schema <= SCHEMA_VERSION, words))
    if missing := [key for key, since in _SINCE.items() if since <= schema and key not in record]:
        raise ValueError(f"{path}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    checked(dict[str, Any], record["versions"], f"{path}: versions")
    for package in checked(list[Package], record.get("packages", []), f"{path}: packages"):
        package.check(str(path))
    content = {key: record[key] for key in record if key not in ("schema_version", "versions", "packages")}
    reducer = _reducer(record["reducer"], schema, f"{path}: reducer")
    config = typed(AdapterConfig, {**content, "reducer": reducer}, str(path))
    if config.merged and config.reducer.frozen_scout:
        raise ValueError(f"{path}: the LoRA is merged, so it cannot rank as frozen; export it without --merge-lora")
    for key, kind in _TRAINING.items():
        if key in config.training:
            checked(kind, config.training[key], f"{path}: training.{key}")
    if "name" in config.training:
        check_file_name(config.training["name"], f"{path}: training.name")
    return config


def _reducer(record: Any, schema: int, place: str) -> Reducer:
    """Build the token reducer from the settings of the class that it names."""
    record = checked(dict[str, Any], record, place)
    checked(str, record.get("name"), f"{place}: name")
    if schema < 4:  # settings of every method were there
        record, others = split_settings(record)
        for setting, value in others.items():
            typed(REDUCERS.find(ONCE_OF_ALL[setting][0]), {setting: value}, place)  # a value that can have been written
            words = f"{place}: {setting} {shown(value)} is left out; it is not a setting of {record.get('name')}"
            warnings.warn(words, SubTokenWarning, stacklevel=2)
    with at_place(f"{place}: "):
        method = REDUCERS.find(record["name"])
    return typed(method, record, place)


def _check_merged_files(folder: Path) -> None:
    """Raise ``ValueError`` unless a merged folder holds its weights as safetensors, and no LoRA and no code."""
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _PICKLES:
            raise ValueError(f"{path} may hold code and is not read; a merged folder holds only safetensors")
        if path.name in (PEFT_FILE, LORA_FILE):
            raise ValueError(f"{folder} says that it is merged, and holds {path.name}: the files disagree")
    check_local_files(folder)
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ValueError(f"{folder} says that it is merged, but holds no model.safetensors: it is incomplete")
    for path in sorted(folder.glob("model*.safetensors")):
        read_shapes(path)


def _check_lora_files(folder: Path, lora: LoraSettings, pattern: str, backbone: str) -> None:
    """Compare what an unmerged folder says with peft's files: a LoRA's settings, and its tensors' ranks."""
    path = folder / PEFT_FILE
    refuse((not path.is_file(), f"{path} is missing: the adapter folder is incomplete"))
    found = checked(dict[str, Any], read_json(path), str(path))
    if found.get("target_modules") == pattern.replace(QV, FUSED):  # whether it is fused, the backbone's identity says
        pattern = pattern.replace(QV, FUSED)
    own = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": pattern, "base_model_name_or_path": backbone}
    for key, wanted in {**LoraConfig().to_dict(), "peft_type": "LORA", **own}.items():
        value = found.get(key, None if key in own else wanted)
        if (value != wanted or isinstance(value, bool) != isinstance(wanted, bool)) and key not in _FREE.split():
            said = "subtoken_config.json says" if key in own else "an adapter of this package has"
            raise ValueError(f"{path}: {key} is {shown(value)}, and {said} {shown(wanted)}: the files disagree")
    path = folder / LORA_FILE
    for name, shape in read_shapes(path).items():  # a wrong rank would be allocated before it is found
        axis = 0 if ".lora_A." in name else 1 if ".lora_B." in name else None
        wrong = axis is not None and (len(shape) != 2 or shape[axis] != lora.rank)
        refuse((wrong, f"{path}: tensor {name[:120]} has shape {shape}; it must have rank {lora.rank} (lora.rank)"))
