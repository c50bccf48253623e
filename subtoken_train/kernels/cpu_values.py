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
from subtoken_train.kernels.cpu_rounded import given_order, integers, rounded_stretches
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
        sums = _of_run(weight_nG, values, 0, len(values.offsets))  # [R * P, G, w]
    else:
        weight_nG = weight_nG * pieces.scale.float()
        by_bag = torch.cat([_of_run(weight_nG, values, *run) for run in _runs(values)])
        sums = given_order(by_bag, pieces).to(weight_XMG.dtype)
    if columns == 1:
        return sums.view(len(weight_XMG), 1, -1)
    return sums.view(len(weight_XMG), -1, columns, sums.shape[-1]).transpose(1, 2).flatten(2)


def _runs(values: RoutedValues) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of bags that are read back at once: as many as a processor's cache holds, at least one."""
    bounds, bags = values.bounds, len(values.bounds) - 1
    most = storage.CHUNK // values.pieces.data.shape[-1]
    first = 0
    for bag in range(1, bags):
        if bounds[bag + 1] - bounds[first] > most:
            yield first, bag
            first = bag
    yield first, bags


def _of_run(weight_nG: Tensor, values: RoutedValues, first: int, last: int) -> Tensor:
    """Sums [bags, G, w] of consecutive bags."""
    start, end = values.bounds[first], values.bounds[last]
    offsets, own_nG, pieces = values.offsets, weight_nG, values.pieces
    if last - first < len(offsets):
        offsets, own_nG = offsets[first:last] - start, weight_nG[start:end]
        pieces = pieces.narrow(0, start, end - start)
    stored = in_dtype(pieces.data, own_nG.dtype) if pieces.scale is None else integers(pieces)
    columns = own_nG.shape[1]
    if columns == 1:
        return _bags(stored, offsets, own_nG.view(-1)).unsqueeze(1)
    if columns > MANY:
        sums = own_nG.new_empty(last - first, columns, stored.shape[-1])
        for bag, (begin, stop) in enumerate(pairwise(values.bounds[first : last + 1])):
            torch.mm(own_nG[begin - start : stop - start].T, stored[begin - start : stop - start], out=sums[bag])
        return sums
    return torch.stack([_bags(stored, offsets, weight_n) for weight_n in own_nG.T.contiguous()], 1)


def _bags(vectors_nw: Tensor, offsets: Tensor, weight_n: Tensor) -> Tensor:
    """Weighted sums of consecutive vectors; each bag starts at its offset."""
    index = torch.arange(len(vectors_nw), dtype=torch.int32, device=vectors_nw.device)
    sums: Tensor = torch.embedding_bag(vectors_nw, index, offsets, False, 0, False, weight_n)[0]
    return sums
