"""Greedy answers to a batch of prompts with the plan and the cache, which ``generate_batch`` does not give back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.inference.batched import greedy_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.types import Batch, Plan


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
    """Greedy answers to a batch of prompts (padded on either side).

    Args:
        backbone: in evaluation mode.
        prompts: a batch without answers.
        max_new_tokens: at most this many tokens per sample; decoding stops when all samples have ended.
        compression: eviction and precision; None: none, the model's dtype.
    """
    cache = PackedCache(backbone.family.shape.num_layers)
    first = prefill(backbone, prompts, cache, Compression() if compression is None else compression)
    tokens, _ = greedy_tokens(backbone, cache, first.logits_BV, max_new_tokens)
    return Generation(tokens, first.plan, cache)
