"""Base class of group selectors, and the settings of routing.

Legend: B batch, N positions, D model width, S value groups, g channels of a group.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, cast, get_args

from torch import Tensor, nn

from subtoken_train.errors import MAX_SEED, MAX_TOKENS, check_range, check_word, refuse
from subtoken_train.functional.groups import check_groups
from subtoken_train.ledger.kv_budget import KVBudget, KVShape, check_share, exact, head_costs
from subtoken_train.types import Fill, Layout
from subtoken_train.view.view import View

GroupBudget = Literal["per_token", "global", "ranked"]
"""Budgets that keep N * K groups of a sample's N tokens, and every key."""
BudgetKind = Literal[GroupBudget, "bytes", "delayed"]
BytePool = Literal["head", "layer", "all", "learned"]
FeatureName = Literal["norm", "attention"]
ScorePrior = Literal["none", "value_norm", "output_norm"]


@dataclass
class RoutingConfig:
    """Settings of value-group routing; the same for every layer.

    Attributes:
        selector: what chooses groups: a learned router (``linear``, ``mlp``, ``bilinear``), or a router-free control
            (``value_norm``, ``output_norm``, ``random``, ``static``, ``leading``).
        num_groups: S, value groups per token.
        kept_groups: K, groups kept per routed token (on average, under a global or ranked budget).
        layout: ``contiguous`` splits the whole value vector; ``per_head`` splits every head alike.
        budget: ``per_token`` keeps K groups of each token; ``global`` the best N*K pairs of each sample; ``ranked`` as
            many pairs, of which a token gets the more the higher the token reducer ranks it; ``bytes`` spends bytes on
            keys and on groups: a head of a token keeps any number of its groups, or no key and nothing. ``kept_groups``
            is then ``num_groups``, a multiple of the key-value heads; as many: all of a head or none. ``delayed``
            (DMS): a gate for every key-value head says whether an entry stays, whole, once ``window`` more tokens have
            read it; ``num_groups`` and ``kept_groups`` are then 1.
        byte_share: share of the bf16 bytes of a sample's routed tokens that ``bytes`` spends, its index included; of
            ``delayed`` the share of open gates that training ends at, which no prompt is promised.
        byte_pool: what shares those bytes: each ``head``, the heads of a ``layer``, or ``all`` heads of all layers, for
            which training runs a context once more before the pass that counts; ``learned`` (LKV): every head of every
            layer has a share of all bytes, the same for all prompts, which is trained with the router.
        sinks: first routed tokens that ``bytes`` keeps whole, inside its bytes and as far as they reach.
        window: last routed tokens, likewise; of ``delayed`` the tokens that still read an entry whose gate is closed.
        warm_start: file of ``subtoken-train calibrate kvzap``: a ``linear`` or ``mlp`` router of ``bytes`` starts as
            these nets and keeps what KVzap keeps; read where training starts alone. None: drawn at random.
        value_gate: a learned router's kept groups are scaled by 2 * sigmoid(beta * logit), beta learned per layer.
        fill: value that a dropped group reads as: ``zero``; ``mean``, the mean of the sample's routed tokens in the
            layer, which a cache stores.
        score_prior: a norm whose standardised logarithm is added to a learned router's logits; ``none``: nothing.
        query_conditioned: the mean router input of the query region joins a learned router's input.
        query_rank: rank of the product of token and query in ``bilinear``; others have none.
        features: what joins a learned router's logits through a learned map: ``norm`` (value norms of the groups),
            ``attention`` (the query's attention to the token, which costs a second q and k projection).
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
        for name, low, high in _RANGES:
            check_range(f"routing {name}", getattr(self, name), low, high)
        self.features = tuple(self.features)  # a list is as good, and compares with the default as one
        for name in self.features:
            check_word("routing feature", name, get_args(FeatureName))
            refuse((self.features.count(name) > 1, f"routing features names {name!r} twice; once is enough"))
        check_word("balance_scope", self.balance_scope, ("sample",))
        check_word("fill", self.fill, get_args(Fill))

    def check(self, shape: KVShape) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
        groups, fill, selector, heads = self.num_groups, self.fill, self.selector, shape.num_kv_heads
        check_groups(groups, self.kept_groups, heads, shape.head_dim, self.layout)
        check_word("budget", self.budget, get_args(BudgetKind))
        check_word("score_prior", self.score_prior, get_args(ScorePrior))
        ranked = selector != "bilinear" and self.query_rank != RoutingConfig.query_rank
        rank = f"query_rank {self.query_rank} is the rank of selector 'bilinear', and {selector!r} has none"
        refuse((ranked, f"{rank}: use 'bilinear', or leave query_rank out"))
        if self.budget == "delayed":
            return self._check_gates()
        if self.budget == "bytes":
            return self._check_bytes(shape)
        for name in self._changed(_OF_BYTES):
            raise ValueError(f"{name} is a setting of budget 'bytes', and the budget is {self.budget!r}: leave it out")
        idle = fill != "zero" and self.kept_groups == groups and not self.value_gate
        nothing = f"fill {fill!r} does nothing where kept_groups = num_groups = {groups}: no group is dropped"
        refuse((idle, f"{nothing}; keep fewer groups, or leave fill out"))
        return None

    def _check_bytes(self, shape: KVShape) -> None:
        check_word("byte_pool", self.byte_pool, get_args(BytePool))
        check_share("byte_share", self.byte_share)
        groups, heads = self.num_groups, shape.num_kv_heads
        spans = self.layout != "contiguous" or groups % heads
        other = self.warm_start is not None and self.selector not in ("linear", "mlp")
        near = ", ".join(str(each * heads) for each in (1, 2, 4, 8) if not shape.head_dim % each)
        own = f"lets every key-value head keep groups of its own, but {self.layout} groups, num_groups={groups}, span"
        asks = "query_conditioned" if self.query_conditioned or self.selector == "bilinear" else None
        asks = "feature 'attention'" if "attention" in self.features else asks
        budget = f"says by byte_share what stays, and kept_groups={self.kept_groups} is another budget"
        nets = f"warm_start {self.warm_start!r} starts routers of selector 'linear' or 'mlp', not {self.selector!r}"
        blind = f"byte_pool 'all' chooses before the question is read, which {asks} reads"
        refuse(
            (self.kept_groups != groups, f"budget 'bytes' {budget}: set kept_groups to num_groups, {groups}"),
            (spans, f"budget 'bytes' {own} the {heads} heads: use contiguous groups, as many as {near}"),
            (self.fill != "zero", f"fill {self.fill!r} is not stored under budget 'bytes': leave fill out"),
            (other, f"{nets}: use one of these, or leave warm_start out"),
            (self.byte_pool == "all" and asks, f"{blind}: use byte_pool 'layer', or a router without it"),
        )

    def _check_gates(self) -> None:
        check_share("byte_share", self.byte_share)
        names = (*_OF_ROUTERS, "fill", "byte_pool", "sinks", "warm_start")
        groups = f"num_groups={self.num_groups} and kept_groups={self.kept_groups}"
        reads = "budget 'delayed' trains gates on what a layer reads, not selector"
        refuse(
            (self.num_groups != 1, f"budget 'delayed' keeps or drops whole entries, not {groups}: set both to 1"),
            *((True, f"budget 'delayed' has no use for {name}: leave it out") for name in self._changed(names)),
            (self.selector not in ("linear", "mlp"), f"{reads} {self.selector!r}: use 'linear' or 'mlp'"),
        )

    def closed_target(self, progress: float) -> float:
        """Return the wanted share of closed gates: entries per kept one grow linearly with ``progress`` to 1."""
        return 1 - 1 / (1 + min(1.0, progress) * (1 / self.byte_share - 1))

    def check_tokens(self, shape: KVShape, tokens: int) -> None:
        """Raise a worded ``ValueError`` where a budget is less than what sinks and window take of ``tokens``."""
        if self.budget == "delayed" and tokens:
            held, most = min(self.window, tokens), int(exact(self.byte_share) * tokens)
            delay = f"budget 'delayed': the delay, window {self.window:,},"
            more = f"holds more entries of every head than byte_share {self.byte_share:.6g} of {tokens:,} tokens"
            refuse(
                (held == tokens, f"{delay} is no shorter than the context of {tokens:,} tokens, so no entry would go"),
                (held > most, f"{delay} {more}, {most:,}: raise byte_share, or lower window"),
            )
        if self.budget != "bytes" or not self.drops or not tokens:
            return
        costs, heads = head_costs(shape, self.num_groups), 1 if self.byte_pool == "head" else shape.num_kv_heads
        entry = costs.key + self.num_groups // shape.num_kv_heads * costs.group
        needed = min(tokens, self.sinks + self.window) * entry * heads
        spent = int(exact(self.byte_share) * tokens * costs.dense * heads)
        if needed > spent:
            unit = "head" if self.byte_pool == "head" else "layer"
            share = f"byte_share {self.byte_share:.6g} of {tokens:,} tokens is {spent:,} bytes for a {unit}"
            kept = f"less than the {needed:,} that sinks {self.sinks} and window {self.window} take"
            raise ValueError(f"{share}, {kept}: raise byte_share, or lower sinks or window")

    @property
    def drops(self) -> bool:
        """True if routed tokens keep less than all."""
        return self.kept_groups < self.num_groups or (self.budget == "bytes" and self.byte_share < 1)

    @property
    def size(self) -> str:
        """Words for what stays, in short: ``S16K4``, or ``S16 bytes 0.2``."""
        if self.budget == "delayed":
            return f"gates {self.byte_share:.6g} delay {self.window}"
        kept = f" bytes {self.byte_share:.6g}" if self.budget == "bytes" else f"K{self.kept_groups}"
        return f"S{self.num_groups}{kept}"

    @property
    def words(self) -> str:
        """Words for what stays and who selects it: ``S16K4 linear``."""
        return f"{self.size} {self.selector}"

    @property
    def token_budget(self) -> KVBudget:
        """The storage of a routed token, and what is stored beside all of them; without a keep ratio."""
        fill = cast("Fill", self.fill)
        return KVBudget(1.0, self.num_groups, self.kept_groups, fill=fill, byte_share=self.byte_share)

    def _changed(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if getattr(self, name) != getattr(RoutingConfig, name)]

    def of_routers(self) -> list[str]:
        """Return the settings that only learned routers have and that differ from their defaults."""
        return self._changed(_OF_ROUTERS)

    def without_router(self, selector: str) -> Self:
        """Return the same under a router-free selector; settings that only routers have take their defaults."""
        defaults = {name: getattr(RoutingConfig, name) for name in _OF_ROUTERS}
        return replace(self, selector=selector, selector_options={}, **defaults)


_OF_BYTES = ("byte_share", "byte_pool", "sinks", "window", "warm_start")
_OF_ROUTERS = ("query_conditioned", "value_gate", "score_prior", "query_rank", "features")
_RANGES = (
    ("balance_weight", 0, 10**6), ("query_rank", 1, 4096), ("temperature", 1, 1), ("sinks", 0, MAX_TOKENS),
    ("window", 0, MAX_TOKENS), ("seed", 0, MAX_SEED),
)  # fmt: skip
SelectorInput = View
"""Its name up to version 0.3."""


class Selector(nn.Module, ABC):
    """Scores the value groups of every token of a layer; the budget turns scores into a mask.

    One is built for each layer, as ``Class(hidden_size, config)``, or ``Class(hidden_size, config, settings)`` where it
    declares ``settings``. Its parameters are trained where ``learned`` is True, and saved with the adapter.
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
        """Return scores [B, N, S] in fp32; higher is kept. With gradient only for learned selectors."""
