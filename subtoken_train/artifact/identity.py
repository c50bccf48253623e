"""Which backbone an adapter belongs to: name, revision, and a hash of its configuration and tensor shapes.

And what an adapter folder holds, as one number: two trainings never have the same.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.shapes import shapes_digest
from subtoken_train.types import Identity


def identify(family: Family, config: BackboneConfig) -> Identity:
    """The identity of a loaded (or laid-out) backbone.

    The same with and without LoRA, however it is quantised, and whether its weights are shared out or not.
    """
    return Identity(config.path, config.revision, str(family.model.config.model_type), shapes_digest(family))


def check_identity(wanted: Identity, found: Identity) -> None:
    """Raise a worded ``ValueError`` where an adapter meets a backbone of another architecture."""
    if wanted.digest != found.digest:
        raise ValueError(
            f"the adapter was trained on {wanted.path!r} ({wanted.model_type}, {wanted.digest[:12]}), but the backbone "
            f"is {found.path!r} ({found.model_type}, {found.digest[:12]}); load the backbone that it names"
        )


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
