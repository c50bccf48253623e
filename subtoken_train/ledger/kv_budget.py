"""The KV of a token: whole, and as a budget promises it. Pure Python, exact rationals.

Words: r ``keep_ratio``, S ``num_groups``, K ``kept_groups``, rho_KV ``kv_fraction`` = (1 + K/S)/2,
rho_total ``total_kv_fraction`` = r * rho_KV (paper, section 3.3). Where key channels are cut, their share stands for
the 1.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

from subtoken_train.errors import check_word
from subtoken_train.resources import published_models
from subtoken_train.types import EntryCosts, Fill, KeyAxes

WRITTEN = Fraction(1, 10**9)  # part of a token by which the last digit of a written ratio may change a count


def exact(number: float | Fraction) -> Fraction:
    """Return the decimal number that was written (0.15625, 0.1), not its binary neighbour."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def share_words(share: float, digits: int = 3) -> str:
    """Write a share as ``15.625%`` of a dense cache, or ``100.000% + index`` where nothing is left out."""
    return f"{min(share, 1):.{digits}%}" + (" + index" if share > 1 else "")


def mean_deviation(shares: Sequence[float]) -> tuple[float, float]:
    """Return the mean of measured shares, one or more, and their standard deviation (of one: 0)."""
    return statistics.fmean(shares), statistics.stdev(shares) if len(shares) > 1 else 0.0


_SHARES = {
    "keep_ratio": "0.25 keeps a quarter of the tokens",
    "key_channels": "0.6 keeps 60 % of each key's channels",
    "byte_share": "0.2 spends a fifth of the bytes",
}


def check_share(name: str, share: float | Fraction) -> None:
    """Refuse what is no number in (0, 1]."""
    if isinstance(share, bool) or not isinstance(share, int | float | Fraction) or not 0 < share <= 1:
        raise ValueError(f"{name}={share!r} must lie in (0, 1]; {_SHARES[name]}")


