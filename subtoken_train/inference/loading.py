"""From a name to a model in evaluation mode: an adapter with the backbone that it names, or a backbone alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from subtoken_train.artifact.config import read_config
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.artifact.source import find_adapter
from subtoken_train.artifact.whole_folder import CONFIG_FILE
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import unknown_name
from subtoken_train.families.load import BackboneConfig, load_family
from subtoken_train.reducers import ReducerConfig, build_reducer


def load_backbone(
    path: str | Path,
    revision: str | None = None,
    backbone: BackboneConfig | str | None = None,
    reducer: ReducerConfig | None = None,
) -> CompressedBackbone:
    """An adapter folder or a backbone, from disk or from the Hub; see ``SubTokenModel.from_pretrained``.

    Raises:
        ValueError: no such name or revision, or arguments of the other kind.
    """
    folder = find_adapter(path, revision)
    if folder is None:
        if isinstance(backbone, str):
            raise ValueError(f"{path} is not an adapter folder (no {CONFIG_FILE}); backbone={backbone!r} needs one")
        source = backbone or BackboneConfig()
        family = load_family(replace(source, path=str(path), revision=revision or source.revision))
        chosen = ReducerConfig(name="none") if reducer is None else reducer
        return CompressedBackbone(family, build_reducer(chosen, family.shape.num_layers))
    if reducer is not None:
        raise ValueError(f"{path} is an adapter with its own token reducer; leave reducer out")
    config = read_config(folder)
    if config.merged and isinstance(backbone, str):
        raise ValueError(f"{path} is merged and holds its own backbone; leave backbone out")
    own = replace(config.backbone, path=backbone, revision=None) if isinstance(backbone, str) else backbone
    return read_adapter(folder, own)[1]


def device_of(name: str) -> torch.device:
    """A device of this machine by its name; ``auto`` is the first GPU where there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = ["auto", "cpu", *[f"cuda:{i}" for i in range(torch.cuda.device_count())]]
    if name not in (*known, "cuda") or (name == "cuda" and "cuda:0" not in known):
        raise unknown_name("device of this machine", name, known)
    return torch.device(name)
