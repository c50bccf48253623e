"""Calls of ``generate`` of every kind, and caches of every kind that a decode step meets."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import on_device
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Batch, Plan, Region
from tests.support import truth_cells
from tests.support.helpers import opened
from tests.support.text_families import text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, compression_of
from tests.support.truth_models import CONTEXT, family_of, prompts

CELL = {**truth_cells.CELL, "eviction": "own_sets", "batch": "three_left"}
PLAIN = {"reducer": "none", "selector": "none", "eviction": "none"}
SERVED_CALLS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True},
    "sampled beams": {"num_beams": 3, "do_sample": True, "temperature": 0.7},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    "cuts": {"do_sample": True, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9, "num_return_sequences": 2},
    "tokens": {"suppress_tokens": [25, 77], "bad_words_ids": [[24]], "sequence_bias": [[[30], 4.0]]},
    "lengths": {"min_new_tokens": 4, "forced_eos_token_id": 2, "renormalize_logits": True},
    "stops": {"stop_strings": ["a", "e"]},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "prefix": {"prefix_allowed_tokens_fn": lambda *_: [20, 21, 22, 23], "num_beams": 2},
    "processors": {"logits_processor": LogitsProcessorList([lambda ids, scores: -scores])},
    "scores": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "config": {"generation_config": GenerationConfig(max_new_tokens=4, num_beams=2, pad_token_id=0, eos_token_id=2)},
    "long": {"max_new_tokens": None, "max_length": 48},
}
"""Settings of ``generate`` of every kind that acts on the logits, on the loop or on what is returned."""


def model_of(**levels: str) -> SubTokenModel:
    cell = CELL | levels
    if cell["family"] == "llama" and cell["reducer"] != "none":
        cell["reducer"] = "quest"
    return SubTokenModel.around(backbone_of(cell), compression_of(cell))


def inputs_of(model: SubTokenModel, kind: str = "three", pad_left: bool = True) -> dict:
    family = model.backbone.family
    batch = prompts(family, kind, pad_left)
    inputs = {"input_ids": batch.input_ids_BN, "attention_mask": (batch.regions_BN != Region.PADDING).long()}
    if batch.pixel_values is not None:
        inputs |= family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    return inputs


def batch_of(model: SubTokenModel, inputs: dict) -> Batch:
    """The batch that was run last, with its pixels again."""
    assert model.last.batch.pixel_values is None
    given = batch_from_inputs(
        model.backbone.family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, context_length=None
    )
    return replace(model.last.batch, pixel_values=given.pixel_values)


def settings_of(model: SubTokenModel) -> dict:
    settings = {"pad_token_id": model.tokenizer.pad_token_id}
    return settings | ({"context_length": CONTEXT} if model.backbone.family.image_token_id is None else {})


@dataclass
class Generation:
    """Generated ids [B, T] (end-of-text included, then padding) and what the prompt's cache kept."""

    token_ids_BT: Tensor
    plan: Plan
    cache: PackedCache


@torch.no_grad()
def generate_greedy(
    backbone: CompressedBackbone, prompts: Batch, max_new_tokens: int, compression: Compression | None = None
) -> Generation:
    cache = PackedCache(backbone.family.shape.num_layers)
    first = prefill(backbone, prompts, cache, Compression() if compression is None else compression)
    tokens, _ = greedy_tokens(backbone, cache, first.logits_BV, max_new_tokens)
    return Generation(tokens, first.plan, cache)


@dataclass(frozen=True)
class StepCell:
    """A filled cache: factors that differ from ``PLAIN_CELL``."""

    cell: dict[str, str]
    compression: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    device: str = "cpu"

    @torch.no_grad()
    def filled(self) -> tuple[CompressedBackbone, PackedCache, torch.Tensor]:
        cell = {**PLAIN_CELL, "eviction": "none", "batch": "three_left", "protocol": "query_aware", **self.cell}
        with pytest.MonkeyPatch.context() as patch:
            if self.layers is not None or self.device != "cpu":
                patch.setattr(truth_cells.models, "family_of", self._family)
            backbone = backbone_of(cell).to(self.device)
            batch = on_device(truth_cells.batch_of(cell), torch.device(self.device))
            compression = Compression(**{**vars(compression_of(cell)), **self.compression})
            first, cache = opened(backbone, batch, compression, cell["protocol"])
        return backbone, cache, first.logits_BV.argmax(-1)[:, None]

    def _family(self, name: str, dtype: torch.dtype = torch.float32) -> Family:
        family = deepcopy(family_of(name, dtype)) if self.layers is None else text_family(name, self.layers)
        family.model.to(self.device, dtype)
        return family


ROUTED = {"selector": "linear"}
CELLS = {
    "whole": StepCell({}),
    "one": StepCell({"batch": "one"}),
    "bits": StepCell(ROUTED),
    "per_head_bits": StepCell(ROUTED | {"layout": "per_head"}),
    "own_heads": StepCell(ROUTED | {"eviction": "own_sets"}),
    "shared_set": StepCell(ROUTED | {"eviction": "shared_set"}),
    "int8": StepCell(ROUTED | {"precision": "int8"}),
    "int4_own_heads": StepCell(ROUTED | {"precision": "int4", "eviction": "own_sets", "groups": "2/1"}),
    "int4_rotated": StepCell(ROUTED | {"precision": "int4_rotated", "groups": "2/1"}),
    "kivi4": StepCell(ROUTED | {"precision": "kivi4", "groups": "2/1"}),
    "kivi2_own_heads": StepCell({"precision": "kivi2", "eviction": "own_sets"}),
    "bf16": StepCell(ROUTED | {"precision": "bf16"}),
    "images": StepCell(ROUTED | {"family": "llava_gqa", "reducer": "fastv_decoder"}),
    "mrope": StepCell(ROUTED | {"family": "qwen2_5_vl", "eviction": "own_sets"}),
    "window": StepCell(ROUTED | {"family": "qwen2_window"}),
    "window_own_heads": StepCell(ROUTED | {"family": "qwen2_window", "eviction": "own_sets"}),
    "pages": StepCell({"eviction": "quest_steps"}),
    "padded_tail": StepCell(ROUTED | {"protocol": "context_first"}),
    "padded_tail_own_heads": StepCell(ROUTED | {"protocol": "context_first", "eviction": "own_sets"}),
    "cut_keys": StepCell(ROUTED | {"keys": "cut"}),
    "cut_keys_own_heads": StepCell(ROUTED | {"keys": "cut", "eviction": "own_sets"}),
    "online": StepCell(ROUTED | {"eviction": "snapkv"}, compression={"every": 30, "keep": 40, "unit": "tokens"}),
    "online_h2o": StepCell({"eviction": "h2o"}, compression={"every": 30, "keep": 40, "unit": "tokens"}),
}  # fmt: skip
