"""Attention of new tokens on packed storage in pure torch, tuned for CPUs; it runs on every device.

Keys are read where they lie; of the values only stored pieces are read, and nothing of the values' full size is made.
Of a short cache the calls of operations cost more than what they do: so the tail of all rows is one product, and a
block of few rows takes views. Scores have keys first, as a few rows times many columns is slow on a CPU; one query row
of a head takes a bag of vectors, which is faster than a product with one row.

Of rounded payloads the integers are multiplied unscaled, a stretch at a time; scales come after. Two codes of a byte
stay beside each other's halves: even channels first, then the odd ones, and what they meet is put in the same order.
Formats that are not symmetric are read back instead, a stretch at a time, but of pieces all at once.

Legend: B batch, H query heads, h key-value heads, q new tokens, c heads of a row, X = all rows times c, x those of a
block, G query rows of a head (H / h * q), M entries of a part, T tail tokens, N entries of a row and its tail, P
pieces of a row, w channels of a piece, n stored pieces, k channels of a cut key, m entries of a stretch, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import Payload, Picked, Stored
from subtoken_train.kernels.storage import Block, BlockPart, CacheWindow, Fill, RoutedValues, Tail, read_pages


class Integers:
    """Reads codes as whole numbers in fp32, always into the same memory: new pages cost more than the numbers."""

    def __init__(self, stored: Stored, vectors: int) -> None:
        """Make room for so many vectors or pieces of what is stored."""
        self.format, device = stored.format, stored.data.device
        numbers = vectors * self.format.width(stored.data.shape[-1])
        self.room = torch.empty(numbers, device=device)
        self.bytes = torch.empty(numbers if self.format.per_code > 1 else 0, dtype=torch.uint8, device=device)

    def of(self, codes: Tensor) -> Tensor:
        """Return all of [..., width], with channels in ``Format.stored_order``; valid until the next call."""
        codes = self.format.unpack(codes, self.bytes)
        return self.room[: codes.numel()].view(codes.shape).copy_(codes)


def rounded_stretches(payload: Payload) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first entry, integers [X, m, d], scales [X, m, 1]) of a payload [R, c, M, d], stretch after stretch."""
    length, step = payload.entries, min(payload.entries, payload.stretch)
    rows, heads = payload.data.shape[:2]
    integers = Integers(payload, rows * heads * step)
    for start in range(0, length, step):
        part = payload.narrow(2, start, min(step, length - start))
        own = part.gathered() if isinstance(part, Picked) else part
        assert own.scale is not None
        yield start, integers.of(own.data).flatten(0, 1), own.scale.flatten(0, 1)


def block_scores(query_XGd: Tensor, block: Block) -> list[Tensor]:
    """Return scores [X, m, G] of all parts of a block, stretch after stretch; none of a part without entries."""
    thin = query_XGd
    if block.channels is not None:  # the queries' channels that cut keys keep in each head, [X, G, k]
        channels_X1k = block.channels.flatten(0, 1).long()[:, None]
        thin = query_XGd.gather(2, channels_X1k.expand(-1, query_XGd.shape[1], -1))
    return [
        scores for part in block.parts if part.entries for scores in _part_scores(thin if part.cut else query_XGd, part)
    ]


def _part_scores(query_XGd: Tensor, part: BlockPart) -> list[Tensor]:
    keys, dtype = part.keys, query_XGd.dtype
    if keys.format.symmetric:  # in fp32: whole numbers times a query may pass what fp16 holds
        turned = keys.format.stored_order(query_XGd).float().mT
        return [(codes.bmm(turned) * scale).to(dtype) for _, codes, scale in rounded_stretches(keys)]
    turned, step = query_XGd.mT, keys.stretch
    if step >= keys.entries:
        return [in_dtype(keys.read(), dtype).flatten(0, 1).bmm(turned)]
    starts = range(0, keys.entries, step)
    stretches = [keys.narrow(2, start, min(step, keys.entries - start)) for start in starts]
    return [in_dtype(stretch.read(), dtype).flatten(0, 1).bmm(turned) for stretch in stretches]


