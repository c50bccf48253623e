"""Rows of one layer's attention, without an N x N matrix: what FastV ranks by, and what diagnostics call relevance.

Legend: B batch, N positions, R attending rows, D model width, H query heads, h key-value heads, d head width.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from subtoken_train.engine.modes import evaluation_mode, gathered_weights, without_lora
from subtoken_train.engine.spans import run_chunks
from subtoken_train.families.family import Family
from subtoken_train.functional.causal_attention import attention_paid
from subtoken_train.functional.gather import kept_index, take_rows

ROW_BLOCK = 32
"""Rows whose attention over all heads is held at once."""


@torch.no_grad()
def row_attention(
    family: Family, layer: int, hidden_BND: Tensor, visible_BN: Tensor, position_ids: Tensor, row_B: Tensor
) -> Tensor:
    """Return the head-mean attention of rows ``row_B`` (negative: row 0) to all positions in ``layer``, fp32 [B, N]."""
    with gathered_weights(family.decoder.layers[layer]):
        attention = LayerAttention(family, layer, hidden_BND, visible_BN, position_ids)
        return attention.heads(row_B.clamp(min=0)[:, None]).mean(1).squeeze(1).to(hidden_BND.device)


@torch.no_grad()
def scouted_row(
    family: Family,
    layer: int,
    hidden_BND: Tensor,
    visible_BN: Tensor,
    position_ids: Tensor,
    row_B: Tensor,
    size: int | None = None,
    deep_nBND: Tensor | None = None,
    frozen: bool = False,
) -> Tensor:
    """Run ``row_attention`` from embeddings: lower layers unrouted, ``size`` rows at a time; ``frozen``: no LoRA."""
    length = int(row_B.max().clamp(min=0)) + 1
    visible, position = visible_BN[:, :length], position_ids[..., :length]
    deep = None if deep_nBND is None else deep_nBND[:, :, :length]
    with evaluation_mode(family.decoder), without_lora(family.decoder) if frozen else nullcontext():
        if size is None:
            below = family.run_layers(hidden_BND[:, :length], visible, position, stop=layer, deep_nBND=deep)
        else:
            below, unpadded = hidden_BND[:, :length], bool(visible.all())
            for lower in range(layer):
                given = family.dense_cache(), lower, below, visible, position, size  # a cache of one layer
                below = run_chunks(family, *given, deep_nBND=deep, unpadded=unpadded)
        row = row_attention(family, layer, below, visible, position, row_B)
    return nn.functional.pad(row, (0, hidden_BND.shape[1] - length))


@torch.no_grad()
def region_attention(
    family: Family,
    layer: int,
    hidden_BND: Tensor,
    visible_BN: Tensor,
    position_ids: Tensor,
    region_BN: Tensor,
    normed: bool = False,
    most: int | None = None,
) -> Tensor:
    """Average rows ``region_BN``'s attention (none: zeros) over heads, [B, N] in fp32; ``normed``: the norm has run.

    ``most``: rows of a sample at most; None: read from the device.
    """
    attention = LayerAttention(family, layer, hidden_BND, visible_BN, position_ids, normed)
    return attention_paid(attention.blocks(region_BN, most)) / region_BN.sum(1, keepdim=True).clamp(min=1)


def query_attention(
    family: Family, visible_BN: Tensor, position_ids: Tensor, query_BN: Tensor
) -> Callable[[int, Tensor], Tensor]:
    """Make a pass's ``RoutingState.query_attention``: ``region_attention`` of the question rows, without dropout."""
    most = int(query_BN.sum(-1).max())

    def paid(layer: int, normed_BND: Tensor) -> Tensor:
        with evaluation_mode(family.decoder.layers[layer].self_attn):
            return region_attention(family, layer, normed_BND, visible_BN, position_ids, query_BN, True, most)

    return paid


