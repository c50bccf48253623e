"""Scores of stored keys and of the tail, keys first: a few rows times many columns is slow on a CPU.

Legend: X = rows of a block times heads of a row, M entries of a part, T tail tokens, G query rows of a head (of q new
tokens, tokens fastest), d head width, k channels of a cut key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.kernels.cpu_rounded import rounded_stretches, stored_order
from subtoken_train.kernels.storage import Block, BlockPart

FEW = 2  # query rows of a head up to which a CPU multiplies matrices in a batch faster than one alone


def block_scores(query_XGd: Tensor, block: Block) -> list[Tensor]:
    """Scores [X, m, G] of all parts of a block, stretch after stretch; none of a part without entries."""
    thin = query_XGd if block.channels is None else _channels_of(query_XGd, block.channels.flatten(0, 1))
    return [
        scores for part in block.parts if part.entries for scores in _part_scores(thin if part.cut else query_XGd, part)
    ]


def _channels_of(query_XGd: Tensor, channels_Xk: Tensor) -> Tensor:
    """The queries in the channels of each head that cut keys keep, [X, G, k]."""
    return query_XGd.gather(2, channels_Xk.long()[:, None].expand(-1, query_XGd.shape[1], -1))


def _part_scores(query_XGd: Tensor, part: BlockPart) -> list[Tensor]:
    keys, dtype = part.keys, query_XGd.dtype
    if keys.scale is not None:  # in fp32: whole numbers times a query may pass what fp16 holds
        turned = stored_order(query_XGd, keys).float().mT
        return [(codes.bmm(turned) * scale).to(dtype) for _, codes, scale in rounded_stretches(keys)]
    if len(query_XGd) == 1 and query_XGd.shape[1] <= FEW and keys.data.dtype == dtype and part.halves is not None:
        return _halved(query_XGd, part.halves, part.entries)
    turned, step = query_XGd.mT, keys.stretch
    if step >= keys.entries:
        return [in_dtype(keys.read(), dtype).flatten(0, 1).bmm(turned)]
    starts = range(0, keys.entries, step)
    stretches = [keys.narrow(2, start, min(step, keys.entries - start)) for start in starts]
    return [in_dtype(stretch.read(), dtype).flatten(0, 1).bmm(turned) for stretch in stretches]


def in_dtype(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype: a prompt that ran under autocast left keys and values of unlike ones. A call costs time."""
    return vectors if vectors.dtype == dtype else vectors.to(dtype)


def _halved(query_1Gd: Tensor, halves: Tensor, entries: int) -> list[Tensor]:
    """Scores [1, m, G] of one head.

    A CPU multiplies a matrix and a vector at a fraction of the memory's speed, and two of both in a batch at all of it.
    """
    both = halves.bmm(query_1Gd.mT.expand(2, -1, -1))
    if entries % 2 == 0:
        return [both.view(1, entries, -1)]
    return [both[:1], both[1:, 1:]]


def causal(scores_XTG: Tensor, own_q: Tensor, start_X: Tensor | None) -> Tensor:
    """Hide from each new token, which stands at its own place, those that come after it.

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
