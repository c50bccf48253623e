"""Norms of value groups as scores: behind the output projection, and as an offset of router logits.

Legend: B batch, N positions, D model width, V value width d_v = H * d, H key-value heads, d head width, R query heads
per key-value head, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.groups import expand_group_mask, split_groups
from subtoken_train.types import Layout

_LEAST_NORM = 1e-6  # added to norms, so that an empty group has a logarithm
_LEAST_DEVIATION = 1e-4  # equal norms differ by rounding, which must not be blown up


def head_grams(output_weight: Tensor, num_kv_heads: int, head_dim: int, num_groups: int, layout: Layout) -> Tensor:
    """Gram matrices of the output projection, ``sum_q W_q^T W_q`` over a key-value head's query heads, fp32 [H, d, d].

    Entries between channels of different groups are zeroed.
    """
    columns_DHRd = output_weight.float().reshape(len(output_weight), num_kv_heads, -1, head_dim)
    with torch.autocast(output_weight.device.type, enabled=False):
        gram_Hdd = torch.einsum("xhrd,xhre->hde", columns_DHRd, columns_DHRd)
    group_of_S = torch.arange(num_groups, device=output_weight.device)
    group_of_V = expand_group_mask(group_of_S, num_kv_heads * head_dim, num_kv_heads, layout)
    group_of_Hd = group_of_V.reshape(num_kv_heads, head_dim)
    return gram_Hdd.masked_fill(group_of_Hd[:, :, None] != group_of_Hd[:, None, :], 0)


def contribution_norms(value_BNV: Tensor, gram_Hdd: Tensor, num_groups: int, layout: Layout) -> Tensor:
    """Root of the sum over query heads of ||W_q,g v_g||^2 for every group g, fp32 [B, N, S].

    This is what the group adds where every head attends to the token alike; no product between heads enters.
    """
    num_kv_heads, head_dim = gram_Hdd.shape[:2]
    value_BNHd = value_BNV.float().reshape(*value_BNV.shape[:-1], num_kv_heads, head_dim)
    with torch.autocast(value_BNV.device.type, enabled=False):
        shares_BNV = (value_BNHd * torch.einsum("bnhd,hde->bnhe", value_BNHd, gram_Hdd)).flatten(-2)
    squared_BNS = split_groups(shares_BNV, num_groups, num_kv_heads, layout).sum(-1)
    return squared_BNS.clamp(min=0).sqrt()  # rounding may leave a tiny negative sum


@torch.no_grad()
def standardised_log(norms_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """``log(norm)`` with mean 0 and deviation 1 over the routed (token, group) pairs of each sample, fp32 [B, N, S].

    Unrouted tokens get 0. No gradient.
    """
    unrouted_BN1 = ~routed_BN[..., None]
    pairs_B11 = (routed_BN.sum(-1) * norms_BNS.shape[-1]).clamp(min=1)[:, None, None]
    logs_BNS = (norms_BNS.float() + _LEAST_NORM).log().masked_fill(unrouted_BN1, 0)
    mean_B11 = logs_BNS.sum((1, 2), keepdim=True) / pairs_B11
    centred_BNS = (logs_BNS - mean_B11).masked_fill(unrouted_BN1, 0)
    deviation_B11 = (centred_BNS.square().sum((1, 2), keepdim=True) / pairs_B11).sqrt()
    return centred_BNS / deviation_B11.clamp(min=_LEAST_DEVIATION)
