"""What tower reducers read in a CLIP tower, recomputed for one layer so that it keeps its fast attention.

Legend: I images, N tokens of the tower (class token first), T = N - 1 patches, C tower width, H heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subtoken_train.types import Batch


@torch.no_grad()
def class_attention(layer: Any, states_INC: Tensor) -> tuple[Tensor, Tensor]:
    """Attention that the class token pays to every patch in ``layer``, and the patches' keys.

    Args:
        layer: a ``CLIPEncoderLayer``.
        states_INC: its input.

    Returns:
        (received [I, T], summed over heads; keys [I, T, d], raw, averaged over heads), both in fp32.
    """
    attention, normed_INC = layer.self_attn, layer.layer_norm1(states_INC)
    heads = (attention.num_heads, attention.head_dim)
    query_IHd = attention.q_proj(normed_INC[:, 0]).unflatten(-1, heads).float()
    keys_INHd = attention.k_proj(normed_INC).unflatten(-1, heads).float()
    with torch.autocast(query_IHd.device.type, enabled=False):
        scores_IHN = torch.einsum("ihd,inhd->ihn", query_IHd, keys_INHd) * attention.scale
    return scores_IHN.softmax(-1).sum(1)[:, 1:], keys_INHd[:, 1:].mean(2)


def check_feature_count(image_tokens: int, features: int, batch: Batch) -> None:
    """Raise a ``ValueError`` unless the tower made one feature per image token."""
    if image_tokens != features:
        raise ValueError(
            f"{image_tokens} image tokens but {features} visual features in the batch of records "
            f"{', '.join(batch.record_ids)}"
        )
