"""A transformers ``Cache`` whose prompt is packed; lengths are those of the unreduced prompt.

Legend: B batch, H query heads, h key-value heads, d head width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.errors import refuse
from subtoken_train.forks import undoing
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.native import native_attention, serves
from subtoken_train.kernels.row_table import Workspace

RESERVED = 1024  # tokens that are given room at once at most; an answer that goes on grows by slacks


class Evictor(Protocol):
    """Evicts every ``every`` tokens while decoding; ``evictions`` counts how often it did."""

    every: int
    evictions: int

    def before_append(self, cache: "PackedCache") -> None:
        """Prepare the cache for tokens that are about to be appended."""


class PackedCache(Cache):  # type: ignore[misc]
    """A KV cache of packed layers, and where the next token stands.

    Attributes:
        next_position: position id of the next token, [B, 1] or (mRoPE) [3, B, 1]; None before a prompt.
        origin_B: prompt of each sample's packed entries; reordering beams of one moves the tails only.
        shape: ``OneShape`` that holds it, while its steps have one; None: they do not.
        expected: tokens that an answer may still have, as far as it is known.
        way: how its last answer was decoded, in words; empty where there is one way.
        appends: whether layers may append now: only while this package's own steps run.
    """

    layers: list[PackedLayer]

    def __init__(self, num_layers: int) -> None:
        self.workspace = Workspace()
        super().__init__(layers=[PackedLayer(self.workspace) for _ in range(num_layers)])
        self.next_position: Tensor | None = None
        self.origin_B: Tensor | None = None
        self.evictor: Evictor | None = None
        self.shape: Any = None
        self.expected, self.way = 0, ""
        self.appends = False

    @property
    def holds_prompt(self) -> bool:
        """Return whether the cache holds a prompt."""
        return self.next_position is not None

    @property
    def prompt_length(self) -> int:
        """Tokens of the unreduced prompt, padding included."""
        return self.layers[0].prompt_length

    def check_holds_prompt(self) -> None:
        """Refuse to go on without a prompt."""
        refuse((not self.holds_prompt, "the cache is empty; generate from the whole prompt, without past_key_values"))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append states to a layer."""
        if not self.appends:
            own = "a packed cache is read and continued by the SubTokenModel that made it, not by transformers' own"
            instead = "call its generate(past_key_values=last.cache), or leave the cache out"
            raise ValueError(f"{own} generate or forward: {instead}")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def input_observer(self) -> Callable[[int, Tensor], None] | None:
        """Observer of what layers project of new tokens, for an eviction that reads it; None where none does."""
        states = [layer.eviction_state for layer in self.layers]
        if not all(state is not None and state.reads_inputs for state in states):
            return None
        return lambda layer, input_BqD: states[layer].inputs.append(input_BqD)  # type: ignore[union-attr]

    def advance(self, tokens: int) -> None:
        """Move ``next_position`` past appended tokens; in a step of one shape, in place."""
        assert self.next_position is not None
        if self.shape is None:
            self.next_position = self.next_position + tokens
        else:
            self.next_position.add_(tokens)

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Allow appending to the layers inside the block, from ``next_position`` on."""
        with undoing(partial(self.let_append, False)):
            self.let_append(True)
            yield

    def let_append(self, may: bool) -> None:
        """Let layers append, or no longer; meanwhile those with a window hold where their tails begin."""
        self.appends = may
        first_B = None
        for layer in self.layers:
            if may and layer.window is not None and first_B is None:
                assert self.next_position is not None
                first_B = self.next_position[:, 0] - layer.tail_length if self.shape is None else self.shape.first_B
            layer.first_B = None if first_B is None or layer.window is None else first_B.to(layer.device)

    def branch(self) -> Self:
        """Return an independent cache that shares these prompts without a copy; only while nothing was appended."""
        self.check_holds_prompt()
        self.free_shape()
        own = PackedCache(len(self.layers))
        own.workspace, own.layers = self.workspace, [layer.branch() for layer in self.layers]
        own.next_position, own.origin_B, own.evictor = self.next_position, self.origin_B, copy(self.evictor)
        return own

    def reserve(self, tokens: int) -> None:
        """Allocate room for tokens to come, ``RESERVED`` at most, so that no step has to."""
        self.expected, self.way = tokens, ""
        every = RESERVED if self.evictor is None else self.evictor.every
        for layer in self.layers:
            layer.reserve(min(tokens, every, RESERVED))

    def free_shape(self) -> None:
        """Return to steps whose shapes grow, after ``reserve`` fixed them; nothing where they were not fixed."""
        if self.shape is not None:
            self.shape.release(self)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """End the answer when the block ends: no more tokens are expected then."""
        try:
            yield
        finally:
            self.free_shape()
            self.expected = 0

    def choose_pages(self, chooses: bool) -> None:
        """Let the next token read only the pages that it chooses, if there are any, else everything."""
        for layer in self.layers:
            layer.chooses_pages = chooses

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the samples that an index of the batch axis names (numbers or marks); an empty cache stays empty."""
        if self.origin_B is None:
            return
        batch = len(self.origin_B)
        try:
            chosen = torch.arange(batch)[torch.as_tensor(indices).cpu()]
        except IndexError as error:
            raise ValueError(f"the cache holds {batch} samples, 0 to {batch - 1}: {error}") from error
        form = "choose samples of the cache by a list of one or more numbers, not"
        refuse((chosen.dim() != 1 or not len(chosen), f"{form} {list(chosen.shape)}"))
        self._select(chosen)

    reorder_cache = batch_select_indices  # prompts are copied only where a sample changes to another prompt

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sample ``repeats`` times in a row; an empty cache stays empty."""
        refuse((repeats < 1, f"every sample is repeated once or more, not {repeats} times"))
        if self.origin_B is not None:
            self._select(torch.arange(len(self.origin_B)).repeat_interleave(repeats))

    def prepare(self) -> None:
        """Build what the fused kernels need of a prompt's entries, once all layers are filled."""
        for layer in self.layers:
            layer.prepare()

    @property
    def kernel_bytes(self) -> int:
        """Bytes of the fused kernels' tables and scratch; 0 where others run."""
        tables = (layer.fused.table for layer in self.layers)
        return self.layers[0].fused.workspace.nbytes + sum(table.nbytes for table in tables if table is not None)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens from the end of the tail."""
        self.free_shape()
        super().crop(tokens_to_remove)
        if self.next_position is not None:
            self.next_position = self.next_position + tokens_to_remove

    def reset(self) -> None:
        """Empty the cache; the next prompt fills it."""
        self.free_shape()
        super().reset()
        self.next_position = self.origin_B = self.evictor = None

    def _select(self, samples: Tensor) -> None:
        assert self.origin_B is not None
        assert self.next_position is not None
        samples = samples.to(self.origin_B.device)
        origin = self.origin_B[samples]
        moves = origin.shape != self.origin_B.shape or not torch.equal(origin, self.origin_B)
        moves = moves or self.evictor is not None  # which packs the tails, so that copies of a prompt differ
        if moves:
            self.free_shape()
        for layer in self.layers:
            layer.select(samples, with_prompt=moves)
        self.origin_B, chosen = origin, self.next_position.index_select(-2, samples)
        self.next_position = chosen if self.shape is None else self.next_position.copy_(chosen)


class JoinedLayer:
    """One layer of several caches, given to the attention function in the place of a ``PackedLayer``."""

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        self.layers = layers

    def attend(self, query_BH1d: Tensor, scale: float) -> Tensor:
        """Attend from one new token of each row to what its own cache stores, [B, H, 1, d]; in one call if C serves."""
        device, rows, plain = query_BH1d.device.type, torch.split(query_BH1d, 1), dict[int, Any]()
        if choose_kernel(device).path == "cpu" and not torch.is_autocast_enabled(device):
            held = ((place, layer.plain) for place, layer in enumerate(self.layers))
            plain = {place: own for place, own in held if own is not None and serves(rows[place], *own)}
        if not plain:
            return torch.cat([layer.attend(row, scale) for layer, row in zip(self.layers, rows, strict=True)])
        out = native_attention(query_BH1d, plain, scale)
        for place, layer in enumerate(self.layers):
            if place not in plain:
                out[place] = layer.attend(rows[place], scale)[0]
        return out


class JoinedCache(Cache):  # type: ignore[misc]
    """Several caches of one row each, read by one step as one; nothing is copied, so rows can join and leave."""

    def __init__(self, caches: Sequence[PackedCache]) -> None:
        super().__init__(layers=[])
        self._joined = [JoinedLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append [B, h, 1, d] states; return the layer twice, in place of keys and values."""
        rows = zip(torch.split(key_states, 1), torch.split(value_states, 1), strict=True)
        for layer, (key, value) in zip(self._joined[layer_idx].layers, rows, strict=True):
            layer.update(key, value)
        return self._joined[layer_idx], self._joined[layer_idx]
