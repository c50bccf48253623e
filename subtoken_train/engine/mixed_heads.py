"""Heads that see less, with a gradient to how much: what DuoAttention learns its alphas through, and LKV its budgets.

Legend: B batch, N rows, H query heads, h key-value heads, d head width, L layers, D model width.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from subtoken_train.engine.modes import evaluation_mode
from subtoken_train.families.family import Family
from subtoken_train.forks import changed
from subtoken_train.functional.causal_attention import Seen, fused_attention

NAME = "subtoken_mixed_heads"
"""Name of the attention function in transformers' table."""


@dataclass
class HeadMix:
    """The mixture of a pass's heads: of full and streaming attention, which sees first and recent entries."""

    alpha_Lh: Tensor  # share of full attention, per layer and key-value head; a gradient flows to it
    sinks: int
    recent: int  # entries up to a row, itself included, that streaming sees
    visible_BN: Tensor
    full_B1NN: Tensor | None = field(init=False)
    streaming_B1NN: Tensor = field(init=False)

    def __post_init__(self) -> None:
        place_BN = self.visible_BN.cumsum(-1)
        length, device = place_BN.shape[1], place_BN.device
        full_B1NN = Seen(self.visible_BN).of_rows(0, length, device)  # a padding row sees itself: it would be NaN
        near_BNN = place_BN[:, :, None] - place_BN[:, None] < self.recent
        held_BNN = near_BNN | (place_BN[:, None] <= self.sinks) | torch.eye(length, dtype=torch.bool, device=device)
        self.full_B1NN = None if bool(self.visible_BN.all()) else full_B1NN
        self.streaming_B1NN = full_B1NN & held_BNN[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend in a layer, [B, H, N, d]."""
        masks = self.full_B1NN, self.streaming_B1NN
        full, streaming = (fused_attention(query, key, value, scale, mask) for mask in masks)
        alpha_H11 = self.alpha_Lh[layer].repeat_interleave(query.shape[1] // key.shape[1])[:, None, None]
        return alpha_H11.to(full.dtype) * full + (1 - alpha_H11.to(full.dtype)) * streaming


@dataclass
class FadingEntries:
    """A pass without padding whose rows after the context see its entries as far as these stay."""

    context_BN: Tensor  # in one run
    stays_LBhN: Tensor  # log of how far an entry stays, in the context; a gradient flows to it
    visible_BN: Tensor
    later_BN: Tensor = field(init=False)  # the rows after the context

    def __post_init__(self) -> None:
        self.later_BN = (self.context_BN.cumsum(-1) == self.context_BN.sum(-1, keepdim=True)) & ~self.context_BN

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend in a layer, [B, H, N, d]."""
        fades_B1NN = (self.later_BN[:, :, None] & self.context_BN[:, None])[:, None]
        bias_BhNN = torch.where(fades_B1NN, self.stays_LBhN[layer][:, :, None], 0.0)
        unseen_NN = ~Seen(self.visible_BN).of_rows(0, query.shape[2], query.device)
        bias_BHNN = bias_BhNN.masked_fill(unseen_NN, -torch.inf).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return fused_attention(query, key, value, scale, bias_BHNN.to(query.dtype))


def _mixed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    head_mix: HeadMix | FadingEntries | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface; [B, H, N, d] queries, [B, h, N, d] keys and values to [B, N, H, d]."""
    assert head_mix is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return head_mix.attend(layer, query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _mixed_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def mixed_hidden(family: Family, embeds_BND: Tensor, position: Tensor, mix: HeadMix | FadingEntries) -> Tensor:
    """Return hidden states after the last norm, [B, N, D], of a pass whose heads are mixed; dropout is off."""
    decoder = family.decoder
    if any(family.windows):
        raise ValueError(f"{decoder.config.model_type} has sliding windows, and heads are weighed over whole contexts")
    with changed(decoder.config, _attn_implementation=NAME), evaluation_mode(decoder):
        normed: Tensor = decoder.norm(family.run_layers(embeds_BND, mix.visible_BN, position, head_mix=mix))
    return normed
