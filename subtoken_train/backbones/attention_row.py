"""One row of one layer's attention, without an N x N matrix: what FastV ranks by.

Legend: B batch, N positions, D model width, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.backbones.base import Family
from subtoken_train.functional.gather import take_rows


@torch.no_grad()
def attention_row(
    family: Family, layer: int, hidden_BND: Tensor, visible_BN: Tensor, position_ids: Tensor, row_B: Tensor
) -> Tensor:
    """Head-mean attention that position ``row_B`` pays to all positions in ``layer``, [B, N] in fp32.

    Args:
        family: the backbone; its layer's own norm and q/k projections (LoRA included) are used.
        layer: layer index.
        hidden_BND: that layer's input.
        visible_BN: real tokens, bool; padding is never seen.
        position_ids: of the rows, [B, N] or [3, B, N].
        row_B: index of the query row of each sample; negative rows are read as 0 (their result is meaningless).
    """
    block = family.decoder.layers[layer]
    attention, normed_BND = block.self_attn, block.input_layernorm(hidden_BND)
    row_B1 = row_B.clamp(min=0)[:, None]
    cos, sin = family.decoder.rotary_emb(normed_BND, position_ids)

    def heads(projected: Tensor) -> Tensor:
        return projected.reshape(*projected.shape[:2], -1, attention.head_dim).transpose(1, 2)

    query = heads(attention.q_proj(take_rows(normed_BND, row_B1)))
    key = heads(attention.k_proj(normed_BND))
    cos, sin = cos.expand(len(hidden_BND), -1, -1), sin.expand(len(hidden_BND), -1, -1)
    query, _ = family.rotate(query, query, (take_rows(cos, row_B1), take_rows(sin, row_B1)))
    _, key = family.rotate(key, key, (cos, sin))
    groups = query.shape[1] // key.shape[1]
    scores_BH1N = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * attention.scaling
    columns_N = torch.arange(hidden_BND.shape[1], device=hidden_BND.device)
    allowed_BN = visible_BN & (columns_N <= row_B1)
    # a row that sees nothing (an all-padding sample) would be NaN; it sees itself instead
    allowed_BN = allowed_BN | (columns_N == row_B1)
    masked: Tensor = scores_BH1N.float().masked_fill(~allowed_BN[:, None, None], -torch.inf)
    return masked.softmax(-1).mean(1).squeeze(1)
