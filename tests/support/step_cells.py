"""Caches of every kind that a decode step meets: sets of entries, indices, precisions, windows, pages."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from subtoken_train.cache import pack
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from tests.support import truth_cells
from tests.support.text_families import text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, compression_of
from tests.support.truth_models import family_of


@dataclass(frozen=True)
class StepCell:
    """A filled cache: factors that differ from ``PLAIN_CELL``; pieces are found by ``places``, or by bits."""

    cell: dict[str, str]
    places: bool = True
    compression: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    device: str = "cpu"

    @torch.no_grad()
    def filled(self) -> tuple[CompressedBackbone, PackedCache, torch.Tensor]:
        cell = {**PLAIN_CELL, "eviction": "none", "batch": "three_left", "protocol": "query_aware", **self.cell}
        with pytest.MonkeyPatch.context() as patch:
            if self.layers is not None or self.device != "cpu":
                patch.setattr(truth_cells, "family_of", self._family)
            backbone, batch = (
                backbone_of(cell).to(self.device),
                on_device(truth_cells.batch_of(cell), torch.device(self.device)),
            )
            compression = Compression(**{**vars(compression_of(cell)), **self.compression})
            cache = PackedCache(backbone.family.shape.num_layers)
            patch.setattr(pack, "MAX_INDEX", 1e9 if self.places else 0.0)
            opened = open_prompts(backbone, batch, cache, compression, cell["protocol"])
        return backbone, cache, opened.logits_BV.argmax(-1)[:, None]

    def _family(self, name: str, dtype: torch.dtype = torch.float32) -> Family:
        family = deepcopy(family_of(name, dtype)) if self.layers is None else text_family(name, self.layers)
        family.model.to(self.device, dtype)
        return family


ROUTED = {"selector": "linear"}
CELLS = {
    "whole": StepCell({}),
    "one": StepCell({"batch": "one"}),
    "places": StepCell(ROUTED),
    "bits": StepCell(ROUTED, places=False),
    "per_head_bits": StepCell(ROUTED | {"layout": "per_head"}, places=False),
    "own_heads": StepCell(ROUTED | {"eviction": "own_sets"}),
    "own_heads_bits": StepCell(ROUTED | {"eviction": "own_sets"}, places=False),
    "shared_set": StepCell(ROUTED | {"eviction": "shared_set"}, places=False),
    "int8": StepCell(ROUTED | {"precision": "int8"}),
    "int4_own_heads": StepCell(ROUTED | {"precision": "int4", "eviction": "own_sets", "groups": "2/1"}, places=False),
    "int4_rotated": StepCell(ROUTED | {"precision": "int4_rotated", "groups": "2/1"}),
    "kivi4": StepCell(ROUTED | {"precision": "kivi4", "groups": "2/1"}),
    "kivi2_own_heads": StepCell({"precision": "kivi2", "eviction": "own_sets"}),
    "bf16": StepCell(ROUTED | {"precision": "bf16"}),
    "images": StepCell(ROUTED | {"family": "llava_gqa", "reducer": "fastv_decoder"}),
    "mrope": StepCell(ROUTED | {"family": "qwen2_5_vl", "eviction": "own_sets"}),
    "window": StepCell(ROUTED | {"family": "qwen2_window"}),
    "window_own_heads": StepCell(ROUTED | {"family": "qwen2_window", "eviction": "own_sets"}, places=False),
    "pages": StepCell({"eviction": "quest_steps"}),
    "padded_tail": StepCell(ROUTED | {"protocol": "context_first"}, places=False),
    "padded_tail_own_heads": StepCell(ROUTED | {"protocol": "context_first", "eviction": "own_sets"}),
    "cut_keys": StepCell(ROUTED | {"keys": "cut"}),
    "cut_keys_own_heads": StepCell(ROUTED | {"keys": "cut", "eviction": "own_sets"}, places=False),
    "online": StepCell(ROUTED | {"eviction": "snapkv"}, compression={"every": 30, "keep": 40, "unit": "tokens"}),
    "online_h2o": StepCell({"eviction": "h2o"}, compression={"every": 30, "keep": 40, "unit": "tokens"}),
}