def in_dtype(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert only where needed (autocast leaves keys and values of other dtypes), because a call costs time."""
    return vectors if vectors.dtype == dtype else vectors.to(dtype)


def causal(scores_XTG: Tensor, own_q: Tensor, start_X: Tensor | None) -> Tensor:
    """Hide from each new token those that come after its own place.

    The query axis is G * new, new fastest. Padding before ``start_X`` is hidden too; a row of padding sees itself,
    because one that sees nothing turns NaN.
    """
    length, columns = scores_XTG.shape[1:]
    places_T = torch.arange(length, device=scores_XTG.device)[:, None]
    own_G = own_q.repeat(columns // len(own_q))
    hidden = places_T > own_G
    if start_X is not None:
        hidden = hidden | (places_T < start_X[:, None, None]) & (places_T != own_G)
    return scores_XTG.masked_fill(hidden, -torch.inf)


MANY = 4  # query rows of a head from which one product per piece beats one bag per query row


def weighted_sums(weight_XMG: Tensor, values: Payload | RoutedValues) -> Tensor:
    """Return the weighted sums of a part's values, [X, G, d]; it has at least one entry."""
    if isinstance(values, RoutedValues):
        return _of_pieces(weight_XMG, values)
    if values.format.symmetric:
        return _of_rounded(weight_XMG, values)
    length, columns = weight_XMG.shape[1:]
    as_stored = values.scale is None and values.data.shape[2] == length and values.data.is_contiguous()
    if columns == 1 and as_stored and weight_XMG.device.type == "cpu":
        vectors = in_dtype(values.data, weight_XMG.dtype).flatten(0, 2)
        offsets = torch.arange(0, len(vectors), length, dtype=torch.int32)
        return _bags(vectors, offsets, weight_XMG.reshape(-1)).unsqueeze(1)
    turned, step = weight_XMG.mT, values.stretch
    starts = range(0, length, step)
    sums = [
        turned.narrow(2, start, vectors.entries).bmm(in_dtype(vectors.read(), turned.dtype).flatten(0, 1))
        for start, vectors in ((start, values.narrow(2, start, min(step, length - start))) for start in starts)
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _of_rounded(weight_XMG: Tensor, values: Payload) -> Tensor:
    sums = [
        (weight_XMG.narrow(1, start, codes.shape[1]) * scale.float()).mT.bmm(codes)
        for start, codes, scale in rounded_stretches(values)
    ]
    whole = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return values.format.given_order(whole).to(weight_XMG.dtype)


def _of_pieces(weight_XMG: Tensor, values: RoutedValues) -> Tensor:
    """Sum one bag of pieces per (row, piece), weighted by its probabilities; scales go into the weights."""
    columns, pieces, dtype = weight_XMG.shape[2], values.pieces, weight_XMG.dtype
    if pieces.format.symmetric:
        assert pieces.scale is not None
        weight_XMG = weight_XMG * pieces.scale.flatten(0, 1).float()
    if columns == 1:  # one axis is gathered faster than two
        weight_nG = weight_XMG.reshape(-1).index_select(0, values.places()).unsqueeze(1)
    else:
        weight_nG = weight_XMG.reshape(-1, columns).index_select(0, values.places())
    if pieces.format.symmetric:
        sums = pieces.format.given_order(_of_rounded_pieces(weight_nG, values)).to(dtype)
    else:
        stored = in_dtype(pieces.data if pieces.scale is None else values.read(), dtype)
        sums = _bag_sums(weight_nG, stored, values.offsets, values.bounds)  # [R * P, G, w]
    if columns == 1:
        return sums.view(len(weight_XMG), 1, -1)
    return sums.view(len(weight_XMG), -1, columns, sums.shape[-1]).transpose(1, 2).flatten(2)


def _of_rounded_pieces(weight_nG: Tensor, values: RoutedValues) -> Tensor:
    """Return sums [R * P, G, w] in ``stored_order``, run after run of bags; the scales are in the weights."""
    bounds, codes = values.bounds, values.pieces.data
    runs = list(_runs(bounds, formats.CHUNK // codes.shape[-1]))
    integers, sums = Integers(values.pieces, max(bounds[last] - bounds[first] for first, last in runs)), []
    for first, last in runs:
        start, end = bounds[first], bounds[last]
        inside = [bound - start for bound in bounds[first : last + 1]]
        stored, offsets = integers.of(codes[start:end]), values.offsets[first:last] - start
        sums.append(_bag_sums(weight_nG[start:end], stored, offsets, inside))
    return torch.cat(sums)


def _runs(bounds: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of consecutive bags that hold ``most`` vectors at most, or of one bag."""
    first = 0
    for bag in range(1, len(bounds) - 1):
        if bounds[bag + 1] - bounds[first] > most:
            yield first, bag
            first = bag
    yield first, len(bounds) - 1


def _bag_sums(weight_nG: Tensor, stored_nw: Tensor, offsets: Tensor, bounds: list[int]) -> Tensor:
    """Return sums [bags, G, w] of bags that start at ``offsets``; ``bounds`` are the same and n, on the host."""
    columns = weight_nG.shape[1]
    if columns == 1:
        return _bags(stored_nw, offsets, weight_nG.view(-1)).unsqueeze(1)
    if columns > MANY:
        sums = weight_nG.new_empty(len(offsets), columns, stored_nw.shape[-1])
        for bag, (start, end) in enumerate(pairwise(bounds)):
            torch.mm(weight_nG[start:end].T, stored_nw[start:end], out=sums[bag])
        return sums
    return torch.stack([_bags(stored_nw, offsets, weight_n) for weight_n in weight_nG.T.contiguous()], 1)


def _bags(vectors_nw: Tensor, offsets: Tensor, weight_n: Tensor) -> Tensor:
    """Return weighted sums of consecutive vectors; each bag starts at its offset."""
    index = torch.arange(len(vectors_nw), dtype=torch.int32, device=vectors_nw.device)
    sums: Tensor = torch.embedding_bag(vectors_nw, index, offsets, False, 0, False, weight_n)[0]
    return sums


def packed_attention(
    query_BHqd: Tensor,
    blocks: Sequence[Block],
    tail: Tail,
    scale: float,
    reach: CacheWindow | None = None,
    fill: Fill | None = None,
) -> Tensor:
    """Attend from the last q tokens to packed entries and the tail, [B, H, q, d]; see ``dispatch.attend``."""
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
    reach: CacheWindow | None,
    per_sample: int,
) -> tuple[Tensor, Tensor]:
    """Call ``_attend`` for blocks that hold some of the rows each, and join what it returns.

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
    reach: CacheWindow | None,
    fill_x1d: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a block's tails, [x, T, G], and its value sums, [x, G, d] (None: no entries)."""
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
    """Return the softmax over N, computed in fp32."""
    (rows, length, columns), dtype = scores_xNG.shape, scores_xNG.dtype
    if columns == 1:  # the last axis is the fast one
        scores_xNG = scores_xNG.view(rows, length)
    wide = scores_xNG.softmax(1) if dtype == torch.float32 else scores_xNG.softmax(1, dtype=torch.float32).to(dtype)
    return wide.view(rows, length, columns)
