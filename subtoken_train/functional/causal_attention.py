"""Causal attention without a matrix of all rows against all columns: fused kernels, a block of rows, statistics.

Where neither flash nor the memory-efficient kernel takes a call, torch computes a matrix of all rows against all
columns. Which calls they take on GPUs since Ampere is written down from torch 2.13
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``): flash half precision without a mask, and shared key heads;
the other masks and fp32 too, with a key head for every query head. cuDNN's kernel is not counted on.

Statistics of attention probabilities compute a block of rows at a time, in fp32; rows are causal by place in the
sequence, and never see keys that ``keys_BN`` leaves out.

The gradient of a choice among keys (ours): attention goes without the dropped ones, whose mask, minus infinity, has no
gradient. So its slope is written down: the loss's, were a kept key's mask moved, and were a dropped key alone put back
(to first order in the layer's output). It passes through the sigmoid of the key's logit, as that of value groups does.

Legend: B batch, H query heads, h key-value heads (H a multiple of h), q rows, K columns, N rows of a window's batch, W
chosen ones, d head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from subtoken_train.functional.gather import each_tensor, kept_index, on_device, take_entries

HALF = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # widest head that flash computes
FLASH_TRAINED = 192  # and whose gradient it computes on every GPU
SHARING = ("cpu",)  # devices whose kernel reads shared key heads, where no gradient is asked for
ALIGNED = 16  # bytes of which a head's width is a multiple for the memory-efficient kernel


def fused_kernels(query_BHqd: Tensor, key_BhKd: Tensor, value_BhKd: Tensor, masked: bool = False) -> tuple[str, ...]:
    """List the kernels that take a call, "flash" before "efficient"; empty where only the matrix would do.

    ``masked``: whether there is a mask; else the call is causal, or nothing is hidden.
    """
    dtype = _computed_in(query_BHqd)
    widths = {x.shape[-1] for x in (query_BHqd, key_BhKd, value_BhKd)}
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query_BHqd, key_BhKd, value_BhKd))
    widest = FLASH_TRAINED if trained else FLASH_WIDTH
    found = []
    found += ["flash"] if not masked and dtype in HALF and len(widths) == 1 and max(widths) <= widest else []
    known, own_heads = dtype in (*HALF, torch.float32), query_BHqd.shape[1] == key_BhKd.shape[1]
    if known and own_heads and query_BHqd.shape[-1] == key_BhKd.shape[-1]:
        found += ["efficient"] * all(width * dtype.itemsize % ALIGNED == 0 for width in widths)
    return tuple(found)


def shared_heads(query_BHqd: Tensor, key_BhKd: Tensor, value_BhKd: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    """Return keys and values as they are where a kernel takes them, else each once per query head that reads it."""
    shares = query_BHqd.shape[1] // key_BhKd.shape[1]
    taken = query_BHqd.device.type in SHARING and not torch.is_grad_enabled()
    if shares == 1 or taken or "flash" in fused_kernels(query_BHqd, key_BhKd, value_BhKd, masked):
        return key_BhKd, value_BhKd
    key, value = (x[:, :, None].expand(-1, -1, shares, -1, -1).flatten(1, 2) for x in (key_BhKd, value_BhKd))
    return key, value


def fused_attention(
    query_BHqd: Tensor,
    key_BhKd: Tensor,
    value_BhKd: Tensor,
    scale: float,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from q rows to K columns, [B, H, q, d].

    ``mask``: what is seen, bool, [q, K] after broadcasting axes; None: the rows are the last q of the K places, and
    each sees itself and all before it.
    """
    rows, columns = query_BHqd.shape[2], key_BhKd.shape[2]
    key, value = shared_heads(query_BHqd, key_BhKd, value_BhKd, mask is not None)
    query, bias = query_BHqd, mask
    if mask is None and rows < columns:
        # this bias calls the kernels by their names, below autocast
        query, key, value = (x.to(_computed_in(query_BHqd)) for x in (query, key, value))
        bias = causal_lower_right(rows, columns)
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, bias, dropout_p=dropout, is_causal=bias is None, scale=scale, enable_gqa=shared
    )


def _computed_in(query: Tensor) -> torch.dtype:
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def in_window(row_position: Tensor, column_position: Tensor, size: int) -> Tensor:
    """Mark the columns that lie in each row's window, bool [..., q, N], from their positions [..., q] and [..., N].

    What stands after a row is in its window too; causality is the caller's.
    """
    return row_position[..., :, None] - column_position[..., None, :] < size


