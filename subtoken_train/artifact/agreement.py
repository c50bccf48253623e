"""Whether an adapter folder's files say the same, found out from headers before anything is built or allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from subtoken_train.artifact.tensors import read_shapes
from subtoken_train.documents import read_json
from subtoken_train.errors import unknown_name
from subtoken_train.families import FAMILIES
from subtoken_train.families.local_files import PEFT_FILE, check_local_files
from subtoken_train.families.lora import OUTPUT_ADAPTER, LoraSettings
from subtoken_train.typed import shown

LORA_FILE = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".pyc", ".py")
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_dora": False,
    "use_rslora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    **dict.fromkeys(
        ("modules_to_save", "exclude_modules", "layers_to_transform", "layer_replication", "target_parameters")
    ),
    "trainable_token_indices": None,
}
"""Settings of peft that would change what the tensors mean: ours are always these."""


def check_adapter_files(
    folder: Path, model_type: str, backbone: str, lora: LoraSettings, output_lora: LoraSettings | None
) -> None:
    """Compare ``subtoken_config.json`` with peft's files: settings of both LoRAs, and the ranks of their tensors.

    Args:
        folder: the adapter folder, not merged.
        model_type: of the backbone; names the modules.
        backbone: the path that the folder names.
        lora: settings of the LoRA on q and v.
        output_lora: of the one on ``o_proj``; None where there is none.

    Raises:
        ValueError: a file is missing, broken, or says something else.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"{folder}: {unknown_name('backbone family (identity.model_type)', model_type, FAMILIES)}")
    family = FAMILIES[model_type]
    _check_lora_files(folder, lora, family.lora_pattern, backbone)
    if output_lora is not None:
        _check_lora_files(
            folder / OUTPUT_ADAPTER, output_lora, family.lora_pattern.replace("(q_proj|v_proj)", "o_proj"), backbone
        )


def check_merged_files(folder: Path) -> None:
    """Raise a worded ``ValueError`` unless a merged folder holds its weights as safetensors, and no LoRA and no code.

    Nothing is read but JSON and the headers of the weights.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _PICKLES:
            raise ValueError(f"{path} may hold code and is not read; a merged folder holds safetensors alone")
        if path.name in (PEFT_FILE, LORA_FILE):
            raise ValueError(f"{folder} says that it is merged, and holds {path.name}: the files disagree")
    check_local_files(folder)
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ValueError(f"{folder} says that it is merged, but holds no model.safetensors: it is incomplete")
    for path in sorted(folder.glob("model*.safetensors")):
        read_shapes(path)


def _check_lora_files(folder: Path, lora: LoraSettings, pattern: str, backbone: str) -> None:
    path = folder / PEFT_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: the adapter folder is incomplete")
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is {shown(found)}; it must be a group of keys")
    own = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": pattern,
        "base_model_name_or_path": backbone,
    }
    for key, wanted in {**_PLAIN, **own}.items():
        value = found.get(key, None if key in own else wanted)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            said = "subtoken_config.json says" if key in own else "an adapter of this package has"
            raise ValueError(f"{path}: {key} is {shown(value)}, and {said} {shown(wanted)}: the files disagree")
    _check_rank(folder / LORA_FILE, lora.rank)


def _check_rank(path: Path, rank: int) -> None:
    """Ranks stand in the tensors' shapes: a wrong one would be allocated before it is found."""
    for name, shape in read_shapes(path).items():
        axis = 0 if ".lora_A." in name else 1 if ".lora_B." in name else None
        if axis is not None and (len(shape) != 2 or shape[axis] != rank):
            raise ValueError(f"{path}: tensor {name[:120]} has shape {shape}, which is not of rank {rank} (lora.rank)")
