"""How fast one layer's decode attention reads its cache, beside a copy of as many bytes on the same device.

Timed in turns, in one process: the attention of one new token over what the layer holds of the prompt, and for each
such layer a copy of as many bytes as it reads (payload and index). A copy reads and writes, so its traffic is twice
its size: 100 % means that attention moves bytes as fast as the copy does, and less is left to gain than that figure
says, because small copies and small kernels cost their launch.

Legend: B batch, H query heads, h key-value heads, d head width, q new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from subtoken_train.benchmarking.pairs import interleaved, ratio
from subtoken_train.benchmarking.sides import PackedSide, Side
from subtoken_train.cache.packed_layer import PackedLayer

CALLS = 20
"""Calls of one measurement, which are longer than the clock's and the launch's own time."""


@torch.no_grad()
def copy_shares(sides: Sequence[Side], pairs: int) -> dict[str, dict[str, Any]]:
    """By side: ``read_bytes``, seconds of attention and of the copy, and ``share`` (median, low, high).

    Of the middle layer; dense caches that have no room to spare stand beside packed ones, read by SDPA.
    """
    actions: dict[str, Callable[[], object]] = {}
    read: dict[str, int] = {}
    for side in sides:
        if side.name == "static":  # most of what it holds may be room
            continue
        with side.turn():
            side.prefill()
            attend, read[side.name] = _attention(side)
        source = torch.empty(read[side.name], dtype=torch.uint8, device=side.prompts.input_ids_BN.device).random_()
        target = torch.empty_like(source)
        actions[side.name] = partial(_repeat, attend)
        actions[f"{side.name} copy"] = partial(_repeat, partial(target.copy_, source))
    seconds = interleaved(actions, pairs)
    return {
        name: {
            "read_bytes": size,
            "attention_seconds": [each / CALLS for each in seconds[name]],
            "copy_seconds": [each / CALLS for each in seconds[f"{name} copy"]],
            # bytes / attention over 2 bytes / copy
            "share": tuple(each / 2 for each in ratio(seconds, f"{name} copy", name)),
        }
        for name, size in read.items()
    }


def _attention(side: Side) -> tuple[Callable[[], object], int]:
    """One new token's attention in the middle layer, and the bytes that it reads."""
    config = side.family.decoder.config
    head_dim = side.family.shape.head_dim
    layer: Any = side.cache.layers[side.family.shape.num_layers // 2]  # type: ignore[attr-defined]
    shape = (len(layer.keys), config.num_attention_heads, 1, head_dim)
    query_BHqd = torch.randn(shape, device=layer.keys.device).to(layer.keys.dtype)
    if isinstance(side, PackedSide):
        assert isinstance(layer, PackedLayer)
        return partial(layer.attend, query_BHqd, head_dim**-0.5), layer.payload_bytes + layer.index_bytes
    key, value = layer.keys, layer.values
    grouped = key.shape[1] != query_BHqd.shape[1]
    attend = partial(F.scaled_dot_product_attention, query_BHqd, key, value, enable_gqa=grouped)
    return attend, key.nbytes + value.nbytes


def _repeat(action: Callable[[], object]) -> None:
    for _ in range(CALLS):
        action()