@dataclass(frozen=True)
class SlidingWindow:
    """Rows of a batch in a layer that attends in a window: each sees itself and less than ``size`` positions back.

    ``position_BN`` are those of the whole prompt, whatever was dropped since.
    """

    size: int
    position_BN: Tensor

    def of_rows(self, first: int, stop: int, left: int = 0) -> Tensor:
        """Mark rows ``left`` to ``stop`` that lie in the windows of rows ``first`` to ``stop``, bool [B, q, N]."""
        return in_window(self.position_BN[:, first:stop], self.position_BN[:, left:stop], self.size)

    def of_index(self, index_BW: Tensor) -> Tensor:
        """Mark the rows that lie in the windows of chosen ones, bool [B, W, N]."""
        position_BN = self.position_BN.to(index_BW.device)
        return in_window(position_BN.gather(1, index_BW), position_BN, self.size)


@dataclass(frozen=True)
class Seen:
    """Visibility: what rows see of the places up to their own.

    Attributes:
        places_BK: seen by what stands after them, bool; every place sees itself. None: all, which nobody looks up.
        window: of all K places; None: every place sees all before it.
        keys_BhK: of the places that are seen, those whose key a head has, bool; None: each head has all.
        gate_BhK: log of how far an entry is seen (-inf: not at all) from rows more than ``delay`` places after it; it
            joins their logits ("Inference-Time Hyper-Scaling with KV Cache Compression", DMS, 2506.05345, section 3).
    """

    places_BK: Tensor | None = None
    window: SlidingWindow | None = None
    keys_BhK: Tensor | None = None
    gate_BhK: Tensor | None = None
    delay: int = 0

    def until(self, end: int) -> Self:
        """Return the same of the first places."""
        places, keys = (None if each is None else each[..., :end] for each in (self.places_BK, self.keys_BhK))
        return replace(self, places_BK=places, keys_BhK=keys)

    def first_column(self, row: int) -> int:
        """Return the first place that a row, or one after it, may see; positions do not rise over padding."""
        return 0 if self.window is None or self.places_BK is not None else max(0, row + 1 - self.window.size)

    def of_rows(self, first: int, end: int, device: torch.device) -> Tensor:
        """Mark what rows ``first`` to ``end`` see from ``first_column`` to ``end``, bool [B or 1, 1, q, N]."""
        left = self.first_column(first)
        rows_q1 = torch.arange(first, end, device=device)[:, None]
        columns_K = torch.arange(left, end, device=device)
        seen_BqK = (rows_q1 >= columns_K)[None]
        if self.places_BK is not None:
            seen_BqK = seen_BqK & self.places_BK[:, None, left:end].to(device)
        if self.window is not None:
            seen_BqK = seen_BqK & self.window.of_rows(first, end, left).to(device)
        return (seen_BqK | (rows_q1 == columns_K))[:, None]


