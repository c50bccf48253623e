"""Attention of new tokens on packed storage in pure torch, tuned for CPUs; it runs on every device.

Keys are read where they lie; of the values only stored pieces are read, and nothing of the values' full size is ever
made. The only index work of a step is to gather the probabilities that meet the stored pieces.

Legend: B batch, H query heads, h key-value heads, G = H / h, q new tokens, R rows of a block, c heads of a row,
M entries of a part, T tail tokens, d head width, k channels of a cut key, P pieces of a row, w channels of a piece, n
stored pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from subtoken_train.kernels.paged import read_pages
from subtoken_train.kernels.reach import Reach
from subtoken_train.kernels.storage import Block, BlockPart, Payload, RoutedValues
from subtoken_train.kernels.tail import Tail

FEW = 2  # query rows of a head up to which a CPU multiplies matrices in a batch faster than one alone
MANY = 4  # query rows of a head from which one product per piece beats one bag per query row


def packed_attention(
    query_BHqd: Tensor, blocks: Sequence[Block], tail: Tail, scale: float, reach: Reach | None = None
) -> Tensor:
    """Attention of the last q tokens over packed entries and the tail, [B, H, q, d]; arguments as of ``attend``."""
    tail_keys_BhTd, tail_values_BhTd = (x.to(query_BHqd.dtype) for x in (tail.keys, tail.values))
    tail_start_B = tail.start_B
    batch, heads, new, width = query_BHqd.shape
    kv_heads = tail_keys_BhTd.shape[1]
    sees_all = new == 1 and tail.start_B is None and tail.written is None and reach is None
    own = None if sees_all else tail.own_places(new)
    grouped = query_BHqd.reshape(batch, kv_heads, heads // kv_heads * new, width)
    out = grouped.new_empty(grouped.shape)  # contiguous, whatever the queries' strides are
    lone: list[Block] = []
    for block in blocks:
        shared = block.heads == kv_heads
        alone = block.numbers is not None and len(block.numbers) == 1
        if alone and not shared and reach is None and block.pages is None:
            lone.append(block)
            continue
        # where heads have entries of their own, a row is one head
        by_row = [x if shared else x.flatten(0, 1)[:, None] for x in (grouped, tail_keys_BhTd, tail_values_BhTd)]
        start = tail_start_B if shared or tail_start_B is None else tail_start_B.repeat_interleave(kv_heads)
        near = None if reach is None else reach.of_rows(block.rows, 1 if shared else kv_heads)
        if block.rows is None:
            return _attend(block, by_row, scale, own, start, near).reshape(query_BHqd.shape)
        start = None if start is None else start[block.rows]
        result = _attend(block, [x.index_select(0, block.rows) for x in by_row], scale, own, start, near)
        (out if shared else out.view(-1, 1, *out.shape[2:])).index_copy_(0, block.rows, result)
    if lone:
        start = None if tail_start_B is None else tail_start_B.repeat_interleave(kv_heads)
        states = [x.flatten(0, 1) for x in (grouped, tail_keys_BhTd, tail_values_BhTd)]
        _attend_heads(lone, states, scale, own, start, out.view(-1, *out.shape[2:]))
    return out.reshape(query_BHqd.shape)


def _attend_heads(
    blocks: Sequence[Block],
    states: Sequence[Tensor],
    scale: float,
    own_q: Tensor | None,
    start_R: Tensor | None,
    out_RGd: Tensor,
) -> None:
    """Heads of unequal counts, a block each: what ``_attend`` does, with few operations for each head.

    ``states`` are the queries [B * h, G * q, d] and the tail's keys and values [B * h, T, d] of all heads; results are
    written into their rows of ``out``.
    """
    query_RGd, tail_keys, tail_values = states
    query_RGd = query_RGd * scale
    tail = _causal((tail_keys @ query_RGd.mT)[:, None], own_q, start_R).unbind(0)
    queries, rows = query_RGd[:, None, None].unbind(0), [block.numbers[0] for block in blocks if block.numbers]
    logits: list[Tensor] = []
    for block, row in zip(blocks, rows, strict=True):
        thin = queries[row] if block.channels is None else _channels_of(queries[row], block.channels)
        for part in block.parts:
            logits += _scores_of_head(thin if part.cut else queries[row], part)
        logits.append(tail[row][None])
    lengths = [[*(part.entries for part in block.parts), tail_keys.shape[1]] for block in blocks]
    joined = torch.cat(logits, dim=2).split_with_sizes([sum(each) for each in lengths], 2)
    tails: list[Tensor] = []
    sums: list[Tensor] = []
    for block, scores, each in zip(blocks, joined, lengths, strict=True):
        weights = scores.softmax(2, dtype=torch.float32).to(scores.dtype).split_with_sizes(each, 2)
        tails.append(weights[-1][0])
        of_parts = [
            _weighted_pieces(weight, part.values, query_RGd.shape[-1])
            if isinstance(part.values, RoutedValues)
            else _weighted(weight, part.values)
            for part, weight in zip(block.parts, weights, strict=False)
            if part.entries
        ]
        sums.append(sum(of_parts[1:], of_parts[0])[0] if of_parts else torch.zeros_like(queries[0][0]))
    index = torch.cat([block.rows for block in blocks if block.rows is not None])
    out_RGd[index] = torch.cat(tails).mT @ tail_values[index] + torch.cat(sums)


def _scores_of_head(query_11Gd: Tensor, part: BlockPart) -> list[Tensor]:
    """Scores [1, 1, M, G] of a part of one head, in stretches of M.

    A CPU multiplies a matrix and a vector at a fraction of the memory's speed, and two of both in a batch at all of it.
    """
    halves, columns = part.halves, query_11Gd.shape[2]
    if halves is None or columns > FEW or halves.dtype != query_11Gd.dtype:
        return _scores(query_11Gd, part.keys) if part.entries else []
    both = torch.bmm(halves, query_11Gd[0].mT.expand(2, -1, -1))
    if part.entries % 2 == 0:
        return [both.view(1, 1, part.entries, columns)]
    first, second = both[:, None, None].unbind(0)
    return [first, second[:, :, 1:]]


def _attend(
    block: Block,
    states: Sequence[Tensor],
    scale: float,
    own_q: Tensor | None,
    start_R: Tensor | None,
    reach: Reach | None,
) -> Tensor:
    """One block's rows: scores over all its parts, one softmax, then each part's values, [R, c, G * q, d].

    ``states`` are the rows' queries [R, c, G * q, d] and their tail's keys and values [R, c, T, d].
    """
    query, tail_keys, tail_values = states
    if block.pages is not None and (own_q is None or len(own_q) == 1):
        block = read_pages(block, query)
    query = query * scale
    thin = query if block.channels is None else _channels_of(query, block.channels)
    stretches = [_scores(thin if part.cut else query, part.keys) for part in block.parts]
    logits = [scores for of_part in stretches for scores in of_part]
    logits.append(_causal(tail_keys @ query.transpose(-1, -2), own_q, start_R))
    scores = torch.cat(logits, dim=2)
    if reach is not None:
        assert own_q is not None
        scores = scores.masked_fill(reach.hidden(block, tail_keys.shape[2], own_q, query.shape[2]), -torch.inf)
    joined = scores.softmax(2, dtype=torch.float32).to(query.dtype)
    weights = joined.split_with_sizes([*(part.entries for part in block.parts), tail_keys.shape[2]], 2)
    out: Tensor = weights[-1].transpose(-1, -2) @ tail_values
    for part, weight in zip(block.parts, weights, strict=False):  # the tail's are the last
        if isinstance(part.values, RoutedValues):
            out += _weighted_pieces(weight, part.values, query.shape[-1])
        else:
            out += _weighted(weight, part.values)
    return out


def _channels_of(query_RcGd: Tensor, channels_Rck: Tensor) -> Tensor:
    """The queries in the channels of each head that cut keys keep, [R, c, G, k]."""
    return query_RcGd.gather(3, channels_Rck.long()[:, :, None].expand(-1, -1, query_RcGd.shape[2], -1))


def _stretches(payload: Payload, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """(first entry, vectors [R, c, m, d]): all at once where nothing is rounded, else a stretch at a time.

    A prompt that ran under autocast left keys and values of unlike dtypes.
    """
    length, step = payload.entries, payload.stretch
    if step >= length:
        yield 0, payload.read().to(dtype)
        return
    for start in range(0, length, step):
        yield start, payload.narrow(2, start, min(step, length - start)).read().to(dtype)


def _scores(query_RcGd: Tensor, keys: Payload) -> list[Tensor]:
    """Scores [R, c, M, G], in stretches of M; keys first: a few rows times many columns is slow on a CPU."""
    turned = query_RcGd.transpose(-1, -2)
    return [vectors @ turned for _, vectors in _stretches(keys, turned.dtype)]


def _causal(scores_RcTG: Tensor, own_q: Tensor | None, start_R: Tensor | None) -> Tensor:
    """Hide from each new token, which stands at its own place, those that come after it; None: nothing is hidden.

    The query axis is G * new, new fastest. Padding before ``start_R`` is hidden too; a row of padding sees itself,
    because one that sees nothing turns NaN.
    """
    if own_q is None:
        return scores_RcTG
    length, columns = scores_RcTG.shape[2:]
    places_T = torch.arange(length, device=scores_RcTG.device)[:, None]
    own_G = own_q.repeat(columns // len(own_q))
    hidden = places_T > own_G
    if start_R is not None:
        hidden = hidden | (places_T < start_R[:, None, None, None]) & (places_T != own_G)
    return scores_RcTG.masked_fill(hidden, -torch.inf)


def _weighted(weight_RcMG: Tensor, values: Payload) -> Tensor:
    """Sum of whole values, [R, c, G, d].

    One query row of a head is a bag of values on a CPU, which reads them faster than a product with one row.
    """
    rows, heads, length, columns = weight_RcMG.shape
    as_stored = values.scale is None and values.data.shape[2] == length and values.data.is_contiguous()
    if columns == 1 and length and weight_RcMG.device.type == "cpu" and as_stored:
        vectors = values.data.to(weight_RcMG.dtype).view(rows * heads * length, -1)
        offsets = torch.arange(0, len(vectors), length, dtype=torch.int32)
        return _bags(vectors, offsets, weight_RcMG.reshape(-1)).view(rows, heads, 1, -1)
    turned = weight_RcMG.transpose(-1, -2)
    sums = [turned.narrow(3, start, vectors.shape[2]) @ vectors for start, vectors in _stretches(values, turned.dtype)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _weighted_pieces(weight_RcMG: Tensor, values: RoutedValues, width: int) -> Tensor:
    """Sum of the stored pieces, [R, c, G, d]: one bag of pieces per (row, piece), weighted by its probabilities."""
    rows, heads, entries, columns = weight_RcMG.shape
    stored, num_pieces = values.pieces.read().to(weight_RcMG.dtype), len(values.piece_bit)
    weight_nG = weight_RcMG.reshape(rows * heads * entries, columns).index_select(0, values.places())
    if columns > MANY:
        by_piece = weight_RcMG.new_empty(rows, num_pieces, columns, stored.shape[-1])
        for bag, (start, end) in enumerate(pairwise(values.bounds)):
            torch.mm(weight_nG[start:end].T, stored[start:end], out=by_piece[bag // num_pieces, bag % num_pieces])
        return by_piece.view(rows, heads, -1, columns, stored.shape[-1]).transpose(2, 3).flatten(3)
    sums = [_bags(stored, values.offsets, weight_n) for weight_n in weight_nG.T.contiguous()]
    return torch.stack(sums).view(columns, rows, heads, width).permute(1, 2, 0, 3)


def _bags(vectors_nw: Tensor, offsets: Tensor, weight_n: Tensor) -> Tensor:
    """Weighted sums of consecutive vectors; each bag starts at its offset."""
    index = torch.arange(len(vectors_nw), dtype=torch.int32, device=vectors_nw.device)
    sums: Tensor = torch.embedding_bag(vectors_nw, index, offsets, False, 0, False, weight_n)[0]
    return sums
