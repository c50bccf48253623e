"""The half of ``peers.py`` that runs kvpress's presses, in an environment of its own.

It imports kvpress 0.5.4 and transformers 5.2, and nothing of this package. As in kvpress's own pipeline a press acts
while the context runs, and tokens follow at the positions after the whole context.
"""

from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.peer_side import KEPT, serve

PRESSES: dict[str, Any] = {
    "none": None,
    "snapkv": lambda: kvpress.SnapKVPress(compression_ratio=1 - KEPT),
    "kvcompose": lambda: kvpress.KVComposePress(compression_ratio=1 - KEPT),
    "kvcompose_heads": lambda: kvpress.KVComposePress(compression_ratio=1 - KEPT, structured=False),
    "kvzip": lambda: kvpress.KVzipPress(compression_ratio=1 - KEPT),
    "think": lambda: kvpress.ThinKPress(key_channel_compression_ratio=1 - KEPT),
}
REPEATS = "kvcompose_heads"
"""As released it leaves the context twice in the cache, and masks entries of the first copy alone; the second copy is
cut off here, as the release's structured form does."""


class Kvpress:
    """A ``DynamicCache``, and what a press masks of it instead of shortening it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.attention = [layer.self_attn for layer in model.model.layers]

    def fill(self, method: str, ids_1N: Tensor) -> tuple[DynamicCache, list[Any]]:
        """See ``Side``."""
        self._mask([None] * len(self.attention))
        press, cache = PRESSES[method], DynamicCache()
        with nullcontext() if press is None else press()(self.model):
            self.model.model(input_ids=ids_1N, past_key_values=cache)
        if method == REPEATS:
            for layer in cache.layers:
                layer.keys, layer.values = (
                    each[:, :, : ids_1N.shape[1]].clone() for each in (layer.keys, layer.values)
                )
        return cache, [getattr(part, "masked_key_indices", None) for part in self.attention]

    def step(self, cache: tuple[DynamicCache, list[Any]], ids_11: Tensor, place: int) -> Tensor:
        """See ``Side``."""
        states, masked = cache
        self._mask(masked)
        position = torch.tensor([[place]])
        logits: Tensor = self.model(input_ids=ids_11, position_ids=position, past_key_values=states).logits
        return logits[:, -1]

    def crop(self, cache: tuple[DynamicCache, list[Any]], count: int) -> None:
        """See ``Side``."""
        cache[0].crop(-count)

    def held(self, cache: tuple[DynamicCache, list[Any]]) -> int:
        """The cache's tensors, and the places that a head-wise press masks."""
        states, masked = cache
        tensors = [tensor for layer in states.layers for tensor in (layer.keys, layer.values)]
        tensors += [index for each in masked if each is not None for index in each]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def _mask(self, masked: list[Any]) -> None:
        for part, each in zip(self.attention, masked, strict=True):
            part.masked_key_indices = each


if __name__ == "__main__":
    serve(Kvpress, {each: version(each) for each in ("kvpress", "transformers", "torch")})
