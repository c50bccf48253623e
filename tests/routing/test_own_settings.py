"""Selectors with settings of their own: declared, read, refused in words; and scores that are none."""

import json
from dataclasses import asdict, dataclass, replace

import pytest
from torch import nn

from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing import SELECTORS, RoutingConfig, Selector, build_selector, with_defaults
from subtoken_train.routing.routers import fp32_linear
from subtoken_train.typed import typed
from tests.support.helpers import compress, make_batch
from tests.support.refusals import refuses, refusing


@dataclass(frozen=True)
class LowRankSettings:
    """Settings of the selector below."""

    rank: int = 8
    scales: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; it must be 1 or more")


class LowRank(Selector):
    """Logits through a narrow layer."""

    learned = True
    settings = LowRankSettings

    def __init__(self, hidden_size, config, settings):
        super().__init__()
        self.down, self.up = nn.Linear(hidden_size, settings.rank), nn.Linear(settings.rank, config.num_groups)
        self.scale = settings.scales[0]

    def forward(self, view):
        return self.scale * fp32_linear(self.up, fp32_linear(self.down, view.hidden_BND))


@pytest.fixture(autouse=True)
def _there(monkeypatch):
    monkeypatch.setitem(SELECTORS, "low_rank", LowRank)


def low_rank(**options) -> RoutingConfig:
    return RoutingConfig("low_rank", selector_options=options)


def test_settings_reach_the_selector_and_defaults_are_written_out():
    built = build_selector(32, low_rank(rank=3, scales=[2]))
    assert (built.down.out_features, built.up.out_features, built.scale) == (3, 16, 2.0)
    whole = with_defaults(low_rank(rank=3))
    assert whole.selector_options == {"rank": 3, "scales": (1.0,)}
    assert with_defaults(typed(RoutingConfig, json.loads(json.dumps(asdict(whole))), "file")) == whole
    assert replace(whole, fill="mean").without_router("random") == RoutingConfig("random", fill="mean")
    assert with_defaults(RoutingConfig()) == RoutingConfig()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (low_rank(rnk=3), r"selector_options: unknown key 'rnk'\. Did you mean 'rank'\? Allowed: rank, scales"),
        (low_rank(rank="3"), r"selector_options: rank is '3'; it must be a whole number"),
        (low_rank(rank=0), "rank is 0; it must be 1 or more"),
        (RoutingConfig(selector_options={"rank": 3}), "'linear' has no settings of its own, and .* names rank: leave"),
        (RoutingConfig("low_rnk"), r"unknown selector 'low_rnk'\. Did you mean 'low_rank'"),
    ],
    ids=["typo", "type", "range", "none declared", "no selector"],
)
@pytest.mark.parametrize("ask", [with_defaults, lambda config: build_selector(32, config)], ids=["read", "build"])
def test_wrong_settings_are_worded(ask, config, words):
    refuses(words, ask, config)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda scores: scores[..., 1:], r"float32 scores of shape \[1, \d+, 15\] in layer 0; .*, \d+, 16\]: batch,"),
        (lambda scores: scores[0], r"float32 scores of shape \[\d+, 16\] in layer 0"),
        (lambda scores: scores.bfloat16(), r"bfloat16 scores .*it must give float32"),
        (lambda scores: None, "no tensor but NoneType in layer 0"),
    ],
    ids=["groups", "batch", "dtype", "nothing"],
)
def test_scores_that_are_none_are_worded(tiny_family, monkeypatch, spoil, words):
    forward = LowRank.forward
    monkeypatch.setattr(LowRank, "forward", lambda self, view: spoil(forward(self, view)))
    backbone = compress(tiny_family, low_rank(), name="fastv", keep_ratio=0.25)
    refuses(f"selector 'low_rank' gave {words}", lambda: backbone.run(make_batch([(1, 7)])))


SHAPE = KVShape(4, 4, 32)
REFUSED = [
    ({"budget": "globl"}, r"unknown budget 'globl'\. Did you mean 'global'\?"),
    ({"score_prior": "value_nrm"}, r"unknown score_prior 'value_nrm'\. Did you mean 'value_norm'\?"),
    ({"balance_weight": -0.1}, r"routing balance_weight is -0\.1; it must be 0 to"),
    ({"temperature": 2.0}, r"routing temperature is 2\.0; it must be 1 to 1"),
    ({"balance_scope": "batch"}, r"unknown balance_scope 'batch'\. Allowed: sample"),
    ({"selector": "mlp", "query_rank": 4}, "query_rank 4 is the rank of selector 'bilinear', and 'mlp' has none: use"),
    ({"features": ("norms",)}, r"unknown routing feature 'norms'\. Did you mean 'norm'\?"),
    ({"features": ("norm", "norm")}, "routing features names 'norm' twice"),
    ({"selector": "low_rank", "query_conditioned": True}, "query_conditioned does nothing with selector 'low_rank'"),
    ({"num_groups": 12}, "num_groups=12 does not divide the value width 128"),
    ({"kept_groups": 16, "fill": "mean"}, "fill 'mean' does nothing where kept_groups = num_groups = 16"),
    ({"fill": "meen"}, r"unknown fill 'meen'\. Did you mean 'mean'\?"),
]
OF_ROUTERS = {"query_conditioned": True, "value_gate": True, "score_prior": "value_norm", "query_rank": 4}
OF_ROUTERS["features"] = ("norm",)


def made(**settings):
    config = RoutingConfig(**settings)
    config.check(SHAPE)
    return build_selector(128, config)


test_a_wrong_setting_is_refused_in_words = refusing(REFUSED, lambda settings: made(**settings))


@pytest.mark.parametrize("option", OF_ROUTERS)
def test_controls_refuse_what_belongs_to_routers(option):
    words = rf"{option} needs a learned router \(linear, mlp or bilinear\), not 'static': use .*, or leave {option} out"
    refuses(words, build_selector, 128, RoutingConfig(selector="static", num_groups=16, **{option: OF_ROUTERS[option]}))


def test_what_adapters_of_earlier_versions_say_and_single_channels_pass():
    RoutingConfig(balance_scope="sample", temperature=1).check(SHAPE)
    RoutingConfig(kept_groups=16, value_gate=True, fill="mean").check(SHAPE)
    for num_groups in (64, 128):
        RoutingConfig(num_groups=num_groups, kept_groups=num_groups, balance_weight=0).check(SHAPE)
