"""Settings of routing that are refused: what was written, and the words that must stand in the message."""

import pytest

from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing import SELECTORS, RoutingConfig, build_selector

SHAPE = KVShape(4, 4, 32)
REFUSED = [
    ({"selector": "linaer"}, r"unknown selector 'linaer'\. Did you mean 'linear'\?"),
    ({"budget": "globl"}, r"unknown budget 'globl'\. Did you mean 'global'\?"),
    ({"score_prior": "value_nrm"}, r"unknown score_prior 'value_nrm'\. Did you mean 'value_norm'\?"),
    ({"balance_weight": -0.1}, r"routing balance_weight is -0\.1; it must be 0 to"),
    ({"temperature": 2.0}, r"routing temperature 2\.0 is gone, .*; leave it out, or set it to 1\.0"),
    ({"balance_scope": "batch"}, "routing balance_scope 'batch' is gone, .*; leave it out"),
    ({"query_rank": 0}, "routing query_rank is 0; it must be 1 to"),
    ({"selector": "mlp", "query_rank": 4}, "query_rank 4 is the rank of selector 'bilinear', and 'mlp' has none: use"),
    ({"features": ("norms",)}, r"unknown routing feature 'norms'\. Did you mean 'norm'\?"),
    ({"features": ("norm", "norm")}, "routing features names 'norm' twice"),
    ({"num_groups": 12}, "num_groups=12 does not divide the value width 128"),
    ({"kept_groups": 16, "fill": "mean"}, "fill 'mean' does nothing where kept_groups = num_groups = 16"),
    ({"fill": "meen"}, r"unknown fill 'meen'\. Did you mean 'mean'\?"),
    ({"fill": "learned"}, r"routing fill 'learned' is gone, .*; use zero or mean, or use version 0\.2"),
]
OF_ROUTERS = {
    "query_conditioned": True,
    "value_gate": True,
    "score_prior": "value_norm",
    "features": ("norm",),
    "query_rank": 4,
}


def made(**settings):
    config = RoutingConfig(**settings)
    config.check(SHAPE)
    return build_selector(128, config)


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_a_wrong_setting_is_refused_in_words(settings, words):
    with pytest.raises(ValueError, match=words):
        made(**settings)


@pytest.mark.parametrize("name", [name for name in SELECTORS if not SELECTORS[name].learned])
@pytest.mark.parametrize("option", OF_ROUTERS)
def test_controls_refuse_what_belongs_to_routers(name, option):
    words = rf"{option} needs a learned router \(linear, mlp or bilinear\), not '{name}': use .*, or leave {option} out"
    with pytest.raises(ValueError, match=words):
        build_selector(128, RoutingConfig(selector=name, num_groups=16, **{option: OF_ROUTERS[option]}))


def test_what_adapters_of_earlier_versions_say_and_single_channels_pass():
    RoutingConfig(balance_scope="sample", temperature=1).check(SHAPE)
    RoutingConfig(kept_groups=16, value_gate=True, fill="mean").check(SHAPE)
    for num_groups in (64, 128):
        RoutingConfig(num_groups=num_groups, kept_groups=num_groups, balance_weight=0).check(SHAPE)
