"""Cells of packed = truth behind ``SubTokenModel``: models, their inputs, settings, greedy answers."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Batch, Plan, Region
from tests.support import truth_cells
from tests.support.truth_cells import backbone_of, compression_of
from tests.support.truth_models import CONTEXT, prompts

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
    backbone = backbone_of(cell)
    return SubTokenModel.around(backbone, compression_of(cell))


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
    """Greedy answers to a batch of prompts (padded on either side, without answers)."""
    cache = PackedCache(backbone.family.shape.num_layers)
    first = prefill(backbone, prompts, cache, Compression() if compression is None else compression)
    tokens, _ = greedy_tokens(backbone, cache, first.logits_BV, max_new_tokens)
    return Generation(tokens, first.plan, cache)
