"""What tower reducers read in an InternViT, recomputed for one layer: the tower keeps its fast attention.

Legend: I tiles, N the class token and P patches of a tile, c width of a patch, H heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def class_token_attention(layer: Any, states_INc: Tensor, heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Attention that the class token pays to every patch in a layer of the tower, and the patches' keys.

    Args:
        layer: an ``InternVLVisionLayer``.
        states_INc: its input, the class token first.
        heads: into how many queries and keys are split; None: the layer's own number.

    Returns:
        (received [I, P], summed over heads; keys [I, P, d], averaged over heads), both in fp32.
    """
    attention, normed_INc = layer.attention, layer.layernorm_before(states_INc)
    split = (attention.num_heads if heads is None else heads, -1)
    query_IHd = attention.q_norm(attention.q_proj(normed_INc[:, 0])).unflatten(-1, split).float()
    keys_INHd = attention.k_norm(attention.k_proj(normed_INc)).unflatten(-1, split).float()
    with torch.autocast(query_IHd.device.type, enabled=False):
        scores_IHN = torch.einsum("ihd,inhd->ihn", query_IHd, keys_INHd) * query_IHd.shape[-1] ** -0.5
    return scores_IHN.softmax(-1).sum(1)[:, 1:], keys_INHd[:, 1:].mean(2)
