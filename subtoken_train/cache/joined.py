"""Caches of one row each, read as one cache by a step for all of them: each keeps its entries, tail and settings.

Nothing is copied or padded, so a row may join or leave between steps. Legend: B rows, H query heads, h key-value heads,
d head width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer


class JoinedLayer:
    """One layer of several caches; it is handed to the attention function, as a ``PackedLayer`` is."""

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        self.layers = layers

    def attend(self, query_BH1d: Tensor, scale: float) -> Tensor:
        """Attend from one new token of each row to what its own cache stores, [B, H, 1, d]."""
        pairs = zip(self.layers, torch.split(query_BH1d, 1), strict=True)
        return torch.cat([layer.attend(query, scale) for layer, query in pairs])


class JoinedCache(Cache):  # type: ignore[misc]
    """Appends a new token's states to each of several caches, all of which may append now."""

    def __init__(self, caches: Sequence[PackedCache]) -> None:
        super().__init__(layers=[])
        self._caches = caches
        self._joined = [JoinedLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append [B, h, 1, d] states; return the layer twice, in place of keys and values."""
        for cache, key, value in zip(
            self._caches, torch.split(key_states, 1), torch.split(value_states, 1), strict=True
        ):
            cache.update(key, value, layer_idx)
        return self._joined[layer_idx], self._joined[layer_idx]