def kept_count(tokens: int, keep_ratio: float | Fraction, round_up: bool = False) -> int:
    """Return how many of ``tokens`` stay: rounded down for routed arms, up for anchors; one of a non-empty set."""
    check_share("keep_ratio", keep_ratio)
    share, sign = exact(keep_ratio), -1 if round_up else 1
    return min(tokens, max(1, sign * (sign * tokens * share.numerator // share.denominator)))


def matched_count(arm_tokens: int | Fraction, arm_bytes: Fraction) -> int:
    """Return the whole tokens that a matched anchor keeps: the fewest with the bytes of its arm's ``arm_tokens``.

    ``arm_bytes``: what a token takes there, of a whole one; its last written digit adds no token.
    """
    return math.ceil(arm_tokens * arm_bytes - WRITTEN)


def ratio_above_cut(share: Fraction, num_layers: int, cut_layer: int) -> Fraction:
    """Return the share that layers from ``cut_layer`` on hold, if those below hold all and the average is ``share``."""
    reduced, free = num_layers - cut_layer, share * num_layers - cut_layer
    if reduced <= 0 or free <= 0:
        below = f"the {cut_layer} of {num_layers} layers below the cut hold every token"
        cost = f"cost {cut_layer / num_layers:.2%} alone; use stage 'embeds' or a deeper model"
        raise ValueError(f"no token-only anchor at {float(share):.2%}: {below} and {cost}")
    return free / reduced


def count_words(layer_tokens: Sequence[int], tokens: int) -> str:
    """Say how many of ``tokens`` layers hold: a number, or those after the first and the last cut."""
    first, last = next((count for count in layer_tokens if count < tokens), tokens), layer_tokens[-1]
    return str(first) if first == last else f"{first} to {last}"


def kept_channels(width: int, key_channels: float) -> int:
    """Return how many channels of a key of ``width`` stay: ThinK rounds what goes down; at least one."""
    return math.ceil(exact(key_channels) * width)


@dataclass(frozen=True)
class KVBudget:
    """Nominal budget of routed tokens.

    Attributes:
        keep_ratio: r, tokens kept by the reducer / tokens before it, in (0, 1].
        num_groups: S, value groups per value vector.
        kept_groups: K, groups kept per routed token, 1 <= K <= S; K = S is a token-only arm.
        key_channels: share of the key channels kept per token, in (0, 1].
        fill: what a dropped group reads as; ``mean`` stores a vector per layer and sample (``total_of`` counts it).
        byte_share: share of a routed token's KV that stays on average, index included, where bytes are chosen by.
        key_axes: along which key channels are cut; ``pca`` stores a basis per layer and sample (``basis_bytes``).
        indexed: whether each token's groups have to be named; not where all tokens keep the same.
    """

    keep_ratio: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    key_channels: float = 1.0
    fill: Fill = "zero"
    byte_share: float = 1.0
    key_axes: KeyAxes = "own"
    indexed: bool = True

    def __post_init__(self) -> None:
        for name in _SHARES:
            check_share(name, getattr(self, name))
        check_word("fill", self.fill, get_args(Fill))
        check_word("key_axes", self.key_axes, get_args(KeyAxes))
        if self.kept_groups not in range(1, self.num_groups + 1):
            raise ValueError(f"kept_groups={self.kept_groups} must lie between 1 and num_groups={self.num_groups}")

    @property
    def value_fraction(self) -> Fraction:
        """K/S, exactly."""
        return Fraction(self.kept_groups, self.num_groups)

    @property
    def kv_fraction(self) -> float:
        """rho_KV = (1 + K/S)/2: retained KV of a routed token, where keys stay whole."""
        return float(self.exact_kv)

    @property
    def exact_kv(self) -> Fraction:
        """``kv_fraction`` as a rational."""
        return exact(self.byte_share) * (exact(self.key_channels) + self.value_fraction) / 2

    @property
    def exact_total(self) -> Fraction:
        """rho_total as a rational; what anchors are solved for."""
        return exact(self.keep_ratio) * self.exact_kv

    @property
    def stores_fill(self) -> bool:
        """True if a value vector per layer and sample is stored beside the tokens; where K = S nothing reads it."""
        return self.fill == "mean" and self.kept_groups < self.num_groups

    def total_of(self, tokens: int) -> Fraction:
        """Return ``exact_total`` of a sample with that many tokens before the reducer, stored fill included."""
        return self.exact_total + (Fraction(1, 2 * tokens) if self.stores_fill else 0)

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


def key_bytes(shape: KVShape, key_channels: float = 1.0) -> int:
    """Return the bytes of one entry's keys in one layer, of all heads."""
    return shape.num_kv_heads * kept_channels(shape.head_dim, key_channels) * shape.element_bytes


def head_costs(shape: KVShape, num_groups: int) -> EntryCosts:
    """Return what a head's entry costs under a byte budget, in bf16 always; a key brings its groups' index."""
    own = num_groups // shape.num_kv_heads
    side = 2 * shape.head_dim
    return EntryCosts(side + math.ceil(own / 8), side // own, 2 * side)


def entry_bytes(shape: KVShape, budget: KVBudget | None = None) -> int:
    """Return an entry's key and value bytes in one layer, without the index; a routed entry stores K/S of its value."""
    budget = KVBudget() if budget is None else budget
    return key_bytes(shape, budget.key_channels) + int(shape.side_bytes * budget.value_fraction)


def fill_bytes(shape: KVShape, budget: KVBudget) -> int:
    """Return the bytes of what dropped groups read as, of one sample in one layer that routes."""
    return shape.side_bytes if budget.stores_fill else 0


def channel_index_bytes(shape: KVShape, key_channels: float) -> int:
    """Return the bytes that name a sample's kept key channels in one layer, one number each; 0 where all stay."""
    count = kept_channels(shape.head_dim, key_channels)
    return 0 if count == shape.head_dim else shape.num_kv_heads * count * number_bytes(shape.head_dim)


def mirror_count(width: int, key_channels: float) -> int:
    """Return the vectors of a head that turn its keys to their axes: as many as stay or go, whichever are fewer."""
    count = kept_channels(width, key_channels)
    return min(count, width - count)


def basis_bytes(shape: KVShape, budget: KVBudget) -> int:
    """Return the bytes of a sample's key basis in one layer: centre and mirrors in fp16, what joins them in fp32."""
    mirrors = 0 if budget.key_axes == "own" else mirror_count(shape.head_dim, budget.key_channels)
    return shape.num_kv_heads * (2 * shape.head_dim * (1 + mirrors) + 4 * mirrors**2) if mirrors else 0


def number_bytes(width: int) -> int:
    """Return the bytes of the number of one of ``width`` channels."""
    return 1 if width <= 256 else 2


def index_bytes(num_groups: int, kept_groups: int) -> int:
    """Return the bytes that name one routed token's kept groups in one layer: a bit per group; 0 where K = S."""
    return 0 if kept_groups == num_groups else math.ceil(num_groups / 8)


def _geometries() -> Iterator[tuple[str, KVShape]]:
    table = published_models()
    for row in table["models"].values():
        if "short" in row:
            sizes = {**table["parts"][row["text"]], **dict(zip(table["sizes"], row["sizes"], strict=True))}
            width = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
            yield row["short"], KVShape(sizes["num_hidden_layers"], sizes["num_key_value_heads"], width)


GEOMETRIES = dict(_geometries())
"""Geometries of well-known models in bf16, so that budgets need neither weights nor a network."""


def geometry(name: str) -> KVShape:
    """Look up the cache geometry of a model by its short name."""
    check_word("model", name, GEOMETRIES)
    return GEOMETRIES[name]
