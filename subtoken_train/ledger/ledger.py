"""The byte ledger: the one place where KV budgets, anchors and reports are computed. Pure Python, exact rationals.

Words: r ``keep_ratio``, S ``num_groups``, K ``kept_groups``, rho_KV ``kv_fraction`` = (1 + K/S)/2,
rho_total ``total_kv_fraction`` = r * rho_KV (paper, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

ROUTED_REGIONS = ("visual", "context")


def exact(number: float | Fraction) -> Fraction:
    """The decimal number that was written (0.15625, 0.1), not its binary neighbour."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def share_words(share: float, digits: int = 3) -> str:
    """``15.625%`` of a dense cache.

    A cache that leaves nothing out holds a little more, what finds its entries: ``100.000% + index``.
    """
    return f"{min(share, 1):.{digits}%}" + (" + index" if share > 1 else "")


def check_keep_ratio(keep_ratio: float | Fraction) -> None:
    """Raise ``ValueError`` unless 0 < keep_ratio <= 1."""
    if not 0 < keep_ratio <= 1:
        raise ValueError(f"keep_ratio={keep_ratio} must lie in (0, 1]; 0.25 keeps a quarter of the tokens")


def kept_count(tokens: int, keep_ratio: float | Fraction, round_up: bool = False) -> int:
    """Tokens kept of ``tokens``: rounded down for routed arms, up for anchors; at least one of a non-empty set."""
    check_keep_ratio(keep_ratio)
    rounded = math.ceil if round_up else math.floor
    return min(tokens, max(1, rounded(exact(keep_ratio) * tokens)))


@dataclass(frozen=True)
class KVBudget:
    """Nominal budget of routed tokens.

    Attributes:
        keep_ratio: r, tokens kept by the reducer / tokens before it, in (0, 1].
        num_groups: S, value groups per value vector.
        kept_groups: K, groups kept per routed token, 1 <= K <= S; K = S is a token-only arm.
    """

    keep_ratio: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        check_keep_ratio(self.keep_ratio)
        if not 1 <= self.kept_groups <= self.num_groups:
            raise ValueError(f"kept_groups={self.kept_groups} must lie between 1 and num_groups={self.num_groups}")

    @property
    def value_fraction(self) -> Fraction:
        """K/S, exactly."""
        return Fraction(self.kept_groups, self.num_groups)

    @property
    def kv_fraction(self) -> float:
        """rho_KV = (1 + K/S)/2: retained KV of a routed token (keys stay whole)."""
        return float((1 + self.value_fraction) / 2)

    @property
    def exact_total(self) -> Fraction:
        """rho_total as a rational; what anchors are solved for."""
        return exact(self.keep_ratio) * (1 + self.value_fraction) / 2

    @property
    def total_kv_fraction(self) -> float:
        """rho_total = r * (1 + K/S)/2: retained KV of all tokens that the reducer saw."""
        return float(self.exact_total)


@dataclass(frozen=True)
class KVShape:
    """Cache geometry of a language model; ``element_bytes`` is 2 for bf16 and fp16, 4 for fp32."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int = 2

    @property
    def value_dim(self) -> int:
        """d_v = num_kv_heads * head_dim, channels of a key or of a value per token and layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def side_bytes(self) -> int:
        """Bytes of one whole key, or of one whole value, in one layer."""
        return self.value_dim * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one uncompressed token in all layers."""
        return 2 * self.side_bytes * self.num_layers


@dataclass(frozen=True)
class Entry:
    """One row of the ledger: a region in a layer."""

    layer: int
    region: str
    tokens_before: int
    tokens: int
    key_bytes: int
    value_bytes: int
    index_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Keys and values, without the index."""
        return self.key_bytes + self.value_bytes


@dataclass(frozen=True)
class Ledger:
    """All rows of one cache, with the sums that reports print."""

    shape: KVShape
    entries: tuple[Entry, ...]

    def bytes_of(self, region: str | None = None, with_index: bool = True) -> int:
        """Stored bytes of a region (None: of all), index bytes included unless told."""
        chosen = [entry for entry in self.entries if region in (None, entry.region)]
        return sum(entry.payload_bytes + with_index * entry.index_bytes for entry in chosen)

    def dense_bytes(self, region: str | None = None) -> int:
        """What the same regions would take uncompressed."""
        chosen = [entry for entry in self.entries if region in (None, entry.region)]
        return sum(entry_bytes(self.shape) * entry.tokens_before for entry in chosen)

    def fraction(self, region: str | None = None, with_index: bool = False) -> float:
        """Retained KV of a region (None: of the whole cache); the paper's fraction leaves the index out."""
        dense = self.dense_bytes(region)
        return self.bytes_of(region, with_index) / dense if dense else 1.0


