"""Transformers' own caches, which keep everything: the other sides of a comparison.

Their passes are the backbone's own ``forward`` under its own attention, with the LoRA that all sides share.

Legend: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from subtoken_train.benchmarking.sides import HeldBytes, Side
from subtoken_train.benchmarking.synthetic_prompts import plain_inputs
from subtoken_train.families.attention_kinds import PREFIX
from subtoken_train.families.cache_argument import CACHE
from subtoken_train.families.family import Family
from subtoken_train.types import Batch


class DenseSide(Side):
    """Transformers' own forward pass on a cache of its own that keeps everything.

    Args:
        name: in tables and records.
        words: what it is.
        family: the backbone.
        prompts: the batch.
        make_cache: an empty cache.
        compiles: run decoding steps through ``torch.compile``, with CUDA graphs; the cache is then kept from turn to
            turn, because graphs hold its addresses.
    """

    def __init__(
        self,
        name: str,
        words: str,
        family: Family,
        prompts: Batch,
        make_cache: Callable[[], Cache],
        compiles: bool = False,
    ) -> None:
        super().__init__(name, words, family, prompts)
        self.cache: Cache | None = None
        self._make_cache, self._inputs = make_cache, plain_inputs(family, prompts)
        self._keeps_cache = compiles
        self._forward: Callable[..., Any] = family.model
        if compiles:
            self._forward = torch.compile(family.model, mode="reduce-overhead")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Attention is transformers' own inside it."""
        config = self.family.decoder.config
        name = config._attn_implementation
        config._attn_implementation = name.removeprefix(PREFIX)
        try:
            yield
        finally:
            config._attn_implementation = name
            if not self._keeps_cache:
                self.cache = None

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """The prompts' pass; logits of the last row alone."""
        if self.cache is None:
            self.cache = self._make_cache()
        else:
            self.cache.reset()
        logits: Tensor = self.family.model(
            **self._inputs, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1]

    @torch.no_grad()
    def step(self, token_ids_B1: Tensor) -> Tensor:
        """A step of transformers' own forward pass."""
        if self._keeps_cache:
            torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = self._forward(input_ids=token_ids_B1, **{CACHE: self.cache}, use_cache=True).logits
        return logits[:, -1]

    def held(self) -> HeldBytes:
        """Keys and values as they are allocated; of a static cache with the room for what comes."""
        assert self.cache is not None
        return HeldBytes(sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers))

    def entries(self) -> int:
        """Every token of the prompt."""
        return int(self.prompts.input_ids_BN.shape[1])

    def close(self) -> None:
        """The cache that graphs read, and the graphs."""
        self.cache = None
        if self._keeps_cache:
            torch.compiler.reset()


def dense_sides(family: Family, prompts: Batch, new_tokens: int) -> list[DenseSide]:
    """Transformers' ``DynamicCache``, and ``StaticCache``: compiled on a GPU, as it is elsewhere."""
    config, length = family.decoder.config, prompts.input_ids_BN.shape[1] + new_tokens
    on_gpu = prompts.input_ids_BN.device.type == "cuda"
    static_words = "transformers' StaticCache, every token" + (", steps by torch.compile" if on_gpu else ", uncompiled")
    return [
        DenseSide(
            "dynamic",
            "transformers' DynamicCache, every token",
            family,
            prompts,
            lambda: DynamicCache(config=config),
        ),
        DenseSide(
            "static",
            static_words,
            family,
            prompts,
            lambda: StaticCache(config=config, max_cache_len=length),
            compiles=on_gpu,
        ),
    ]
