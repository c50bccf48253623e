"""Greedy decoding after a compressed prefill.

Reducer and routers run once, on the prompt; decoding runs no router. The cache is transformers' own: it is as short as
the reducer made it, but dropped value groups are stored as zeros, so a routed entry still takes its full bytes here;
under a context reducer (Quest) the evicted pages stay in it too, masked.

Legend: B batch, T generated tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.types import Batch, Plan


@dataclass
class Generation:
    """Generated ids [B, T] (end-of-text included, then padding) and what the prompt's cache kept."""

    token_ids_BT: Tensor
    plan: Plan


@torch.no_grad()
def generate_greedy(backbone: CompressedBackbone, prompts: Batch, max_new_tokens: int) -> Generation:
    """Greedy answers to a batch of prompts (padded on either side).

    Args:
        backbone: in evaluation mode.
        prompts: a batch without answers.
        max_new_tokens: at most this many tokens per sample; decoding stops when all samples have ended.
    """
    family = backbone.family
    end, pad = family.tokenizer.eos_token_id, family.tokenizer.pad_token_id
    cache = DynamicCache(config=family.decoder.config)
    result = backbone.run(prompts, cache=cache, pad_left=True)
    spans = result.cached()
    last_B1 = _last_visible(result.rows.visible_BM)
    hidden = result.hidden_BMD.gather(1, last_B1[..., None].expand(-1, -1, result.hidden_BMD.shape[-1]))
    next_B = family.logits(hidden)[:, -1].argmax(-1)
    position = result.rows.next_position()
    done_B = torch.zeros_like(next_B, dtype=torch.bool)
    generated = []
    for _ in range(max_new_tokens):
        generated.append(next_B.masked_fill(done_B, end if pad is None else pad))
        done_B = done_B | (next_B == end)
        if bool(done_B.all()):
            break
        hidden = family.model.get_input_embeddings()(next_B[:, None])
        spans = [(start, stop, _grown(visible)) for start, stop, visible in spans]
        for start, stop, visible in spans:
            hidden = family.run_layers(hidden, visible, position, cache, start, stop)
        next_B, position = family.logits(hidden)[:, -1].argmax(-1), position + 1
    return Generation(torch.stack(generated, dim=1), result.plan())


def _grown(visible_BM: Tensor) -> Tensor:
    """Room for one more generated token, [B, M + 1]."""
    return torch.cat([visible_BM, visible_BM.new_ones(len(visible_BM), 1)], dim=1)


def _last_visible(visible_BM: Tensor) -> Tensor:
    """Index of the last real row of each sample, [B, 1]."""
    places_M = torch.arange(visible_BM.shape[1], device=visible_BM.device)
    return (visible_BM * places_M).argmax(-1, keepdim=True)
