"""Weighted sums of stored values: whole ones, and the pieces of routed ones.

One query row of a head takes a bag of vectors, which a CPU reads faster than a product with one row.

Legend: X = rows of a block times heads of a row, M entries of a part, G query rows of a head, d head width, P pieces of
a row, w channels of a piece, n stored pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from subtoken_train.kernels import storage
from subtoken_train.kernels.cpu_rounded import Integers, given_order, rounded_stretches
from subtoken_train.kernels.cpu_scores import in_dtype
from subtoken_train.kernels.storage import Payload, RoutedValues

MANY = 4  # query rows of a head from which one product per piece beats one bag per query row


def weighted_sums(weight_XMG: Tensor, values: Payload | RoutedValues) -> Tensor:
    """Sums of a part's values, [X, G, d]; at least one entry."""
    if isinstance(values, RoutedValues):
        return _of_pieces(weight_XMG, values)
    if values.scale is not None:
        return _of_rounded(weight_XMG, values)
    length, columns = weight_XMG.shape[1:]
    as_stored = values.data.shape[2] == length and values.data.is_contiguous()
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
    """Whole values; the scales go into the weights."""
    sums = [
        (weight_XMG.narrow(1, start, codes.shape[1]) * scale.float()).mT.bmm(codes)
        for start, codes, scale in rounded_stretches(values)
    ]
    whole = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return given_order(whole, values).to(weight_XMG.dtype)


def _of_pieces(weight_XMG: Tensor, values: RoutedValues) -> Tensor:
    """One bag of pieces per (row, piece), weighted by its probabilities."""
    columns, pieces = weight_XMG.shape[2], values.pieces
    if columns == 1:  # one axis is gathered faster than two
        weight_nG = weight_XMG.reshape(-1).index_select(0, values.places()).unsqueeze(1)
    else:
        weight_nG = weight_XMG.reshape(-1, columns).index_select(0, values.places())
    if pieces.scale is None:
        stored = in_dtype(pieces.data, weight_nG.dtype)
        sums = _bag_sums(weight_nG, stored, values.offsets, values.bounds)  # [R * P, G, w]
    else:
        weight_nG = weight_nG * pieces.scale.float()
        sums = given_order(_of_rounded_pieces(weight_nG, values), pieces).to(weight_XMG.dtype)
    if columns == 1:
        return sums.view(len(weight_XMG), 1, -1)
    return sums.view(len(weight_XMG), -1, columns, sums.shape[-1]).transpose(1, 2).flatten(2)


def _of_rounded_pieces(weight_nG: Tensor, values: RoutedValues) -> Tensor:
    """Sums [R * P, G, w] in ``stored_order``, run after run of bags; the scales are in the weights."""
    bounds, codes = values.bounds, values.pieces.data
    runs = list(_runs(bounds, storage.CHUNK // codes.shape[-1]))
    integers, sums = Integers(values.pieces, max(bounds[last] - bounds[first] for first, last in runs)), []
    for first, last in runs:
        start, end = bounds[first], bounds[last]
        inside = [bound - start for bound in bounds[first : last + 1]]
        stored, offsets = integers.of(codes[start:end]), values.offsets[first:last] - start
        sums.append(_bag_sums(weight_nG[start:end], stored, offsets, inside))
    return torch.cat(sums)


def _runs(bounds: list[int], most: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of consecutive bags that hold at most so many vectors, or of one bag."""
    first = 0
    for bag in range(1, len(bounds) - 1):
        if bounds[bag + 1] - bounds[first] > most:
            yield first, bag
            first = bag
    yield first, len(bounds) - 1


def _bag_sums(weight_nG: Tensor, stored_nw: Tensor, offsets: Tensor, bounds: list[int]) -> Tensor:
    """Sums [bags, G, w] of bags that start at ``offsets``; ``bounds`` are the same and n, on the host."""
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
    """Weighted sums of consecutive vectors; each bag starts at its offset."""
    index = torch.arange(len(vectors_nw), dtype=torch.int32, device=vectors_nw.device)
    sums: Tensor = torch.embedding_bag(vectors_nw, index, offsets, False, 0, False, weight_n)[0]
    return sums