def causal_attention(
    query_BHqd: Tensor, key_BhKd: Tensor, value_BhKd: Tensor, seen: Seen, scale: float, block: int, dropout: float = 0.0
) -> Tensor:
    """Attend from the last q of K places, [B, H, q, d]."""
    rows, columns = query_BHqd.shape[2], key_BhKd.shape[2]
    if seen.keys_BhK is not None or (seen.gate_BhK is not None and key_BhKd.shape[1] > 1):
        return _by_key_head(query_BHqd, key_BhKd, value_BhKd, seen, scale, block, dropout)
    unmasked = seen.places_BK is None and seen.window is None and seen.gate_BhK is None
    if unmasked and (rows == columns or query_BHqd.is_cuda):
        return fused_attention(query_BHqd, key_BhKd, value_BhKd, scale, dropout=dropout)
    key, value = shared_heads(query_BHqd, key_BhKd, value_BhKd, masked=True)
    parts = []
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        first, end = columns - rows + start, columns - rows + stop
        part = slice(seen.first_column(first), end)
        mask_BhqK = seen.of_rows(first, end, query_BHqd.device)
        if seen.gate_BhK is not None:
            places_K = torch.arange(part.start, end, device=query_BHqd.device)
            late_qK = places_K[first - end :, None] - places_K > seen.delay
            bias_BhqK = torch.where(late_qK, seen.gate_BhK[:, :, None, part], 0.0)
            mask_BhqK = bias_BhqK.masked_fill(~mask_BhqK, -torch.inf).to(_computed_in(query_BHqd))
        query = query_BHqd[:, :, start:stop]
        parts.append(fused_attention(query, key[:, :, part], value[:, :, part], scale, mask_BhqK, dropout))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _by_key_head(
    query_BHqd: Tensor, key_BhKd: Tensor, value_BhKd: Tensor, seen: Seen, scale: float, block: int, dropout: float
) -> Tensor:
    """Attend with every key head as a sample of its own; a CPU takes the keys that it has, where nothing trains."""
    (batch, heads, columns, _), rows = key_BhKd.shape, query_BHqd.shape[2]
    states = [x.reshape(batch * heads, -1, *x.shape[2:]) for x in (query_BHqd, key_BhKd, value_BhKd)]
    seen = on_device(seen, query_BHqd.device)
    keys, gate = (None if x is None else x.flatten(0, 1) for x in (seen.keys_BhK, seen.gate_BhK))
    own = each_tensor(replace(seen, keys_BhK=None, gate_BhK=None), lambda x: x.repeat_interleave(heads, 0))
    own = replace(own, gate_BhK=None if gate is None else gate[:, None])
    if keys is not None:
        own = replace(own, places_BK=keys if own.places_BK is None else own.places_BK & keys)

    def some(part: slice, index_K: Tensor | None = None) -> Tensor:
        query, key, value, here = *(x[part] for x in states), own
        if index_K is not None:
            key, value = (take_entries(x, index_K[None]) for x in (key, value))
            here = each_tensor(own, lambda x: x[part, index_K])
        return causal_attention(query, key, value, here, scale, block, dropout)

    if keys is None or gate is not None or torch.is_grad_enabled() or keys.device.type in DEVICES:
        return some(slice(None)).view(*query_BHqd.shape[:3], -1)
    taken_RK = keys | (torch.arange(columns, device=keys.device) >= columns - rows)
    parts = [some(slice(row, row + 1), taken_K.nonzero()[:, 0]) for row, taken_K in enumerate(taken_RK)]
    return torch.cat(parts).view(*query_BHqd.shape[:3], -1)


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
        """Give the logits the slope of the loss in each key's mask, [B, h, K] in fp32, through the sigmoid."""
        out, logits_BhK, query, key_BhKd, value_BhKd, keep_BhK, learns_BK = ctx.saved_tensors
        (batch, heads, columns, _), (_, asking, length, _) = key_BhKd.shape, query.shape
        slope_BhK = torch.zeros(batch, heads, columns, device=key_BhKd.device)
        key, value = key_BhKd.float(), value_BhKd.float()
        with torch.autocast(key.device.type, enabled=False):
            for start in range(0, length, ctx.block):
                stop = min(start + ctx.block, length)
                own = (x[:, :, start:stop].float() for x in (gradients[0], out, query))
                # the rows of a key head's query heads, one after another
                gradient_Bhid, out_Bhid, query_Bhid = (x.reshape(batch, heads, -1, x.shape[-1]) for x in own)
                first, end = columns - length + start, columns - length + stop
                part = slice(ctx.seen.first_column(first), end)
                visible = ctx.seen.of_rows(first, end, key.device).expand(batch, heads, -1, -1)
                visible = visible.repeat(1, 1, asking // heads, 1)
                kept = visible & keep_BhK[:, :, None, part]
                scores = query_Bhid @ key[:, :, part].mT * ctx.scale
                total = scores.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
                weight = torch.where(kept, (scores - total).exp(), (scores - total).sigmoid()).masked_fill(~visible, 0)
                pull = gradient_Bhid @ value[:, :, part].mT - (gradient_Bhid * out_Bhid).sum(-1, keepdim=True)
                slope_BhK[..., part] += (weight * pull).sum(2)
        slope_BhK = slope_BhK * learns_BK[:, None]
        through: Tensor = torch.ops.aten.sigmoid_backward(slope_BhK, logits_BhK.float().sigmoid())
        return gradients[0], through.to(logits_BhK.dtype), *[None] * 8


BLOCK = 128  # rows of the attention matrix that exist at a time
DEVICES = ("cuda",)  # whose numbers the host does not read here, layer after layer: it would wait for all work before


@torch.no_grad()
def attention_rows(
    query_BHNd: Tensor,
    key_BhNd: Tensor,
    index_BW: Tensor,
    keys_BN: Tensor,
    scale: float,
    offset: int = 0,
    window: SlidingWindow | None = None,
    surely: int = 0,
) -> Tensor:
    """Return the attention of chosen rows, [B, H, W, N] in fp32; 0 everywhere in a row that may see no key.

    ``index_BW``: int64, -1 is none; ``keys_BN``: keys that may be seen, bool; ``offset``: place of the first query
    among the keys; ``surely``: number of first keys that are known to be seen by all rows.
    """
    batch, heads, _, width = query_BHNd.shape
    length, rows_BW = key_BhNd.shape[2], index_BW.clamp(min=0)
    chosen = take_entries(query_BHNd, rows_BW).float()
    grouped = (chosen * scale).view(batch, key_BhNd.shape[1], -1, width)  # the query heads of a key head, row after row
    logits = (grouped @ key_BhNd.float().transpose(-1, -2)).view(batch, heads, -1, length)
    rest_N = torch.arange(surely, length, device=query_BHNd.device)
    seen_BWN = (rest_N <= rows_BW[..., None] + offset) & keys_BN[:, None, surely:] & (index_BW >= 0)[..., None]
    if window is not None:
        seen_BWN = seen_BWN & window.of_index(rows_BW + offset)[..., surely:length]
    logits[..., surely:].masked_fill_(~seen_BWN[:, None], -torch.inf)
    probabilities = torch.softmax(logits, -1, out=logits)
    if surely:
        return probabilities
    blind_BW = ~seen_BWN.any(-1)
    if blind_BW.device.type in DEVICES or bool(blind_BW.any()):  # seldom needed; a device would wait longer to hear so
        probabilities = probabilities.masked_fill(blind_BW[:, None, :, None], 0.0)
    return probabilities


def attention_blocks(
    query_BHNd: Tensor,
    key_BhNd: Tensor,
    rows_BN: Tensor,
    keys_BN: Tensor,
    scale: float,
    offset: int = 0,
    window: SlidingWindow | None = None,
    most: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over the marked rows: yields (index_BW, probabilities [B, H, W, N]) with at most ``BLOCK`` rows each.

    ``rows_BN``: the rows that are wanted, bool; -1 in ``index_BW`` is none. ``most``: see ``attention_received``.
    """
    for index_BW, _, _ in _blocks_of_rows(rows_BN, keys_BN, offset, window, most):
        yield index_BW, attention_rows(query_BHNd, key_BhNd, index_BW, keys_BN, scale, offset, window)


def _marked(rows_BN: Tensor, most: int | None = None) -> Tensor:
    index_BR, valid_BR = kept_index(rows_BN, pad_left=False, longest=most)
    return index_BR.masked_fill(~valid_BR, -1)


def attention_received(
    query_BHNd: Tensor,
    key_BhNd: Tensor,
    rows_BN: Tensor,
    keys_BN: Tensor,
    scale: float,
    offset: int = 0,
    window: SlidingWindow | None = None,
    weight_BN: Tensor | None = None,
    largest: bool = False,
    most: int | None = None,
) -> Tensor:
    """Return what each key receives from the marked rows, sum or largest, [B, H, K] in fp32; 0 without rows.

    ``weight_BN`` multiplies each row's. ``most``: rows that a sample marks at most, where that is known: few are
    computed alone on a GPU too, which nothing is read from.
    """
    found_BHK = torch.zeros(*query_BHNd.shape[:2], key_BhNd.shape[2], device=key_BhNd.device)
    states, heads = (query_BHNd, key_BhNd.float(), found_BHK), 1 if key_BhNd.is_cuda else key_BhNd.shape[1]
    parts = list(zip(*(each.chunk(heads, 1) for each in states), strict=True))  # a CPU's caches hold those of one head
    for index_BW, end, surely in _blocks_of_rows(rows_BN, keys_BN, offset, window, most):
        for query, key, into in parts:
            rows = attention_rows(query, key[:, :, :end], index_BW, keys_BN[:, :end], scale, offset, window, surely)
            if weight_BN is not None:
                rows = rows * weight_BN.gather(1, index_BW.clamp(min=0))[:, None, :, None]
            seen = into[..., :end]
            seen.copy_(torch.maximum(seen, rows.amax(2)) if largest else seen + rows.sum(2))
    return found_BHK


def _blocks_of_rows(
    rows_BN: Tensor, keys_BN: Tensor, offset: int, window: SlidingWindow | None, most: int | None
) -> Iterator[tuple[Tensor, int, int]]:
    """Yield marked rows, [B, W] (-1: none), the number of first keys that they may see, and of those they surely do."""
    length = rows_BN.shape[1]
    if rows_BN.device.type in DEVICES:
        few = most is not None and 2 * most < length
        index_BR = _marked(rows_BN, most) if few else torch.arange(length, device=rows_BN.device).where(rows_BN, -1)
        for start in range(0, index_BR.shape[1], BLOCK):
            yield index_BR[:, start : start + BLOCK], offset + (length if few else min(start + BLOCK, length)), 0
        return
    index_BR, whole = _marked(rows_BN), window is None and bool(keys_BN.all())
    first_R, last_R = (each.tolist() for each in (index_BR + offset).aminmax(dim=0))
    for start in range(0, len(last_R), BLOCK):
        own = slice(start, start + BLOCK)
        first = min(first_R[own])
        yield index_BR[:, own], max(last_R[own]) + 1, first + 1 if whole and first >= offset else 0


def attention_paid(blocks: Iterator[tuple[Tensor, Tensor]], over_heads: Literal["mean", "max"] = "mean") -> Tensor:
    """Return what all rows of some blocks pay to each position, [B, N] in fp32; a sample without rows gets zeros."""
    found = []
    for index_BW, attention_BHWN in blocks:
        rows_BWN = attention_BHWN.mean(1) if over_heads == "mean" else attention_BHWN.amax(1)
        found.append((rows_BWN * (index_BW >= 0)[..., None]).sum(1))
    return sum(found[1:], found[0])
