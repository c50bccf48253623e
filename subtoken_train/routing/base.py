"""Base class of group selectors, and the settings of routing.

Legend: B batch, N positions, D model width, S value groups, g channels of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast, get_args

from torch import Tensor, nn

from subtoken_train.errors import MAX_SEED, MAX_TOKENS, check_range, check_word
from subtoken_train.functional.groups import check_groups
from subtoken_train.ledger.kv_budget import KVBudget, KVShape, check_share, exact, head_costs
from subtoken_train.types import Fill, Layout
from subtoken_train.view.view import View

GroupBudget = Literal["per_token", "global", "ranked"]
"""Budgets that keep N * K groups of a sample's N tokens, and every key."""
BudgetKind = Literal[GroupBudget, "bytes"]
BytePool = Literal["head", "layer", "all"]
POOLS: dict[str, str] = {"head": "each head", "layer": "each layer", "all": "all layers together"}
"""Byte pools in words."""
FeatureName = Literal["norm", "attention"]
ScorePrior = Literal["none", "value_norm", "output_norm"]


@dataclass
class RoutingConfig:
    """Settings of value-group routing; the same for every layer.

    Attributes:
        selector: what chooses groups: the learned routers ``linear``, ``mlp`` and ``bilinear``, or the router-free
            controls ``value_norm``, ``output_norm``, ``random``, ``static`` and ``leading``.
        num_groups: S, value groups per token.
        kept_groups: K, groups kept per routed token (on average, under a global or ranked budget).
        layout: ``contiguous`` splits the whole value vector; ``per_head`` splits every head alike.
        budget: ``per_token`` keeps K groups of each token; ``global`` the best N*K pairs of each sample; ``ranked`` as
            many pairs, of which a token gets the more the higher the token reducer ranks it; ``bytes`` spends bytes on
            keys and on groups, so that a head of a token may keep any number of its groups, or no key and nothing.
            Visual tokens then read each other whole, as a text's context does. ``kept_groups`` is then ``num_groups``,
            which must be a multiple of the key-value heads; as many as these, and a head of a token is kept whole or
            not at all.
        byte_share: share of the bf16 bytes of a sample's routed tokens that ``bytes`` spends, the index of the groups
            included.
        byte_pool: what shares those bytes: each ``head`` has its own, the heads of a ``layer``, or ``all`` heads of all
            layers, for which the context runs once more before the pass that counts.
        sinks: first routed tokens that ``bytes`` keeps whole, inside its bytes and as far as they reach.
        window: last routed tokens, likewise.
        warm_start: file of ``subtoken-train calibrate kvzap``: a linear router of ``bytes`` starts as these nets, and
            keeps the tokens that KVzap keeps; read where training starts, and never again. None: drawn at random.
        value_gate: kept groups are scaled by 2 * sigmoid(beta * logit), beta learned per layer; learned routers only.
            With ``kept_groups`` = ``num_groups`` it is the gate alone, without selection.
        fill: value that a dropped group reads as: ``zero``; ``mean``, the mean of the sample's routed tokens in the
            layer, which a cache stores. Norms are then of what is left of a value without it.
        score_prior: a norm whose standardised logarithm is added to a learned router's logits; ``none``: nothing.
        query_conditioned: the mean router input of the query region joins a learned router's input.
        query_rank: rank of the product of token and query in ``bilinear``; others have none.
        features: what joins a learned router's logits through a learned map: ``norm`` (value norms of the groups),
            ``attention`` (the query's attention to the token; costs the layer's q and k projections a second time).
        balance_weight: lambda, weight of the load-balance loss of learned routers; 0 trains without it.
        balance_scope: ``sample``, the only one; kept since adapters and recipes of version 0.2 say it.
        temperature: 1, likewise.
        seed: seed of the ``random`` and ``static`` selectors.
        selector_options: settings of the selector's own, where it declares any (``Selector.settings``).
    """

    selector: str = "linear"
    num_groups: int = 16
    kept_groups: int = 4
    layout: Layout = "contiguous"
    budget: BudgetKind = "per_token"
    byte_share: float = 1.0
    byte_pool: BytePool = "layer"
    sinks: int = 4
    window: int = 0
    warm_start: str | None = None
    value_gate: bool = False
    fill: str = "zero"
    score_prior: ScorePrior = "none"
    query_conditioned: bool = False
    query_rank: int = 16
    features: tuple[FeatureName, ...] = ()
    balance_weight: float = 0.01
    balance_scope: str = "sample"
    temperature: float = 1.0
    seed: int = 0
    selector_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("routing balance_weight", self.balance_weight, 0, 10**6)
        check_range("routing query_rank", self.query_rank, 1, 4096)
        check_range("routing sinks", self.sinks, 0, MAX_TOKENS)
        check_range("routing window", self.window, 0, MAX_TOKENS)
        self.features = tuple(self.features)  # a list is as good, and compares with the default as one
        for name in self.features:
            check_word("routing feature", name, get_args(FeatureName))
            if self.features.count(name) > 1:
                raise ValueError(f"routing features names {name!r} twice; once is enough")
        for setting, kept in _RETIRED.items():
            if getattr(self, setting) != kept:
                raise _retired(setting, getattr(self, setting), f"leave it out, or set it to {kept!r}")
        if self.fill == "learned":
            raise _retired("fill", self.fill, "use zero or mean")
        check_word("fill", self.fill, get_args(Fill))
        check_range("routing seed", self.seed, 0, MAX_SEED)

    def check(self, shape: KVShape) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
        check_groups(self.num_groups, self.kept_groups, shape.num_kv_heads, shape.head_dim, self.layout)
        check_word("budget", self.budget, get_args(BudgetKind))
        check_word("score_prior", self.score_prior, get_args(ScorePrior))
        if self.selector != "bilinear" and self.query_rank != RoutingConfig.query_rank:
            raise ValueError(
                f"query_rank {self.query_rank} is the rank of selector 'bilinear', and {self.selector!r} has none: "
                "use 'bilinear', or leave query_rank out"
            )
        self._check_bytes(shape)
        if self.fill != "zero" and self.kept_groups == self.num_groups and not self.value_gate:
            raise ValueError(
                f"fill {self.fill!r} does nothing where kept_groups = num_groups = {self.num_groups}: no group is "
                "dropped; keep fewer groups, or leave fill out"
            )

    def _check_bytes(self, shape: KVShape) -> None:
        """Raise a worded ``ValueError`` where a byte budget does not fit, or its settings stand without one."""
        if self.budget != "bytes":
            for name in _OF_BYTES:
                if getattr(self, name) != getattr(RoutingConfig, name):
                    raise ValueError(
                        f"{name} {getattr(self, name)!r} is a setting of budget 'bytes', and the budget is "
                        f"{self.budget!r}: use 'bytes', or leave {name} out"
                    )
            return
        check_word("byte_pool", self.byte_pool, get_args(BytePool))
        check_share("byte_share", self.byte_share)
        if self.kept_groups != self.num_groups:
            raise ValueError(
                f"budget 'bytes' says by byte_share what stays, and kept_groups={self.kept_groups} is another budget: "
                f"set kept_groups to num_groups, {self.num_groups}"
            )
        if self.layout != "contiguous" or self.num_groups % shape.num_kv_heads:
            near = [heads * shape.num_kv_heads for heads in (1, 2, 4, 8) if not shape.head_dim % heads]
            raise ValueError(
                f"budget 'bytes' lets every key-value head keep groups of its own, but {self.layout} groups, "
                f"num_groups={self.num_groups}, span the {shape.num_kv_heads} heads: use contiguous groups, as many "
                f"as {', '.join(map(str, near))}"
            )
        if self.fill != "zero":
            raise ValueError(f"fill {self.fill!r} is not stored under budget 'bytes': leave fill out")
        if self.warm_start is not None and self.selector != "linear":
            raise ValueError(
                f"warm_start {self.warm_start!r} is of linear nets, and selector {self.selector!r} is none: use "
                "'linear', or leave warm_start out"
            )
        asks = "query_conditioned" if self.query_conditioned or self.selector == "bilinear" else None
        asks = "feature 'attention'" if "attention" in self.features else asks
        if self.byte_pool == "all" and asks is not None:
            raise ValueError(
                f"byte_pool 'all' chooses before the question is read, which {asks} reads: use byte_pool 'layer', or a "
                "router without it"
            )

    def check_tokens(self, shape: KVShape, tokens: int) -> None:
        """Raise a worded ``ValueError`` where a byte budget is less than what sinks and window take of ``tokens``."""
        if self.budget != "bytes" or not self.drops or not tokens:
            return
        costs, heads = head_costs(shape, self.num_groups), 1 if self.byte_pool == "head" else shape.num_kv_heads
        entry = costs.key + self.num_groups // shape.num_kv_heads * costs.group
        needed = min(tokens, self.sinks + self.window) * entry * heads
        spent = int(exact(self.byte_share) * tokens * costs.dense * heads)
        if needed > spent:
            unit = "head" if self.byte_pool == "head" else "layer"
            raise ValueError(
                f"byte_share {self.byte_share:.6g} of {tokens:,} tokens is {spent:,} bytes for a {unit}, "
                f"less than the {needed:,} that sinks {self.sinks} and window {self.window} take with their index: "
                "raise byte_share, or lower sinks or window"
            )

    @property
    def drops(self) -> bool:
        """Return whether routed tokens keep less than all."""
        return self.kept_groups < self.num_groups or (self.budget == "bytes" and self.byte_share < 1)

    @property
    def size(self) -> str:
        """Return what stays in short: ``S16K4``, or ``S16 bytes 0.2``."""
        if self.budget == "bytes":
            return f"S{self.num_groups} bytes {self.byte_share:.6g}"
        return f"S{self.num_groups}K{self.kept_groups}"

    @property
    def words(self) -> str:
        """Return what stays and who selects it: ``S16K4 linear``."""
        return f"{self.size} {self.selector}"

    @property
    def token_budget(self) -> KVBudget:
        """Return what a routed token stores, and what is stored beside all of them; without a keep ratio."""
        return KVBudget(
            1.0, self.num_groups, self.kept_groups, fill=cast("Fill", self.fill), byte_share=self.byte_share
        )

    def of_routers(self) -> list[str]:
        """Settings away from their defaults that only learned routers have."""
        return [name for name in _OF_ROUTERS if getattr(self, name) != getattr(RoutingConfig, name)]

    def without_router(self, selector: str) -> RoutingConfig:
        """Return the same under a router-free selector; settings that only routers have take their defaults."""
        defaults = {name: getattr(RoutingConfig, name) for name in _OF_ROUTERS}
        return replace(self, selector=selector, selector_options={}, **defaults)