class LayerAttention:
    """A layer's rotated keys, and the attention of any rows over them."""

    def __init__(
        self,
        family: Family,
        layer: int,
        hidden_BND: Tensor,
        visible_BN: Tensor,
        position_ids: Tensor,
        normed: bool = False,
    ) -> None:
        self.family, self.layer, self.attention = family, layer, family.decoder.layers[layer].self_attn
        self.window = family.window(layer, position_ids)
        # where the layer lies, like all that follows
        self.normed_BND = hidden_BND if normed else family.attention_input(layer, hidden_BND)
        self.visible_BN = visible_BN.to(self.normed_BND.device)
        self.position_BN = position_ids.to(self.normed_BND.device) if position_ids.dim() == 2 else None
        cos, sin = (each.to(self.normed_BND.device) for each in family.angles(layer, self.normed_BND, position_ids))
        self.cos, self.sin = (each.expand(len(hidden_BND), -1, -1) for each in (cos, sin))
        key = family.key_heads(layer, self.normed_BND)
        _, self.key_BhNd = family.rotate(layer, key[:, :0], key, (self.cos, self.sin))  # without queries

    @torch.no_grad()
    def blocks(self, marks_BN: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the attention of marked rows as ``View.blocks`` does; one block at least."""
        for index_BR, valid_BR in _row_blocks(marks_BN, most):
            yield index_BR.masked_fill(~valid_BR, -1), self.heads(index_BR).to(marks_BN.device)

    @torch.no_grad()
    def pull_blocks(self, marks_BN: Tensor) -> Iterator[Tensor]:
        """Yield what the rotary embedding alone makes of the same rows, as ``View.rotary_pull`` yields it."""
        place, width = self.cos.device, self.key_BhNd.shape[-1]
        ones_B1Nd = torch.ones(*self.visible_BN.shape, width, device=place)[:, None]
        _, key_B1Nd = self.family.rotate(self.layer, ones_B1Nd, ones_B1Nd, (self.cos.float(), self.sin.float()))
        for index_BR, _ in _row_blocks(marks_BN):
            query_BRd = take_rows(key_B1Nd[:, 0], index_BR.to(place))
            with torch.autocast(place.type, enabled=False):
                pull_BRM = query_BRd @ key_B1Nd[:, 0].mT * self.attention.scaling
            yield pull_BRM.to(marks_BN.device)

    def heads(self, index_BR: Tensor) -> Tensor:
        """Return the attention of rows ``index_BR`` to all positions, [B, H, R, N] in fp32."""
        index_BR = index_BR.to(self.visible_BN.device)
        position_BR = None if self.position_BN is None else take_rows(self.position_BN, index_BR)
        query = self.family.query_heads(self.layer, take_rows(self.normed_BND, index_BR), position_BR)
        places = take_rows(self.cos, index_BR), take_rows(self.sin, index_BR)
        query_BHRd, _ = self.family.rotate(self.layer, query, query[:, :0], places)
        batch, heads, rows, width = query_BHRd.shape
        grouped = query_BHRd.reshape(batch, self.key_BhNd.shape[1], -1, width)  # the query heads of a key head
        scores_BHRN = (grouped @ self.key_BhNd.mT).view(batch, heads, rows, -1) * self.attention.scaling
        columns_N = torch.arange(self.visible_BN.shape[1], device=index_BR.device)
        allowed_BRN = self.visible_BN[:, None] & (columns_N <= index_BR[..., None])
        if self.window is not None:
            allowed_BRN = allowed_BRN & self.window.of_index(index_BR)
        # a row that sees nothing (an all-padding sample) would be NaN; it sees itself instead
        allowed_BRN = allowed_BRN | (columns_N == index_BR[..., None])
        masked: Tensor = scores_BHRN.float().masked_fill(~allowed_BRN[:, None], -torch.inf)
        return masked.softmax(-1)


def _row_blocks(marks_BN: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    index_BR, valid_BR = kept_index(marks_BN, pad_left=False, longest=most)
    if not index_BR.shape[1]:  # nothing is marked: a row that does not count
        valid_BR = marks_BN[:, :1]
        index_BR = valid_BR.long()
    yield from zip(*(torch.split(each, ROW_BLOCK, 1) for each in (index_BR, valid_BR)), strict=True)
