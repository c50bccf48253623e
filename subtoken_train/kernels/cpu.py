"""Attention of new tokens on packed storage in pure torch, tuned for CPUs; it runs on every device.

Of a short cache the calls of operations cost more than what they do: so the tail of all rows is one product, and a
block of few rows takes views. Scores have keys first, and one query row of a head takes a bag of vectors. What is
rounded is read a stretch at a time.

Legend: B batch, H query heads, h key-value heads, q new tokens, c heads of a row, X = all rows times c, x those of a
block, G query rows of a head (H / h * q), M entries of a part, T tail tokens, N entries of a row and its tail, P pieces
of a row, w channels of a piece, n stored pieces, k channels of a cut key, m entries of a stretch, d head width.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import Payload
from subtoken_train.kernels.storage import Block, CacheWindow, Fill, RoutedValues, Tail, read_pages

MANY = 4  # query rows of a head from which one product per piece beats one bag per query row


def block_scores(query_XGd: Tensor, block: Block) -> list[Tensor]:
    """Return scores [X, m, G] of all parts of a block, stretch after stretch; none of a part without entries."""
    thin = query_XGd
    if block.channels is not None:  # the queries' channels that cut keys keep in each head, [X, G, k]
        thin = query_XGd.gather(2, block.channels.flatten(0, 1).long()[:, None].expand(-1, query_XGd.shape[1], -1))
    held = [(part.keys, (thin if part.cut else query_XGd).mT) for part in block.parts if part.entries]
    return [own.bmm(turned) for keys, turned in held for _, own in _stretches(keys, turned.dtype)]


def _stretches(stored: Payload, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (first entry, vectors [X, m, d]) of a payload with entries, as many as may be read at once."""
    length, step = stored.entries, stored.stretch
    for start in range(0, length, step):
        own = stored if step >= length else stored.narrow(2, start, min(step, length - start))
        yield start, in_dtype(own.read(), dtype).flatten(0, 1)


