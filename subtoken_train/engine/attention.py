"""The attention implementation of a compressed language model, registered with transformers.

One function per implementation that it wraps (``subtoken_sdpa``, ``subtoken_flash_attention_2``, ...), set for the
language model only. A prompt's pass runs the wrapped implementation unchanged, or the context split where one is given,
and then shows rotated queries, keys and values to whoever observes; decoding reads packed storage. Rows that go on
after others of their layer (``engine/chunks.py``), and layers with windows, say by ``seen`` what they see, instead of a
mask.

Legend: B batch, N rows, M columns, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.context_split import ContextSplit
from subtoken_train.families.attention_kinds import PREFIX
from subtoken_train.forks import undoing
from subtoken_train.functional.causal_attention import Seen, causal_attention
from subtoken_train.functional.fused_attention import fused_kernels

ROW_BLOCK = 512
"""Rows whose mask exists at a time."""


def runs_sdpa(config: Any) -> bool:
    """Whether a decoder was loaded with ``sdpa``."""
    return bool(config._attn_implementation.removeprefix(PREFIX) == "sdpa")


def check_sdpa(config: Any) -> None:
    """Raise a worded ``ValueError`` unless the decoder was loaded with ``sdpa``, which the split runs on."""
    if not runs_sdpa(config):
        raise ValueError(
            f"context compression runs on attention: sdpa, but the backbone was loaded with "
            f"{config._attn_implementation!r}; set model.backbone.attention: sdpa"
        )


def split_attention(
    split: ContextSplit,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attention of one layer under a split, [B, q, H, d]: [B, H, q, d] queries on [B, h, N, d] keys and values.

    The q rows are the last of N. Where they are not all rows of the prompt, ``split.ahead`` has the layer.
    """
    late_values = split.ahead.get(layer)
    if late_values is None:
        late_values = split.decide(layer, query, key, value, scale)
    seen_BN, length, start = split.seen[layer], key.shape[2], key.shape[2] - query.shape[2]
    window = split.window(layer)

    def attend(first: int, stop: int, values: Tensor, keys_BN: Tensor | None) -> Tensor:
        rows, seen = query[:, :, first - start : stop - start], Seen(keys_BN, window).until(stop)
        return causal_attention(rows, key[:, :, :stop], values[:, :, :stop], seen, scale, ROW_BLOCK, dropout)

    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    if start < (whole_end := min(split.whole_end, length)):
        whole = attend(start, whole_end, value, None if split.unpadded else split.visible_BN)
        out = torch.cat([whole, out[:, :, whole_end - start :]], dim=2)
    if (late_start := max(split.late_start, start)) < length:
        late = attend(late_start, length, late_values, None if split.sees_all else seen_BN)
        late = torch.cat([out[:, :, : late_start - start], late], dim=2)
        out = torch.where(split.late_BN[:, None, start:length, None], late, out)
    return out.transpose(1, 2).contiguous()


Observer = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Called with (layer, query [B, H, N, d], key [B, h, N, d], value [B, h, N, d], scale) after a layer's attention."""


def use_packed_attention(config: Any) -> None:
    """Let a decoder's layers read packed storage; what they were loaded with still runs their prompts.

    Raises:
        ValueError: eager attention, which builds the N x N matrix, or another one that transformers does not register.
    """
    name = str(config._attn_implementation)
    if name.startswith(PREFIX):
        return
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"attention {name!r} cannot read a packed cache; load the backbone with sdpa (a recipe's attention, or "
            "attn_implementation of transformers)"
        )
    AttentionInterface.register(PREFIX + name, _wrapping(name))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = PREFIX + name


@contextmanager
def reading_packed(config: Any) -> Iterator[None]:
    """``use_packed_attention`` for a block; the decoder's attention is then what it was."""
    with undoing(partial(setattr, config, "_attn_implementation", config._attn_implementation)):
        use_packed_attention(config)
        yield


def _wrapping(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Transformers' attention interface around another implementation."""
    wrapped: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS[name]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor | PackedLayer,
        value: Tensor | PackedLayer,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        context_split: ContextSplit | None = None,
        observer: Observer | None = None,
        seen: Seen | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(key, PackedLayer):
            return key.attend(query, scale).transpose(1, 2), None
        assert not isinstance(value, PackedLayer)
        layer, dropout = int(module.layer_idx), float(options.get("dropout", 0.0))  # type: ignore[arg-type]
        if context_split is not None:
            split = split_attention(context_split.on(query.device), layer, query, key, value, scale, dropout)
            result: tuple[Tensor, Tensor | None] = (split, None)
        elif seen is not None or (name == "sdpa" and attention_mask is None and not fused_kernels(query, key, value)):
            # without a mask transformers leaves key heads shared, which in fp32 no fused kernel takes
            rows = causal_attention(query, key, value, seen or Seen(), scale, ROW_BLOCK, dropout)
            result = rows.transpose(1, 2).contiguous(), None
        else:
            result = wrapped(module, query, key, value, attention_mask, scaling=scaling, **options)
        if observer is not None:
            observer(layer, query, key, value, scale)
        return result

    return attention
