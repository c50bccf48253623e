"""The context split: what the ``context`` stage of a reducer, and routing in a language model, change in a layer.

Context rows attend to all context before them, with whole values. Query rows (and the answer after them) see the kept
context tokens only, with routed values, and each other. Which tokens stay is decided per layer. The split is a keyword
argument that the decoder loop passes through; ``engine/attention.py`` runs it.

Legend: B batch, N rows, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subtoken_train.functional.rotary import Rotation
from subtoken_train.functional.window import SlidingWindow, in_window
from subtoken_train.reducers.context import ContextReducer, ContextView
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.state import RoutingState
from subtoken_train.types import Region


@dataclass
class ContextSplit:
    """One pass over a batch of contexts and queries, right- or left-padded.

    Attributes:
        reducer: chooses context tokens in every layer; None keeps all.
        regions_BN: ``Region`` codes; the rows of CONTEXT, the compressed region, and of SYSTEM before it attend to all
            context with whole values.
        asks_BN: the query rows that choose, bool.
        bank: the routers; None for a token-only arm.
        routing: what the routers read and did.
        collects: remember the routed values of every layer in ``routed``, for a cache.
        windows: of every layer, as ``DecoderStack.windows``; empty: none has one.
        position_BN: of the rows, where a layer has a window or a reducer chooses.
        rotate: turns queries and keys at position ids, where a reducer chooses.
        seen: per layer the rows that query rows and all later ones see, bool [B, N].
        routed: per layer the routed values, [B, h, N, d], where ``collects``.
        ahead: what ``decide`` gave of a layer whose rows do not run at once.
    """

    reducer: ContextReducer | None
    regions_BN: Tensor
    asks_BN: Tensor
    bank: RouterBank | None = None
    routing: RoutingState | None = None
    collects: bool = False
    windows: Sequence[int | None] = ()
    position_BN: Tensor | None = None
    rotate: Callable[[Tensor], Rotation] | None = None
    seen: dict[int, Tensor] = field(default_factory=dict)
    routed: dict[int, Tensor] = field(default_factory=dict)
    ahead: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """What every layer needs and none changes, read from the device once."""
        regions_BN = self.regions_BN
        places_N = torch.arange(regions_BN.shape[1], device=regions_BN.device)
        self.visible_BN, self.context_BN = regions_BN != Region.PADDING, regions_BN == Region.CONTEXT
        reads_whole_BN = self.context_BN | (regions_BN == Region.SYSTEM)
        self.late_BN = self.visible_BN & ~reads_whole_BN
        self.unpadded = bool(self.visible_BN.all())
        self.whole_end = int((reads_whole_BN.any(0) * (places_N + 1)).max())
        self.late_start = int(torch.where(self.late_BN.any(0), places_N, len(places_N)).min())
        self.asks_counts: list[int] = self.asks_BN.sum(-1).tolist()
        self.contexts: dict[int | None, tuple[Tensor, list[int]]] = {}
        for size in {None, *self.windows}:
            held_BN = self.context_BN if size is None else self.context_BN & self._in_reach(size)
            self.contexts[size] = held_BN, held_BN.sum(-1).tolist()
        self._elsewhere: dict[torch.device, ContextSplit] = {}

    @property
    def sees_all(self) -> bool:
        """Whether late rows see all before them, but for what left a window."""
        return self.unpadded and self.reducer is None

    def _in_reach(self, size: int) -> Tensor:
        """Rows that the first late row of their sample, or what follows it, still sees in a window, bool [B, N]."""
        assert self.position_BN is not None
        next_B1 = self.position_BN.masked_fill(~self.visible_BN, -1).amax(-1, keepdim=True) + 1
        first_B1 = torch.where(self.late_BN, self.position_BN, next_B1).amin(-1, keepdim=True)
        return in_window(first_B1, self.position_BN, size)[:, 0]

    def window(self, layer: int) -> SlidingWindow | None:
        """A layer's window; None: its rows see all before them."""
        size = self.windows[layer] if self.windows else None
        return None if size is None or self.position_BN is None else SlidingWindow(size, self.position_BN)

    def on(self, device: torch.device) -> ContextSplit:
        """The same for a layer on a device; what layers note stands in one place."""
        if device == self.regions_BN.device:
            return self
        if device not in self._elsewhere:
            moved = self._elsewhere[device] = copy(self)
            for name, part in vars(self).items():
                if isinstance(part, Tensor):
                    setattr(moved, name, part.to(device))
        return self._elsewhere[device]

    def keep(self, layer: int, query_BHNd: Tensor, key_BhNd: Tensor, value_BhNd: Tensor, scale: float) -> Tensor:
        """Context tokens that stay in ``layer``, bool [B, N]: of those that a window has not left behind."""
        kept_BN, counts = self.contexts[self.windows[layer] if self.windows else None]
        kept_BN = kept_BN.to(query_BHNd.device)
        if self.reducer is not None:
            assert self.position_BN is not None
            assert self.rotate is not None
            view = ContextView(
                layer=layer,
                query_BHNd=query_BHNd.detach(),
                key_BhNd=key_BhNd.detach(),
                value_BhNd=value_BhNd.detach(),
                scale=scale,
                regions_BN=self.regions_BN,
                position_BN=self.position_BN,
                rotate=self.rotate,
                context_BN=kept_BN,
                asks_BN=self.asks_BN,
                context_counts=counts,
                asks_counts=self.asks_counts,
            )
            kept_BN = self.reducer.keep_context(view)
        # later rows see the rest of the prompt too
        self.seen[layer] = kept_BN | (self.visible_BN & ~self.context_BN)
        return kept_BN

    def decide(self, layer: int, query_BHNd: Tensor, key_BhNd: Tensor, value_BhNd: Tensor, scale: float) -> Tensor:
        """Choose a layer's context tokens and value groups from all of its rows; see ``keep`` and ``route``."""
        return self.route(layer, self.keep(layer, query_BHNd, key_BhNd, value_BhNd, scale), value_BhNd)

    def route(self, layer: int, kept_BN: Tensor, value_BhNd: Tensor) -> Tensor:
        """What query rows read of the layer's values, [B, h, N, d]; the budget counts the kept tokens."""
        if self.bank is None or self.routing is None:
            return value_BhNd
        routed_BND = self.bank.route_deferred(layer, self.routing, kept_BN)
        batch, heads, length, width = value_BhNd.shape
        routed_BhNd = routed_BND.reshape(batch, length, heads, width).transpose(1, 2)
        if self.collects:
            self.routed[layer] = routed_BhNd
        return routed_BhNd
