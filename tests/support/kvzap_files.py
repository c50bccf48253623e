"""KVzap's calibration files for random models, made once: nets drawn at random, linear and of two layers in turn."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from subtoken_train.evictions import notation_names
from subtoken_train.evictions.kvzap import TokenScorers
from subtoken_train.families.family import Family, shapes_digest
from subtoken_train.types import Identity
from tests.support.calibration_files import NOBODY, written
from tests.support.prompt_views import KV_HEADS, LAYERS, MODEL


def drawn_nets(layers: int, heads: int, width: int, hidden: int = 0, seed: int = 0) -> TokenScorers:
    """Nets of every layer; their scores are about as large as logs of attention."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(hidden, width), (hidden,), (heads, hidden), (heads,)] if hidden else [(heads, width), (heads,)]
    scale = 3 * max(hidden, width) ** -0.5
    return TokenScorers.of([[torch.randn(shape, generator=draw) * scale for shape in shapes] for _ in range(layers)])


@cache
def _written(path: str | None, model_type: str, digest: str, layers: int, heads: int, width: int, hidden: int) -> str:
    folder = Path(tempfile.mkdtemp(prefix="kvzap-"))
    made_on = Identity(path, None, model_type, digest)
    return written(folder / "nets.json", "kvzap", drawn_nets(layers, heads, width, hidden), made_on)


def settings_for(notation: str, family: Family | None = None, hidden: int = 0) -> dict[str, Any]:
    """Return the settings that a method cannot do without: KVzap's nets, of a model or of ``layer_views``."""
    if "kvzap" not in notation_names(notation):
        return {}
    if family is None:
        return {"calibration": _written(NOBODY.path, NOBODY.model_type, NOBODY.digest, LAYERS, KV_HEADS, MODEL, hidden)}
    shape, model_type = family.shape, str(family.model.config.model_type)
    sizes = shape.num_layers, shape.num_kv_heads, family.hidden_size
    return {"calibration": _written("random", model_type, shapes_digest(family), *sizes, hidden)}
