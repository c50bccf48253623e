"""Attention on packed storage, written out: everything is made dense, hidden by a mask, and summed in fp32.

What the other paths must equal; slow, and as large as the cache that was not packed.

Legend: B batch, H query heads, h key-value heads, G = H / h, q new tokens, N = most entries of a row and tail places,
d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subtoken_train.kernels import storage


def reference_attention(
    query_BHqd: Tensor,
    blocks: Sequence[storage.Block],
    tail: storage.Tail,
    scale: float,
    reach: storage.CacheWindow | None = None,
    fill: storage.Fill | None = None,
) -> Tensor:
    """Attend from the last q tokens to packed entries and the tail, [B, H, q, d]; see ``dispatch.attend``."""
    (batch, _, new, width), (kv_heads, room) = query_BHqd.shape, tail.keys.shape[1:3]
    most = max([sum(part.entries for part in block.parts) for block in blocks], default=0)
    shape, device = (batch * kv_heads, most + room), query_BHqd.device
    query = query_BHqd.float().reshape(batch * kv_heads, -1, new, width)
    keys, values = (query.new_zeros(*shape, width) for _ in range(2))
    seen, position = (torch.zeros(shape, dtype=kind, device=device) for kind in (torch.bool, torch.long))
    for block in blocks:
        rows = torch.arange(block.num_rows, device=device) if block.rows is None else block.rows
        own = (rows[:, None] * block.heads + torch.arange(block.heads, device=device)).flatten()
        paged = block.pages is not None and new == 1
        read = storage.read_pages(block, query[own].view(len(rows), block.heads, -1, width)) if paged else block
        start = 0
        for part in read.parts:
            held = slice(start, start := start + part.entries)
            keys[own, held] = storage.dense_keys(part, block, width).flatten(0, 1).float()
            values[own, held] = storage.dense_values(part).flatten(0, 1).float()
            if fill is not None and isinstance(part.values, storage.RoutedValues):
                values[own, held] += fill.of_heads(torch.float32)[own]
            seen[own, held] = True
            if part.position_RM is not None:
                position[own, held] = part.position_RM.long().repeat_interleave(block.heads, 0)
    keys[:, most:], values[:, most:] = (x.flatten(0, 1).float() for x in (tail.keys, tail.values))
    places_T, own_q1 = torch.arange(room, device=device), tail.own_places(new)[:, None]
    late = places_T <= own_q1
    if tail.start_B is not None:
        late = late & (places_T >= tail.start_B.repeat_interleave(kv_heads)[:, None, None]) | (places_T == own_q1)
    allowed = torch.cat([seen[:, None, :most].expand(-1, new, -1), late.expand(shape[0], -1, -1)], -1)
    if reach is not None:
        first = reach.first_B.repeat_interleave(kv_heads)[:, None]
        position[:, most:] = first + places_T
        allowed = allowed & ((first + own_q1.T)[..., None] - position[:, None] < reach.size)
    weights = (query @ keys[:, None].mT * scale).masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    return (weights @ values[:, None]).view_as(query_BHqd).to(query_BHqd.dtype)
