"""What several eviction methods read of the attention: the rows that ask about the prompt's body, and sums over rows.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, W rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from subtoken_train.types import Region, in_compressed_region

GroupReduction = Literal["mean", "max"]

Blocks = Iterable[tuple[Tensor, Tensor]]
"""(index_BW, probabilities [B, H, W, N]), as ``LayerView.blocks`` yields them; -1 in the index is no row."""


def task_rows(regions_BN: Tensor) -> Tensor:
    """Entries after the body of a prompt, bool [B, N]: those that ask about it.

    The body is what is VISUAL or CONTEXT, and these are the entries after the last of it ("post-vision" in a prompt
    with images). Without a body, all entries; if nothing follows the body, the last entry alone.
    """
    entries_BN, after_BN = regions_BN != Region.PADDING, _after_body(regions_BN)
    none_B1 = ~after_BN.any(-1, keepdim=True)
    return after_BN | (none_B1 & last_marked(entries_BN, none_B1.long()))


def unasked(regions_BN: Tensor) -> Tensor:
    """Samples that end with their body, bool [B]: no question is there, ``task_rows`` has the last entry alone."""
    return in_compressed_region(regions_BN).any(-1) & ~_after_body(regions_BN).any(-1)


def _after_body(regions_BN: Tensor) -> Tensor:
    return (regions_BN != Region.PADDING) & (in_compressed_region(regions_BN).flip(-1).cumsum(-1).flip(-1) == 0)


def last_marked(marked_BN: Tensor, count_B1: Tensor | int) -> Tensor:
    """The last ``count_B1`` of the marked places of each sample, bool [B, N]; all of them where there are fewer."""
    return marked_BN & (marked_BN.flip(-1).cumsum(-1).flip(-1) <= count_B1)


def column_sums(blocks: Blocks, weight_BN: Tensor | None = None) -> Tensor:
    """Attention that each key receives from the rows of ``blocks``, [B, H, N] in fp32.

    Args:
        blocks: the rows, at least one in the whole batch.
        weight_BN: factor of each row; 1 if not given.
    """
    total_BHN: Tensor | None = None
    for index_BW, probability_BHWN in blocks:
        if weight_BN is None:
            sums_BHN = probability_BHWN.sum(2)
        else:
            weight_B1W1 = weight_BN.gather(1, index_BW.clamp(min=0))[:, None, :, None]
            sums_BHN = (probability_BHWN * weight_B1W1).sum(2)
        total_BHN = sums_BHN if total_BHN is None else total_BHN + sums_BHN
    assert total_BHN is not None
    return total_BHN


def column_largest(blocks: Blocks) -> Tensor:
    """The largest attention that each key receives from any row of ``blocks`` (at least one), [B, H, N] in fp32."""
    largest_BHN: Tensor | None = None
    for _, probability_BHWN in blocks:
        block_BHN = probability_BHWN.amax(2)
        largest_BHN = block_BHN if largest_BHN is None else torch.maximum(largest_BHN, block_BHN)
    assert largest_BHN is not None
    return largest_BHN


def over_groups(scores_BHN: Tensor, kv_heads: int, how: GroupReduction = "mean") -> Tensor:
    """Mean or maximum over the query heads of each key-value head, [B, h, N]."""
    batch, heads, length = scores_BHN.shape
    grouped = scores_BHN.view(batch, kv_heads, heads // kv_heads, length)
    return grouped.mean(2) if how == "mean" else grouped.amax(2)
