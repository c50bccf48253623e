"""Calls of torch's attention that one of its fused CUDA kernels takes: flash, or the memory-efficient one.

Where neither does, torch computes a matrix of all rows against all columns. Which calls they take is a rule of torch
(2.13: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``); a CPU build cannot be asked, so it is written down
here. In short: flash reads no mask and half precision alone, and shares a key head between query heads; the
memory-efficient kernel reads masks and fp32 too, and every query head needs a key head of its own. A CPU gives the same
numbers either way.

cuDNN's kernel, which builds of torch may have and prefer on some GPUs, is not counted on: it reads masks and shared key
heads in half precision, and may take calls that are said here to be left to the matrix.

Not told apart are GPUs: Ampere and later are meant. An older one has no flash, and takes what is grouped as a matrix.

Legend: B batch, H query heads, h key-value heads (H a multiple of h), q rows, K columns, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

HALF = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # widest head that flash computes
FLASH_TRAINED = 192  # and whose gradient it computes on every GPU
ALIGNED = 16  # bytes of which a head's width is a multiple for the memory-efficient kernel


def fused_kernels(query_BHqd: Tensor, key_BhKd: Tensor, value_BhKd: Tensor, masked: bool = False) -> tuple[str, ...]:
    """Kernels that take a call, "flash" before "efficient"; empty where only the matrix would do.

    Args:
        query_BHqd: queries.
        key_BhKd: keys, of fewer heads where query heads share them.
        value_BhKd: values.
        masked: whether there is a mask; else the call is causal, or nothing is hidden.
    """
    dtype = _computed_in(query_BHqd)
    widths = {x.shape[-1] for x in (query_BHqd, key_BhKd, value_BhKd)}
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query_BHqd, key_BhKd, value_BhKd))
    widest = FLASH_TRAINED if trained else FLASH_WIDTH
    found = []
    if not masked and dtype in HALF and len(widths) == 1 and max(widths) <= widest:
        found.append("flash")
    known, own_heads = dtype in (*HALF, torch.float32), query_BHqd.shape[1] == key_BhKd.shape[1]
    if known and own_heads and query_BHqd.shape[-1] == key_BhKd.shape[-1]:
        found += ["efficient"] * all(width * dtype.itemsize % ALIGNED == 0 for width in widths)
    return tuple(found)


def shared_heads(query_BHqd: Tensor, key_BhKd: Tensor, value_BhKd: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    """Keys and values as they are where flash takes the call, else each once for every query head that reads it."""
    shares = query_BHqd.shape[1] // key_BhKd.shape[1]
    if shares == 1 or "flash" in fused_kernels(query_BHqd, key_BhKd, value_BhKd, masked):
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
    """Attention of q rows to K columns, [B, H, q, d].

    Args:
        query_BHqd: queries.
        key_BhKd: keys; query head i reads key head i // (H / h).
        value_BhKd: values.
        scale: factor of the scores.
        mask: what is seen, bool, [q, K] after broadcasting axes; None: the rows are the last q of the K places, and
            each sees itself and all before it.
        dropout: of the probabilities.
    """
    rows, columns = query_BHqd.shape[2], key_BhKd.shape[2]
    key, value = shared_heads(query_BHqd, key_BhKd, value_BhKd, mask is not None)
    query, bias = query_BHqd, mask
    if mask is None and rows < columns:
        # this bias calls the kernels by their names, below autocast
        query, key, value = (x.to(_computed_in(query_BHqd)) for x in (query, key, value))
        bias = causal_lower_right(rows, columns)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        bias,
        dropout_p=dropout,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _computed_in(query: Tensor) -> torch.dtype:
    """The dtype that attention runs in: autocast's where it is on."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
