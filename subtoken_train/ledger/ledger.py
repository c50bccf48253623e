"""The byte ledger: the one place where caches and anchors are counted. Pure Python, exact rationals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from subtoken_train.ledger import kv_budget as kv

ROUTED_REGIONS = ("visual", "context")


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
    """The rows of one cache, with the sums that reports print."""

    shape: kv.KVShape
    entries: tuple[Entry, ...]

    def bytes_of(self, region: str | None = None, with_index: bool = True) -> int:
        """Return the stored bytes of a region (None: of all), index bytes included unless told."""
        chosen = [entry for entry in self.entries if region in (None, entry.region)]
        return sum(entry.payload_bytes + with_index * entry.index_bytes for entry in chosen)

    def dense_bytes(self, region: str | None = None) -> int:
        """Return the bytes of the same regions uncompressed."""
        chosen = [entry for entry in self.entries if region in (None, entry.region)]
        return sum(kv.entry_bytes(self.shape) * entry.tokens_before for entry in chosen)

    def fraction(self, region: str | None = None, with_index: bool = False) -> float:
        """Return a region's retained KV (None: of the whole cache); the paper's fraction leaves the index out."""
        dense = self.dense_bytes(region)
        return self.bytes_of(region, with_index) / dense if dense else 1.0


def nominal_ledger(
    shape: kv.KVShape,
    region_tokens: Mapping[str, int],
    budget: kv.KVBudget,
    cut_layer: int = 0,
    kept_tokens: int | Sequence[int] | None = None,
    samples: int = 1,
) -> Ledger:
    """Build the ledger after prefill that the budget promises for ``visual`` and ``context``; other regions stay whole.

    Args:
        region_tokens: tokens of each region before reduction, e.g. ``{"system": 5, "visual": 576, "query": 14}``.
        cut_layer: first layer that sees a reduced set; those below hold every token with every group.
        kept_tokens: instead of the reducer's count (anchors round up): of all layers from the cut on, or one of every
            layer, those below the cut included.
        samples: that the tokens are of; what is stored once for each is counted so often.
    """
    rows = []
    for layer in range(shape.num_layers):
        for region, tokens in region_tokens.items():
            compressed = region in ROUTED_REGIONS and layer >= cut_layer
            count, each, extra, keys, fixed, fill, basis = tokens, kv.entry_bytes(shape), 0, shape.side_bytes, 0, 0, 0
            if compressed:
                given = kept_tokens if kept_tokens is None or isinstance(kept_tokens, int) else kept_tokens[layer]
                count = kv.kept_count(tokens, budget.keep_ratio) if given is None else given
                each = kv.entry_bytes(shape, budget)
                extra = budget.indexed * kv.index_bytes(budget.num_groups, budget.kept_groups)
                channels = budget.key_channels
                keys, fixed = kv.key_bytes(shape, channels), kv.channel_index_bytes(shape, channels)
                fill, basis = kv.fill_bytes(shape, budget), kv.basis_bytes(shape, budget)
            count = count if tokens else 0
            once = samples if count else 0
            values, index = count * (each - keys) + once * fill, count * extra + once * fixed
            if compressed and budget.byte_share < 1:  # of keys and values: who takes how much is chosen
                spent = int(count * each * kv.exact(budget.byte_share))
                rows.append(Entry(layer, region, tokens, count, spent // 2, spent - spent // 2, 0))
                continue
            rows.append(Entry(layer, region, tokens, count, count * keys + once * basis, values, index))
    return Ledger(shape, tuple(rows))


@dataclass(frozen=True)
class Anchor:
    """A token-only arm with the bytes of a routed one; ``layer_tokens`` are those that each layer holds."""

    tokens: int
    layer_tokens: tuple[int, ...]
    keep_ratio: float
    fraction: float

    @property
    def kept_tokens(self) -> int:
        """Tokens that the last layer holds."""
        return self.layer_tokens[-1]

    @property
    def words(self) -> str:
        """Tokens that stay, for people: a number, or those after the first and the last cut."""
        return kv.count_words(self.layer_tokens, self.tokens)


def staged_anchor(
    shape: kv.KVShape, tokens: int, layer_tokens: Sequence[int], keep_ratio: float, region: str = "visual"
) -> Anchor:
    """Build a token-only arm of a ``region`` from what its layers hold."""
    ledger = nominal_ledger(shape, {region: tokens}, kv.KVBudget(), 0, layer_tokens)
    return Anchor(tokens, tuple(layer_tokens), keep_ratio, ledger.fraction(region))


def solve_anchor(
    shape: kv.KVShape, tokens: int, target: float | Fraction, cut_layer: int = 0, region: str = "visual"
) -> Anchor:
    """Find the matched token-only anchor: the smallest token count whose bytes reach ``target`` of the region's KV."""
    ratio = kv.ratio_above_cut(kv.exact(target), shape.num_layers, cut_layer)
    kept = min(tokens, max(1, math.ceil(ratio * tokens)))
    layers = [tokens] * cut_layer + [kept] * (shape.num_layers - cut_layer)
    return staged_anchor(shape, tokens, layers, kept / tokens, region)