def in_dtype(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert only where needed (autocast leaves keys and values of other dtypes), because a call costs time."""
    return vectors if vectors.dtype == dtype else vectors.to(dtype)


def causal(scores_XTG: Tensor, own_q: Tensor, start_X: Tensor | None) -> Tensor:
    """Hide from each new token what comes after its place, and padding; one that sees nothing sees itself, not NaN."""
    length, columns = scores_XTG.shape[1:]
    places_T = torch.arange(length, device=scores_XTG.device)[:, None]
    own_G = own_q.repeat(columns // len(own_q))
    hidden = places_T > own_G
    if start_X is not None:
        hidden = hidden | (places_T < start_X[:, None, None]) & (places_T != own_G)
    return scores_XTG.masked_fill(hidden, -torch.inf)


def weighted_sums(weight_XMG: Tensor, values: Payload | RoutedValues) -> Tensor:
    """Return the weighted sums of a part's values, [X, G, d]; it has at least one entry."""
    if isinstance(values, RoutedValues):
        return _of_pieces(weight_XMG, values)
    length, columns = weight_XMG.shape[1:]
    as_stored = values.scale is None and values.data.shape[2] == length and values.data.is_contiguous()
    if columns == 1 and as_stored and weight_XMG.device.type == "cpu":
        vectors = in_dtype(values.data, weight_XMG.dtype).flatten(0, 2)
        offsets = torch.arange(0, len(vectors), length, dtype=torch.int32)
        return _bags(vectors, offsets, weight_XMG.reshape(-1)).unsqueeze(1)
    turned = weight_XMG.mT
    read = _stretches(values, turned.dtype)
    sums = [turned.narrow(2, start, vectors.shape[1]).bmm(vectors) for start, vectors in read]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _of_pieces(weight_XMG: Tensor, values: RoutedValues) -> Tensor:
    """Sum one bag of pieces per (row, piece), weighted by its probabilities; rounded ones are read by runs of bags."""
    columns, pieces, places_n, bounds = weight_XMG.shape[2], values.pieces, values.places(), values.bounds
    if columns == 1:  # one axis is gathered faster than two
        weight_nG = weight_XMG.reshape(-1).index_select(0, places_n).unsqueeze(1)
    else:
        weight_nG = weight_XMG.reshape(-1, columns).index_select(0, places_n)
    if pieces.scale is None:
        sums = _bag_sums(weight_nG, in_dtype(pieces.data, weight_XMG.dtype), values.offsets, bounds)
    else:
        found = []
        for first, last in _runs(bounds, formats.CHUNK // pieces.data.shape[-1]):
            start, end = bounds[first], bounds[last]
            inside, offsets = [bound - start for bound in bounds[first : last + 1]], values.offsets[first:last] - start
            stored = in_dtype(values.read(slice(start, end), places_n), weight_XMG.dtype)
            found.append(_bag_sums(weight_nG[start:end], stored, offsets, inside))
        sums = torch.cat(found)  # [R * P, G, w]
    if columns == 1:
        return sums.view(len(weight_XMG), 1, -1)
    return sums.view(len(weight_XMG), -1, columns, sums.shape[-1]).transpose(1, 2).flatten(2)


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
    if (columns := weight_nG.shape[1]) == 1:
        return _bags(stored_nw, offsets, weight_nG.view(-1)).unsqueeze(1)
    if columns > MANY:
        sums = weight_nG.new_empty(len(offsets), columns, stored_nw.shape[-1])
        for bag, (start, end) in enumerate(pairwise(bounds)):
            torch.mm(weight_nG[start:end].T, stored_nw[start:end], out=sums[bag])
        return sums
    return torch.stack([_bags(stored_nw, offsets, weight_n) for weight_n in weight_nG.T.contiguous()], 1)


def _bags(vectors_nw: Tensor, offsets: Tensor, weight_n: Tensor) -> Tensor:
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
    """Attend from the last q tokens to packed entries and the tail, [B, H, q, d]; arguments of ``dispatch.attend``."""
    batch, kv_heads, heads = len(query_BHqd), tail.room_keys_BhTd.shape[1], blocks[0].heads
    per_sample = kv_heads // heads  # rows of a sample: where heads have entries of their own, a row is one head
    dtype, query_XGd = query_BHqd.dtype, query_BHqd.reshape(batch * kv_heads, -1, query_BHqd.shape[3])
    scaled_XGd, own = query_XGd * scale, None
    scores_XTG = in_dtype(tail.keys, dtype).flatten(0, 1).bmm(scaled_XGd.mT)
    if query_BHqd.shape[2] > 1 or tail.start_B is not None or tail.written is not None or reach is not None:
        own = tail.own_places(query_BHqd.shape[2])
        start_X = None if tail.start_B is None else tail.start_B.repeat_interleave(kv_heads)
        scores_XTG = causal(scores_XTG, own, start_X)
    states = [query_XGd, scaled_XGd, scores_XTG] + ([] if fill is None else [fill.of_heads(dtype)])
    if blocks[0].rows is None:
        weight_XTG, sums = _attend(blocks[0], states, own, None if reach is None else reach.of_rows(None, per_sample))
    else:
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
    by_row = [x.reshape(rows, len(x) // rows, *x.shape[1:]) for x in states]
    each = [x.unbind(0) for x in by_row]
    weights: dict[int, Tensor] = {}
    sums: dict[int, Tensor] = {}
    for block in blocks:
        assert block.rows is not None
        assert block.numbers is not None
        alone = len(block.numbers) == 1
        if alone:
            of_block = [x[block.numbers[0]] for x in each]
        else:
            of_block = [x.index_select(0, block.rows).flatten(0, 1) for x in by_row]
        near = None if reach is None else reach.of_rows(block.rows, per_sample)
        weight_xTG, sums_xGd = _attend(block, of_block, own_q, near)
        if sums_xGd is None:
            sums_xGd = torch.zeros_like(of_block[0])
        for taken, found in ((weights, weight_xTG), (sums, sums_xGd)):
            taken.update(zip(block.numbers, [found] if alone else found.chunk(len(block.numbers)), strict=True))
    return torch.cat([weights[row] for row in range(rows)]), torch.cat([sums[row] for row in range(rows)])


def _attend(
    block: Block, states: Sequence[Tensor], own_q: Tensor | None, reach: CacheWindow | None
) -> tuple[Tensor, Tensor | None]:
    """Return the weights of a block's tails, [x, T, G], and its value sums, [x, G, d] (None: no entries).

    ``states``: of its rows the queries, the scaled ones [x, G, d], the tails' scores [x, T, G], any fill [x, 1, d].
    """
    query_xGd, scaled_xGd, last_xTG, *filled = states
    if block.pages is not None and (own_q is None or len(own_q) == 1):
        block = read_pages(block, query_xGd.reshape(block.num_rows, block.heads, *query_xGd.shape[1:]))
    scores = torch.cat([*block_scores(scaled_xGd, block), last_xTG], 1)
    if reach is not None:
        assert own_q is not None
        hidden = reach.hidden(block, last_xTG.shape[1], own_q, scores.shape[2])
        scores = scores.masked_fill(hidden.expand(-1, block.heads, -1, -1).flatten(0, 1), -torch.inf)
    sizes = [*(part.entries for part in block.parts), last_xTG.shape[1]]
    single = scores.shape[2] == 1
    if single:  # the last axis is the fast one
        scores = scores.squeeze(2)
    wide = scores.softmax(1, dtype=torch.float32).to(scores.dtype)
    *weights, tail_xTG = (wide.unsqueeze(2) if single else wide).split_with_sizes(sizes, 1)
    held = [(part, weight) for part, weight in zip(block.parts, weights, strict=True) if part.entries]
    sums = [weighted_sums(weight, part.values) for part, weight in held]
    masses = [weight.sum(1)[..., None] for part, weight in held if filled and isinstance(part.values, RoutedValues)]
    sums += [sum(masses[1:], masses[0]) * filled[0]] if masses else []
    return tail_xTG, sum(sums[1:], sums[0]) if sums else None
