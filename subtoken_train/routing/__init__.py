"""Value-group selectors, one file each; a new one is its file and a line in ``SELECTORS``."""

from __future__ import annotations

from subtoken_train.errors import unknown_name
from subtoken_train.routing.base import RoutingConfig, Selector, SelectorInput
from subtoken_train.routing.linear import LinearRouter
from subtoken_train.routing.mlp import MLPRouter
from subtoken_train.routing.random import RandomSelector
from subtoken_train.routing.static import StaticSelector
from subtoken_train.routing.value_norm import ValueNormSelector

SELECTORS: dict[str, type[LinearRouter | MLPRouter | ValueNormSelector | RandomSelector | StaticSelector]] = {
    "linear": LinearRouter,
    "mlp": MLPRouter,
    "value_norm": ValueNormSelector,
    "random": RandomSelector,
    "static": StaticSelector,
}


def build_selector(hidden_size: int, config: RoutingConfig) -> Selector:
    """One layer's selector by its name; an unknown name is a worded ``ValueError``."""
    if config.selector not in SELECTORS:
        raise unknown_name("selector", config.selector, SELECTORS)
    selector = SELECTORS[config.selector](hidden_size, config)
    if config.query_conditioned and not selector.learned:
        raise ValueError(f"query_conditioned needs a learned router (linear or mlp), not {config.selector!r}")
    return selector


__all__ = ["SELECTORS", "RoutingConfig", "Selector", "SelectorInput", "build_selector"]