_OF_BYTES = ("byte_share", "byte_pool", "sinks", "window", "warm_start")
_OF_ROUTERS = ("query_conditioned", "value_gate", "score_prior", "query_rank", "features")
_RETIRED = {"balance_scope": "sample", "temperature": 1.0}
"""Settings of version 0.2 that brought nothing, and the value that is still read."""


def _retired(setting: str, value: object, remedy: str) -> ValueError:
    return ValueError(
        f"routing {setting} {value!r} is gone, since it brought nothing where we measured it; {remedy}, or use version "
        "0.2, which has it"
    )


SelectorInput = View
"""The name up to version 0.3, by which selectors written for it import it."""


class Selector(nn.Module, ABC):
    """Scores the value groups of every token of a layer; the budget turns scores into a mask.

    One is built for each layer, as ``Class(hidden_size, config)``, or ``Class(hidden_size, config, settings)`` where it
    declares ``settings``. S is ``config.num_groups`` (under the budget ``bytes`` it counts the keys' logits, too). Its
    parameters are trained where ``learned`` is True, and saved with the adapter.
    """

    learned: bool = False
    query_conditioned: bool = False
    """True where it reads ``View.query_summary_BD``."""
    same_for_all: bool = False
    """True where it scores all tokens of a layer alike: nothing has to name the groups that each keeps."""
    reads_output: bool = False
    """True where it calls ``View.output_norms``."""
    settings: ClassVar[type | None] = None
    """Dataclass of settings of its own, given by ``routing.selector_options``; of plain types, as in JSON."""

    @abstractmethod
    def forward(self, view: View) -> Tensor:
        """Scores [B, N, S] in fp32; higher is kept. With gradient only for learned selectors."""
