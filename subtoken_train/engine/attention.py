"""The attention of a compressed language model, registered with transformers, and the context split that it runs.

A prompt's pass runs the implementation that it wraps, or the context split, and then shows rotated queries, keys and
values to its observer; decoding reads packed storage.

The context split: context rows attend to all context before them, with whole values; later rows see the kept context
tokens only, with routed values, and each other. Which tokens stay is decided per layer.

Legend: B batch, N rows, M columns, q query rows, H query heads, h key-value heads, d head width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from subtoken_train.cache.cache import JoinedLayer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.errors import refuse
from subtoken_train.families.decoder import PREFIX
from subtoken_train.forks import undoing
from subtoken_train.functional.causal_attention import (
    Seen,
    SlidingWindow,
    causal_attention,
    fused_kernels,
    in_window,
    with_key_gradient,
)
from subtoken_train.functional.rotary import Rotation
from subtoken_train.reducers.base import ContextReducer
from subtoken_train.routing.bank import LateValues, RouterBank, RoutingState
from subtoken_train.types import Region, before_compressed_ends, in_compressed_region
from subtoken_train.view.view import View


@dataclass
class ContextSplit:
    """One pass over a batch of contexts and queries, right- or left-padded."""

    reducer: ContextReducer | None
    regions_BN: Tensor  # the rows of the compressed region, and all before it, attend to all context with whole values
    spared_BN: Tensor
    asks_BN: Tensor  # the query rows that choose, bool
    bank: RouterBank | None = None
    routing: RoutingState | None = None
    collects: bool = False  # remember the routed values of every layer, for a cache
    windows: Sequence[int | None] = ()  # every layer's; empty: none has one
    position_BN: Tensor | None = None  # the rows' positions, where a layer has a window or a reducer chooses
    rotate: Callable[[int, Tensor], Rotation] | None = None
    """A layer's rotation at position ids, where a reducer chooses."""
    seen: dict[int, Tensor] = field(default_factory=dict)
    """By layer the rows that query rows and all later ones see, before any key is dropped, bool [B, N]."""
    routed: dict[int, Tensor] = field(default_factory=dict)  # where ``collects`` routed values by layer, [B, h, N, d]
    ahead: dict[int, LateValues] = field(default_factory=dict)  # what ``decide`` gave a layer that runs in chunks
    delay: int = 0  # rows that still see an entry whose gate is closed
    again: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # ``View.again`` of each layer
    faults: list[Tensor] = field(default_factory=list)  # ``View.faults`` of the layers

    def __post_init__(self) -> None:
        """Read from the device, once, what every layer needs and none changes."""
        regions_BN = self.regions_BN
        places_N = torch.arange(regions_BN.shape[1], device=regions_BN.device)
        self.visible_BN = regions_BN != Region.PADDING
        self.context_BN = in_compressed_region(regions_BN) & ~self.spared_BN
        reads_whole_BN = before_compressed_ends(regions_BN) | (regions_BN == Region.SYSTEM)
        self.late_BN = self.visible_BN & ~reads_whole_BN
        self.unpadded = bool(self.visible_BN.all())
        self.whole_end = int((reads_whole_BN.any(0) * (places_N + 1)).max())
        self.late_start = int(torch.where(self.late_BN.any(0), places_N, len(places_N)).min())
        self.asks_counts: list[int] = self.asks_BN.sum(-1).tolist()
        self._rest_BN = self.visible_BN & ~self.context_BN  # later rows see it, too
        self.contexts: dict[int | None, tuple[Tensor, list[int], Tensor, Tensor]] = {}
        for size in {None, *self.windows}:
            held_BN = self.context_BN
            if size is not None:  # what the first late row of a sample still sees
                assert self.position_BN is not None
                next_B1 = self.position_BN.masked_fill(~self.visible_BN, -1).amax(-1, keepdim=True) + 1
                first_B1 = torch.where(self.late_BN, self.position_BN, next_B1).amin(-1, keepdim=True)
                held_BN = held_BN & in_window(first_B1, self.position_BN, size)[:, 0]
            before_BN = regions_BN.masked_fill(~held_BN & (regions_BN != Region.SYSTEM), Region.PADDING)
            self.contexts[size] = held_BN, held_BN.sum(-1).tolist(), held_BN | self._rest_BN, before_BN
        self._elsewhere: dict[torch.device, ContextSplit] = {}

    def window(self, layer: int) -> SlidingWindow | None:
        """Return a layer's window; None: its rows see all before them."""
        size = self.windows[layer] if self.windows else None
        return None if size is None or self.position_BN is None else SlidingWindow(size, self.position_BN)

    def on(self, device: torch.device) -> "ContextSplit":
        """Return the split with its tensors on a device; what layers note is shared."""
        if device == self.regions_BN.device:
            return self
        if device not in self._elsewhere:
            moved = self._elsewhere[device] = copy(self)
            vars(moved).update({name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)})
        return self._elsewhere[device]

    def keep(self, layer: int, query_BHNd: Tensor, key_BhNd: Tensor, value_BhNd: Tensor, scale: float) -> Tensor:
        """Mark the context tokens that stay in ``layer``, bool [B, N], of those that its window still sees."""
        held_BN, counts, *marks = self.contexts[self.windows[layer] if self.windows else None]
        kept_BN, self.seen[layer], before_BN = (each.to(query_BHNd.device) for each in (held_BN, *marks))
        if self.reducer is not None and any(counts):
            assert self.position_BN is not None
            assert self.rotate is not None
            query, key, value = (states.detach() for states in (query_BHNd, key_BhNd, value_BhNd))
            given = layer, query, key, value, self.regions_BN, scale, self.reducer.needs, kept_BN
            view = View(
                *given,
                position=self.position_BN,
                rotate=partial(self.rotate, layer),
                asks_BN=self.asks_BN,
                scope_counts=counts,
                asks_counts=self.asks_counts,
                before_BN=before_BN,
                faults=self.faults,
                reach=self.window(layer),
                again=self.again.get(layer),
            )
            kept_BN = self.reducer.keep_context(view)
            self.seen[layer] = kept_BN | self._rest_BN
        return kept_BN

    def decide(self, layer: int, query_BHNd: Tensor, key_BhNd: Tensor, value_BhNd: Tensor, scale: float) -> LateValues:
        """Choose what query rows read of a layer: context tokens, then their groups, in a budget that counts these."""
        kept_BN = self.keep(layer, query_BHNd, key_BhNd, value_BhNd, scale)
        if self.bank is None or self.routing is None:
            return LateValues(value_BhNd, kept_BN)
        late = self.bank.route_deferred(layer, self.routing, kept_BN)
        if self.collects:
            self.routed[layer] = late.value_BhNd
        return late


