"""Our half of ``peers.py``: the methods in the settings in which they are kvpress's presses, on a packed cache."""

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.peer_side import KEPT, serve
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Batch, Region

COMPRESSIONS = {
    "none": Compression(), "snapkv": Compression(build_eviction("snapkv"), KEPT),
    "kvcompose": Compression(build_eviction("kvcompose", kvpress=True, lower_bound=0), KEPT),
    "kvcompose_heads": Compression(build_eviction("kvcompose", structured=False, lower_bound=0), KEPT),
    "kvzip": Compression(build_eviction("kvzip", lower_bound=0), KEPT), "think": Compression(key_channels=KEPT),
}  # fmt: skip


class Ours:
    """A packed cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model.config._name_or_path)
        self.backbone = CompressedBackbone(TextFamily(model, tokenizer), build_reducer("none")).eval()

    def fill(self, method: str, ids_1N: Tensor) -> PackedCache:
        """See ``Side``. All of it is context; what follows comes later."""
        regions, none = torch.full_like(ids_1N, int(Region.CONTEXT)), torch.zeros(1, dtype=torch.long)
        labels, rank = torch.full_like(ids_1N, -100), none + ids_1N.shape[1] - 1
        batch = Batch(ids_1N, labels, regions, rank, None, none, ["context"], followed=True)
        cache = PackedCache(self.backbone.family.shape.num_layers)
        prefill(self.backbone, batch, cache, COMPRESSIONS[method])
        return cache

    def step(self, cache: PackedCache, ids_11: Tensor, place: int) -> Tensor:
        """See ``Side``."""
        assert int(cache.next_position) == place
        return decode(self.backbone, ids_11, cache)

    def crop(self, cache: PackedCache, count: int) -> None:
        """See ``Side``."""
        cache.crop(-count)

    def held(self, cache: PackedCache) -> int:
        """Keys, values, what finds them, and the tail."""
        return sum(layer.payload_bytes + layer.index_bytes + sum(layer.tail_bytes) for layer in cache.layers)


if __name__ == "__main__":
    serve(Ours, {each: version(each) for each in ("transformers", "torch")})
