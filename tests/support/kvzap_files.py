"""Calibration files for random models, made once: KVzap's nets, scores of heads, files of any backbone or of none."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from subtoken_train.calibrations import Calibration, CalibrationData, write_calibration
from subtoken_train.evictions import notation_names
from subtoken_train.evictions.kvzip import TokenScorers
from subtoken_train.evictions.snapkv import HeadScores
from subtoken_train.families.family import Family, shapes_digest
from subtoken_train.types import Identity
from tests.support.prompt_views import KV_HEADS, LAYERS, MODEL

NEEDED = ("kvzap", "headkv", "sparsemm")


def drawn_nets(layers: int, heads: int, width: int, hidden: int = 0, seed: int = 0) -> TokenScorers:
    """Nets of every layer; their scores are about as large as logs of attention."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(hidden, width), (hidden,), (heads, hidden), (heads,)] if hidden else [(heads, width), (heads,)]
    scale = 3 * max(hidden, width) ** -0.5
    return TokenScorers.of([[torch.randn(shape, generator=draw) * scale for shape in shapes] for _ in range(layers)])


def drawn_heads(layers: int, heads: int, seed: int = 0) -> HeadScores:
    score = torch.rand(layers * heads, generator=torch.Generator().manual_seed(seed)) ** 3
    score[1] = 0
    return HeadScores(score.view(layers, heads).tolist())


@cache
def _written(
    method: str, path: str | None, model_type: str, digest: str, layers: int, heads: int, width: int, hidden: int
) -> str:
    folder = Path(tempfile.mkdtemp(prefix="calibrated-"))
    numbers = drawn_nets(layers, heads, width, hidden) if method == "kvzap" else drawn_heads(layers, heads)
    return written(folder / f"{method}.json", method, numbers, Identity(path, None, model_type, digest))


def settings_for(notation: str, family: Family | None = None, hidden: int = 0) -> dict[str, Any]:
    method = notation_names(notation)[-1]
    if method not in NEEDED:
        return {}
    if family is None:
        made_on, sizes = (NOBODY.path, NOBODY.model_type, NOBODY.digest), (LAYERS, KV_HEADS, MODEL)
    else:
        made_on = ("random", str(family.model.config.model_type), shapes_digest(family))
        sizes = family.shape.num_layers, family.shape.num_kv_heads, family.hidden_size
    return {"calibration": _written(method, *made_on, *sizes, hidden)}


NOBODY = Identity("nowhere/model", None, "llama", "0" * 64)


def written(path, method, numbers, backbone=NOBODY, **settings):
    write_calibration(path, Calibration(method, backbone, settings, numbers, CalibrationData("tests", 1, 2)))
    return str(path)
