"""Greedy decoding of whole batches on a packed cache: what evaluations run.

Legend: B batch, T generated tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.cache.cache import PackedCache
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
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
    family = backbone.family
    end, pad = family.tokenizer.eos_token_id, family.tokenizer.pad_token_id
    cache = PackedCache(family.shape.num_layers)
    first = prefill(backbone, prompts, cache, Compression() if compression is None else compression)
    next_B = first.logits_BV.argmax(-1)
    done_B = torch.zeros_like(next_B, dtype=torch.bool)
    generated: list[Tensor] = []
    while True:
        generated.append(next_B.masked_fill(done_B, end if pad is None else pad))
        done_B = done_B | (next_B == end)
        if len(generated) == max_new_tokens or bool(done_B.all()):
            return Generation(torch.stack(generated, dim=1), first.plan, cache)
        next_B = decode(backbone, next_B[:, None], cache).argmax(-1)
