"""Which backbone an adapter belongs to: name, revision, and a hash of its configuration and tensor shapes.

And what an adapter folder holds, as one number: two trainings never have the same.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from subtoken_train.calibrations import Calibration
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.functional.quantized import dense_shape
from subtoken_train.types import Identity


def identify(family: Family, config: BackboneConfig) -> Identity:
    """The identity of a loaded (or laid-out) backbone.

    The same with and without LoRA, however it is quantised, and whether its weights are shared out or not.
    """
    return Identity(config.path, config.revision, str(family.model.config.model_type), shapes_digest(family))


def shapes_digest(family: Family) -> str:
    """``Identity.digest`` of a backbone, in hexadecimal."""
    shapes = {
        # a weight that ZeRO-3 has split is empty, and knows its shape
        name.replace(".base_layer.", "."): list(getattr(parameter, "ds_shape", dense_shape(parameter)))
        for name, parameter in family.model.named_parameters()
        if ".lora_" not in name
    }
    model_type = str(family.model.config.model_type)
    return hashlib.sha256(json.dumps([model_type, sorted(shapes.items())]).encode()).hexdigest()


def check_identity(wanted: Identity, found: Identity) -> None:
    """Raise a worded ``ValueError`` where an adapter meets a backbone of another architecture."""
    if wanted.digest != found.digest:
        raise ValueError(
            f"the adapter was trained on {wanted.path!r} ({wanted.model_type}, {wanted.digest[:12]}), but the backbone "
            f"is {found.path!r} ({found.model_type}, {found.digest[:12]}); load the backbone that it names"
        )


def check_calibration(calibration: Calibration[Any] | None, family: Family) -> None:
    """Raise a worded ``ValueError`` where a calibration meets another backbone than its own; None fits all."""
    if calibration is not None:
        shape = family.shape
        calibration.check_backbone(shapes_digest(family), shape.num_layers, shape.num_kv_heads, shape.head_dim)


_FILES = ("*.json", "*.safetensors")
"""What a model is made of; the card and the recipe beside it may be written anew."""


def adapter_digest(folder: Path) -> str:
    """SHA-256 of an adapter folder's settings and tensors, in hexadecimal; the same wherever the folder lies.

    A merged folder's whole weights are read.
    """
    paths = sorted(
        (path.relative_to(folder).as_posix(), path) for kind in _FILES for path in folder.rglob(kind) if path.is_file()
    )
    digest = hashlib.sha256()
    for name, path in paths:
        with path.open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
