"""Attention of new tokens on packed storage in pure torch, tuned for CPUs; it runs on every device.

Keys are read where they lie; of the values only stored pieces are read, and nothing of the values' full size is ever
made. The only index work of a step is to gather the probabilities that meet the stored pieces. Of a short cache the
calls of operations cost more than what they do, so the tail of all rows is one product, and a block of few rows takes
views of what belongs to them: rows of unequal counts cost few operations each.

Legend: B batch, H query heads, h key-value heads, q new tokens, c heads of a row, X = all rows times c, x those of a
block, G query rows of a head (H / h * q), M entries of a part, T tail tokens, N entries of a row and its tail, d head
width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtoken_train.kernels.cpu_scores import block_scores, causal, in_dtype
from subtoken_train.kernels.cpu_values import weighted_sums
from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.paged import read_pages
from subtoken_train.kernels.reach import Reach
from subtoken_train.kernels.storage import Block, RoutedValues
from subtoken_train.kernels.tail import Tail


def packed_attention(
    query_BHqd: Tensor,
    blocks: Sequence[Block],
    tail: Tail,
    scale: float,
    reach: Reach | None = None,
    fill: Fill | None = None,
) -> Tensor:
    """Attention of the last q tokens over packed entries and the tail, [B, H, q, d]; arguments as of ``attend``."""
    batch, kv_heads, heads = len(query_BHqd), tail.room_keys_BhTd.shape[1], blocks[0].heads
    per_sample = kv_heads // heads  # rows of a sample: where heads have entries of their own, a row is one head
    query_XGd = query_BHqd.reshape(batch * kv_heads, -1, query_BHqd.shape[3])
    scaled_XGd, own, start_X = query_XGd * scale, None, None
    if tail.start_B is not None:
        start_X = tail.start_B.repeat_interleave(kv_heads)
    if query_BHqd.shape[2] > 1 or start_X is not None or tail.written is not None or reach is not None:
        own = tail.own_places(query_BHqd.shape[2])
    dtype = query_BHqd.dtype
    scores_XTG = in_dtype(tail.keys, dtype).flatten(0, 1).bmm(scaled_XGd.mT)
    if own is not None:
        scores_XTG = causal(scores_XTG, own, start_X)
    if blocks[0].rows is None:
        near = None if reach is None else reach.of_rows(None, per_sample)
        filled = None if fill is None else fill.of_heads(dtype)
        weight_XTG, sums = _attend(blocks[0], query_XGd, scaled_XGd, scores_XTG, own, near, filled)
    else:
        states = [query_XGd, scaled_XGd, scores_XTG] + ([] if fill is None else [fill.of_heads(dtype)])
        weight_XTG, sums = _by_block(blocks, batch * per_sample, states, own, reach, per_sample)
    values_XTd = in_dtype(tail.values, dtype).flatten(0, 1)
    out = weight_XTG.mT.bmm(values_XTd) if sums is None else sums.baddbmm(weight_XTG.mT, values_XTd)
    return out.view(batch, -1, *query_BHqd.shape[2:])


def _by_block(
    blocks: Sequence[Block],
    rows: int,
    states: Sequence[Tensor],
    own_q: Tensor | None,
    reach: Reach | None,
    per_sample: int,
) -> tuple[Tensor, Tensor]:
    """What ``_attend`` gives, of blocks that hold some of the rows each.

    ``states`` are its arguments for all rows: queries, scaled ones, scores of the tails and, where there is any, fill.
    """
    by_row = [x.reshape(rows, len(x) // rows, *x.shape[1:]) for x in states]
    each = [x.unbind(0) for x in by_row]
    weights: dict[int, Tensor] = {}
    sums: dict[int, Tensor] = {}
    for block in blocks:
        assert block.rows is not None
        assert block.numbers is not None
        if len(block.numbers) == 1:
            of_block = [x[block.numbers[0]] for x in each]
        else:
            of_block = [x.index_select(0, block.rows).flatten(0, 1) for x in by_row]
        near = None if reach is None else reach.of_rows(block.rows, per_sample)
        filled = None if len(of_block) == 3 else of_block[3]
        weight_xTG, sums_xGd = _attend(block, of_block[0], of_block[1], of_block[2], own_q, near, filled)
        if sums_xGd is None:
            sums_xGd = torch.zeros_like(of_block[0])
        for taken, found in ((weights, weight_xTG), (sums, sums_xGd)):
            parts = [found] if len(block.numbers) == 1 else found.chunk(len(block.numbers))
            taken.update(zip(block.numbers, parts, strict=True))
    return torch.cat([weights[row] for row in range(rows)]), torch.cat([sums[row] for row in range(rows)])


def _attend(
    block: Block,
    query_xGd: Tensor,
    scaled_xGd: Tensor,
    last_xTG: Tensor,
    own_q: Tensor | None,
    reach: Reach | None,
    fill_x1d: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Weights of a block's tails, [x, T, G], and sums of its values, [x, G, d]; None where it has no entries.

    Args:
        block: scores over all its parts, one softmax, then each part's values.
        query_xGd: queries of its rows.
        scaled_xGd: the same, scaled.
        last_xTG: scores of the tails.
        own_q: places of the new tokens in the tail; None where nothing is hidden.
        reach: of its rows.
        fill_x1d: what pieces that are not stored read as; None: zero.
    """
    if block.pages is not None and (own_q is None or len(own_q) == 1):
        block = read_pages(block, query_xGd.reshape(block.num_rows, block.heads, *query_xGd.shape[1:]))
    scores = torch.cat([*block_scores(scaled_xGd, block), last_xTG], 1)
    if reach is not None:
        assert own_q is not None
        hidden = reach.hidden(block, last_xTG.shape[1], own_q, scores.shape[2])
        scores = scores.masked_fill(hidden.expand(-1, block.heads, -1, -1).flatten(0, 1), -torch.inf)
    sizes = [*(part.entries for part in block.parts), last_xTG.shape[1]]
    *weights, tail_xTG = _softmax(scores).split_with_sizes(sizes, 1)
    held = [(part, weight) for part, weight in zip(block.parts, weights, strict=True) if part.entries]
    sums = [weighted_sums(weight, part.values) for part, weight in held]
    if fill_x1d is not None:
        masses = [weight.sum(1)[..., None] for part, weight in held if isinstance(part.values, RoutedValues)]
        sums += [sum(masses[1:], masses[0]) * fill_x1d] if masses else []
    return tail_xTG, sum(sums[1:], sums[0]) if sums else None


def _softmax(scores_xNG: Tensor) -> Tensor:
    """Over N, in fp32."""
    (rows, length, columns), dtype = scores_xNG.shape, scores_xNG.dtype
    if columns == 1:  # the last axis is the fast one
        scores_xNG = scores_xNG.view(rows, length)
    wide = scores_xNG.softmax(1) if dtype == torch.float32 else scores_xNG.softmax(1, dtype=torch.float32).to(dtype)
    return wide.view(rows, length, columns)
