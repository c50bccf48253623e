"""Greedy decoding of whole batches on a packed cache: what evaluations run.

Legend: B batch, T generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.engine.compressed_backbone import CompressedBackbone
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
    cache = PackedCache(backbone.family.shape.num_layers)
    first = prefill(backbone, prompts, cache, Compression() if compression is None else compression)
    tokens, _ = greedy_tokens(backbone, cache, first.logits_BV, max_new_tokens)
    return Generation(tokens, first.plan, cache)


@torch.no_grad()
def greedy_tokens(
    backbone: CompressedBackbone,
    cache: PackedCache,
    logits_BV: Tensor,
    max_new_tokens: int,
    ended: Callable[[list[Tensor]], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Go on greedily from a filled cache.

    Args:
        backbone: in evaluation mode.
        cache: with the prompts; it grows.
        logits_BV: of the first token.
        max_new_tokens: at least 1.
        ended: called with the ids of every step so far, [B] each; says which samples are done (bool [B]) beside those
            that said end-of-text.

    Returns:
        Ids [B, T], padding after a sample's end; and how many of them are the sample's own, end-of-text included, [B].
    """
    tokenizer = backbone.family.tokenizer
    end, pad = tokenizer.eos_token_id, padding_id(tokenizer)
    next_B = logits_BV.argmax(-1)
    done_B, count_B = torch.zeros_like(next_B, dtype=torch.bool), torch.zeros_like(next_B)
    generated: list[Tensor] = []
    while True:
        generated.append(next_B.masked_fill(done_B, pad))
        count_B = count_B + ~done_B
        done_B = done_B | (next_B == end)
        if ended is not None:
            done_B = done_B | ended(generated)
        if len(generated) == max_new_tokens or bool(done_B.all()):
            return torch.stack(generated, dim=1), count_B
        next_B = decode(backbone, next_B[:, None], cache).argmax(-1)
