"""The gradient of a choice among keys: attention goes without the dropped ones, and the choice still learns (ours).

A dropped key's mask, minus infinity, has no gradient. So its slope is written down: the loss's, were a kept key's mask
moved, and were a dropped key alone put back (to first order in the layer's output). It passes through the sigmoid of
the key's logit, as that of value groups does.

Legend: B batch, H query heads, h key-value heads, q rows, K columns, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subtoken_train.functional.causal_attention import Seen


def with_key_gradient(
    out_BHqd: Tensor,
    logits_BhK: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    keep_BhK: Tensor,
    learns_BK: Tensor,
    seen: Seen,
    scale: float,
    block: int,
) -> Tensor:
    """Return the attention of the last q of K places over the keys that stay, with a gradient to the keys' logits.

    Args:
        states: rotated queries [B, H, q, d], rotated keys [B, h, K, d], and values [B, h, K, d] that kept entries read
            as, and dropped ones would.
        learns_BK: entries that had a choice, bool; the gradient of all others is zero.
        seen: of the K places, before any key is dropped.
    """
    chosen: Callable[..., Tensor] = _KeyGradient.apply
    return chosen(out_BHqd, logits_BhK, *states, keep_BhK, learns_BK, seen, scale, block)


class _KeyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, logits: Tensor, *others: Any) -> Tensor:
        tensors, (ctx.seen, ctx.scale, ctx.block) = others[:5], others[5:]
        ctx.save_for_backward(out, logits, *tensors)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out, logits, query, key, value, keep, learns = ctx.saved_tensors
        rows = gradients[0], out, query
        slope_BhK = _mask_slope(rows, key, value, keep, ctx.seen, ctx.scale, ctx.block) * learns[:, None]
        through: Tensor = torch.ops.aten.sigmoid_backward(slope_BhK, logits.float().sigmoid())
        return gradients[0], through.to(logits.dtype), *[None] * 8


def _mask_slope(
    rows: tuple[Tensor, Tensor, Tensor],
    key_BhKd: Tensor,
    value_BhKd: Tensor,
    keep_BhK: Tensor,
    seen: Seen,
    scale: float,
    block: int,
) -> Tensor:
    """Slope of the loss in each key's mask, [B, h, K] in fp32; ``rows``: output's gradient, output, and queries."""
    batch, heads, columns, _ = key_BhKd.shape
    length = rows[0].shape[2]
    slope_BhK = torch.zeros(batch, heads, columns, device=key_BhKd.device)
    key, value = key_BhKd.float(), value_BhKd.float()
    with torch.autocast(key.device.type, enabled=False):
        for start in range(0, length, block):
            stop = min(start + block, length)
            parts = (x[:, :, start:stop].float().reshape(batch, heads, -1, x.shape[-1]) for x in rows)
            gradient_Bhid, out_Bhid, query_Bhid = parts  # the rows of a key head's query heads, one after another
            first, end = columns - length + start, columns - length + stop
            part = slice(seen.first_column(first), end)
            visible = seen.of_rows(first, end, key.device).expand(batch, heads, -1, -1)
            visible = visible.repeat(1, 1, rows[0].shape[1] // heads, 1)
            kept = visible & keep_BhK[:, :, None, part]
            scores = query_Bhid @ key[:, :, part].mT * scale
            total = scores.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
            weight = torch.where(kept, (scores - total).exp(), (scores - total).sigmoid()).masked_fill(~visible, 0)
            pull = gradient_Bhid @ value[:, :, part].mT - (gradient_Bhid * out_Bhid).sum(-1, keepdim=True)
            slope_BhK[..., part] += (weight * pull).sum(2)
    return slope_BhK