ROW_BLOCK = 512
"""Rows whose mask exists at a time."""


def runs_sdpa(config: Any) -> bool:
    """Return whether a decoder was loaded with ``sdpa``."""
    return bool(config._attn_implementation.removeprefix(PREFIX) == "sdpa")


def check_sdpa(config: Any) -> None:
    """Raise a worded ``ValueError`` unless the decoder was loaded with ``sdpa``, which the split runs on."""
    loaded = f"but the backbone was loaded with {config._attn_implementation!r}"
    instead = f"{loaded}; set model.backbone.attention: sdpa"
    refuse((not runs_sdpa(config), f"context compression runs on attention: sdpa, {instead}"))


def split_attention(
    split: ContextSplit, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float
) -> Tensor:
    """Attend in one layer under a split, [B, q, H, d]: [B, H, q, d] queries, [B, h, N, d] keys and values."""
    read = split.ahead.get(layer) or split.decide(layer, query, key, value, scale)
    if read.gate_BhN is not None:
        gated = Seen(None if split.unpadded else split.visible_BN, gate_BhK=read.gate_BhN, delay=split.delay)
        out = causal_attention(query, key, value, gated, scale, ROW_BLOCK, dropout)
        return out.transpose(1, 2).contiguous()
    length, start, window = key.shape[2], key.shape[2] - query.shape[2], split.window(layer)

    def attend(first: int, stop: int, values: Tensor, places_BN: Tensor | None, keys: Tensor | None = None) -> Tensor:
        rows, seen = query[:, :, first - start : stop - start], Seen(places_BN, window, keys).until(stop)
        return causal_attention(rows, key[:, :, :stop], values[:, :, :stop], seen, scale, ROW_BLOCK, dropout)

    whole_end, late_start = min(split.whole_end, length), max(split.late_start, start)
    whole = late = query.new_zeros(*query.shape[:2], 0, value.shape[-1])
    if start < whole_end:
        whole = attend(start, whole_end, value, None if split.unpadded else split.visible_BN)
    if late_start < length:
        places_BN = None if split.unpadded and split.reducer is None else split.seen[layer]
        late = attend(late_start, length, read.value_BhNd, places_BN, read.keys_BhN)
        logits, keep = read.key_logits_BhN, read.keys_BhN
        if keep is not None and logits is not None and torch.is_grad_enabled() and logits.requires_grad:
            back = torch.where(keep[..., None], read.value_BhNd, value)  # a dropped entry would come back whole
            states, seen = (query[:, :, late_start - start :], key, back), Seen(places_BN, window)
            late = with_key_gradient(late, logits, states, keep, read.learns_BN, seen, scale, ROW_BLOCK)
    if split.unpadded and whole.shape[2] + late.shape[2] == query.shape[2]:  # all samples are cut at one row
        return torch.cat([whole.transpose(1, 2), late.transpose(1, 2)], 1)
    out = torch.nn.functional.pad(whole, (0, 0, 0, query.shape[2] - whole.shape[2]))
    if late_start < length:
        late = torch.cat([out[:, :, : late_start - start], late], dim=2)
        out = torch.where(split.late_BN[:, None, start:length, None], late, out)
    return out.transpose(1, 2).contiguous()


Observer = Callable[[int, Tensor, Tensor, Tensor, float], None]
"""Called with (layer, query [B, H, N, d], key [B, h, N, d], value [B, h, N, d], scale) after a layer's attention."""


def use_packed_attention(config: Any) -> None:
    """Let a decoder's layers read packed storage; what they were loaded with still runs their prompts."""
    if (name := str(config._attn_implementation)).startswith(PREFIX):
        return
    unread = f"attention {name!r} cannot read a packed cache; load the backbone with sdpa"
    refuse((name not in ALL_ATTENTION_FUNCTIONS, unread))
    AttentionInterface.register(PREFIX + name, _wrapping(name))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = PREFIX + name


@contextmanager
def reading_packed(config: Any) -> Iterator[None]:
    """Call ``use_packed_attention`` for a block, and restore the decoder's attention after it."""
    with undoing(partial(setattr, config, "_attn_implementation", config._attn_implementation)):
        use_packed_attention(config)
        yield


def _wrapping(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    wrapped: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS[name]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor | PackedLayer | JoinedLayer,
        value: Tensor | PackedLayer | JoinedLayer,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        context_split: ContextSplit | None = None,
        observer: Observer | None = None,
        seen: Seen | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(key, PackedLayer | JoinedLayer):
            return key.attend(query, scale).transpose(1, 2), None
        assert not isinstance(value, PackedLayer | JoinedLayer)
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
