"""The sides of a comparison: one way each to keep a prompt's cache and to go on from it.

Sides share one backbone with its LoRA. Only in its own turn is a side attached to it, and only then has it a cache.

Legend: B batch, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from subtoken_train.benchmarking.synthetic_prompts import plain_inputs
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.decoder import CACHE, PREFIX
from subtoken_train.families.family import Family
from subtoken_train.forks import changed
from subtoken_train.inference.cache_report import held_bytes
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.row_table import unserved
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch

PARTS = ("payload", "index", "tail", "slack", "statistics", "kernel")


def held_parts(**parts: int) -> dict[str, int]:
    """Return bytes of a cache by part, as ``CacheReport`` names them, and their ``total``."""
    whole = dict.fromkeys(PARTS, 0) | parts
    return {**whole, "total": sum(whole.values())}


@dataclass(eq=False)
class Side(ABC):
    """One way to run the prompts that all sides run, on the backbone that they share."""

    name: str
    words: str
    family: Family
    prompts: Batch

    @abstractmethod
    def turn(self) -> Any:
        """Return a context in which the side runs; its cache ends with it."""

    @abstractmethod
    def prefill(self) -> Tensor:
        """Run the prompts into a new cache; logits of the next token, [B, V]."""

    @abstractmethod
    def step(self, token_ids_B1: Tensor) -> Tensor:
        """Append a token to every sample; logits of the next one, [B, V]."""

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Return the bytes that the cache holds now, see ``held_parts``."""

    @abstractmethod
    def entries(self) -> int:
        """Count the entries of a sample's prompt in the last layer."""

    def kernel(self) -> str:
        """Return the attention path of a step, and the reason for it."""
        return "transformers' own"

    def close(self) -> None:
        """Let go what is kept from turn to turn."""
        return


@dataclass(eq=False)
class PackedSide(Side):
    """Our packed cache, under a token reducer, routers (None: whole values) and a compression."""

    reducer: Reducer
    bank: RouterBank | None
    compression: Compression
    new_tokens: int = 0  # that are expected: of more than a few, steps are captured on CUDA
    cache: Any = None
    _backbone: Any = None
    _opened: Any = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._backbone = CompressedBackbone(self.family, self.reducer, self.bank).eval()
        try:
            yield
        finally:
            if self.cache is not None:
                self.cache.free_shape()
            self._backbone = self._opened = self.cache = None

    def prefill(self) -> Tensor:
        self.cache = PackedCache(self.family.shape.num_layers)
        self._opened = prefill(self._backbone, self.prompts, self.cache, self.compression)
        self.cache.expected = self.new_tokens
        logits_BV: Tensor = self._opened.logits_BV
        return logits_BV

    def step(self, token_ids_B1: Tensor) -> Tensor:
        return decode(self._backbone, token_ids_B1, self.cache)

    def held(self) -> dict[str, int]:
        found = held_bytes(self.cache)
        return held_parts(**{part: found[f"{part}_bytes"] for part in PARTS})

    def entries(self) -> int:
        return int((self._opened.plan.layers[-1].entries_BN >= 0).sum(-1).max())

    def kernel(self) -> str:
        found = set[str]()
        for layer in (each for each in self.cache.layers if isinstance(each, PackedLayer)):
            choice = choose_kernel(layer.keys.device.type)
            reason = unserved(layer.blocks, layer.keys) if choice.path == "triton" else None
            found.add(str(choice) if reason is None else f"cpu (the fused kernels do not serve {reason})")
        return "; ".join(sorted(found))


@dataclass(eq=False)
class DenseSide(Side):
    """Transformers' own forward pass on a cache of its own that keeps everything; ``compiles``: its steps do."""

    make_cache: Callable[[], Cache]
    compiles: bool = False
    cache: Any = None

    def __post_init__(self) -> None:
        self._inputs, self._forward = plain_inputs(self.family, self.prompts), self.family.model
        if self.compiles:
            self._forward = torch.compile(self._forward, mode="reduce-overhead")

    @contextmanager
    def turn(self) -> Iterator[None]:
        config = self.family.decoder.config
        try:
            with changed(config, _attn_implementation=config._attn_implementation.removeprefix(PREFIX)):
                yield
        finally:
            if not self.compiles:
                self.cache = None

    @torch.no_grad()
    def prefill(self) -> Tensor:
        if self.cache is None:
            self.cache = self.make_cache()
        else:
            self.cache.reset()
        how: dict[str, Any] = {CACHE: self.cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = self.family.model(**self._inputs, **how).logits
        return logits[:, -1]

    @torch.no_grad()
    def step(self, token_ids_B1: Tensor) -> Tensor:
        if self.compiles:
            torch.compiler.cudagraph_mark_step_begin()
        logits: Tensor = self._forward(input_ids=token_ids_B1, **{CACHE: self.cache}, use_cache=True).logits
        return logits[:, -1]

    def held(self) -> dict[str, int]:
        return held_parts(payload=sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers))

    def entries(self) -> int:
        return int(self.prompts.input_ids_BN.shape[1])

    def close(self) -> None:
        self.cache = None
        if self.compiles:
            torch.compiler.reset()


def dense_sides(family: Family, prompts: Batch, new_tokens: int) -> list[DenseSide]:
    """Build transformers' ``DynamicCache``, and ``StaticCache``: compiled on a GPU, as it is elsewhere."""
    config, length = family.decoder.config, prompts.input_ids_BN.shape[1] + new_tokens
    on_gpu = prompts.input_ids_BN.device.type == "cuda"
    dynamic, static = partial(DynamicCache, config=config), partial(StaticCache, config=config, max_cache_len=length)
    static_words = "transformers' StaticCache, every token" + (", steps by torch.compile" if on_gpu else ", uncompiled")
    return [
        DenseSide("dynamic", "transformers' DynamicCache, every token", family, prompts, dynamic),
        DenseSide("static", static_words, family, prompts, static, compiles=on_gpu),
    ]
