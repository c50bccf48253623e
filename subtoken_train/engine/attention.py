"""The attention implementation of a compressed language model, registered with transformers.

One function per implementation that it wraps (``subtoken_sdpa``, ``subtoken_flash_attention_2``, ...), set for the
language model only. A prompt's pass runs the wrapped implementation unchanged, or the context split where one is given,
and then shows rotated queries, keys and values to whoever observes; decoding reads packed storage.

Legend: B batch, N rows, M columns, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from subtoken_train.cache.cache import PackedLayer
from subtoken_train.engine.context import PREFIX, ContextSplit, split_attention

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
        raise ValueError(f"attention {name!r} cannot read a packed cache; load the backbone with attention: sdpa")
    AttentionInterface.register(PREFIX + name, _wrapping(ALL_ATTENTION_FUNCTIONS[name]))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = PREFIX + name


def _wrapping(wrapped: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Transformers' attention interface around another implementation."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor | PackedLayer,
        value: Tensor | PackedLayer,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        context_split: ContextSplit | None = None,
        observer: Observer | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(key, PackedLayer):
            return key.attend(query, scale).transpose(1, 2), None
        assert not isinstance(value, PackedLayer)
        layer: int = module.layer_idx  # type: ignore[assignment]
        if context_split is not None:
            dropout = float(options.get("dropout", 0.0))
            result: tuple[Tensor, Tensor | None] = (
                split_attention(context_split, layer, query, key, value, scale, dropout),
                None,
            )
        else:
            result = wrapped(module, query, key, value, attention_mask, scaling=scaling, **options)
        if observer is not None:
            observer(layer, query, key, value, scale)
        return result

    return attention