def entry_bytes(shape: KVShape, groups: KVBudget | None = None) -> int:
    """Bytes of one entry's key and value in one layer, without the index; a routed entry stores K/S of its value.

    Rounded down, though a group of a real model is a whole number of channels.
    """
    return shape.side_bytes + int(shape.side_bytes * (1 if groups is None else groups.value_fraction))


def index_bytes(num_groups: int, kept_groups: int) -> int:
    """Bytes that name the kept groups of one routed token in one layer: a bit per group; none where K = S."""
    return 0 if kept_groups == num_groups else math.ceil(num_groups / 8)


def nominal_ledger(
    shape: KVShape,
    region_tokens: Mapping[str, int],
    budget: KVBudget,
    cut_layer: int = 0,
    kept_tokens: int | None = None,
) -> Ledger:
    """The cache after prefill, as the budget promises it.

    Args:
        shape: cache geometry.
        region_tokens: tokens of each region before reduction, e.g. ``{"system": 5, "visual": 576, "query": 14}``.
        budget: keep ratio and groups of the routed regions (``visual`` and ``context``); others stay whole.
        cut_layer: first layer that sees the reduced set: 0 where the input itself is shortened, L_f for decoder-stage
            FastV, whose layers below hold every token with every group.
        kept_tokens: overrides the reducer's count (anchors round up).
    """
    rows = []
    for layer in range(shape.num_layers):
        for region, tokens in region_tokens.items():
            compressed = region in ROUTED_REGIONS and layer >= cut_layer
            count, each, extra = tokens, entry_bytes(shape), 0
            if compressed:
                count = kept_count(tokens, budget.keep_ratio) if kept_tokens is None else kept_tokens
                each = entry_bytes(shape, budget)
                extra = index_bytes(budget.num_groups, budget.kept_groups)
            count = count if tokens else 0
            keys = count * shape.side_bytes
            rows.append(Entry(layer, region, tokens, count, keys, count * each - keys, count * extra))
    return Ledger(shape, tuple(rows))


def promised_fraction(
    shape: KVShape, region: str, tokens: int, kept_tokens: int, groups: KVBudget, cut_layer: int = 0
) -> float:
    """Share of a compressed region's KV that a budget promises, without the index; 1 where it has no token.

    Args:
        shape: cache geometry.
        region: its name, ``visual`` where the model sees images, else ``context``.
        tokens: tokens before reduction.
        kept_tokens: tokens after it.
        groups: what a routed token stores; its keep ratio is not read.
        cut_layer: as in ``nominal_ledger``.
    """
    return nominal_ledger(shape, {region: tokens}, groups, cut_layer, kept_tokens).fraction(region)


@dataclass(frozen=True)
class Anchor:
    """A token-only arm with the bytes of a routed one: ``kept_tokens`` of ``tokens``, and the fraction that makes."""

    tokens: int
    kept_tokens: int
    fraction: float

    @property
    def keep_ratio(self) -> float:
        """kept_tokens / tokens."""
        return self.kept_tokens / self.tokens


def solve_anchor(
    shape: KVShape, tokens: int, target: float | Fraction, cut_layer: int = 0, region: str = "visual"
) -> Anchor:
    """The matched token-only anchor: the smallest token count whose bytes reach ``target`` of the region's KV.

    Args:
        shape: cache geometry.
        tokens: tokens of the region before reduction.
        target: retained fraction of the region's KV over all layers, e.g. ``KVBudget(...).exact_total``.
        cut_layer: as in ``nominal_ledger``; layers below it hold every token.
        region: the region's name, ``visual`` or ``context``.

    Raises:
        ValueError: infeasible, the layers below ``cut_layer`` alone cost more than the target.
    """
    target = exact(target)
    reduced_layers = shape.num_layers - cut_layer
    free = target * shape.num_layers - cut_layer
    if reduced_layers <= 0 or free <= 0:
        raise ValueError(
            f"no token-only anchor at {float(target):.2%}: the {cut_layer} of {shape.num_layers} layers below the cut "
            f"hold every token and cost {cut_layer / shape.num_layers:.2%} alone; use stage 'embeds' or a deeper model"
        )
    kept = min(tokens, max(1, math.ceil(free * tokens / reduced_layers)))
    ledger = nominal_ledger(shape, {region: tokens}, KVBudget(), cut_layer, kept_tokens=kept)
    return Anchor(tokens, kept, ledger.fraction(region))
