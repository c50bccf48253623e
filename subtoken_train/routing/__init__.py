"""Value-group selectors, one file each; a new one is its file and a line in ``SELECTORS``."""

from __future__ import annotations

from subtoken_train.errors import unknown_name
from subtoken_train.routing.base import RoutingConfig, Selector, SelectorInput
from subtoken_train.routing.linear import LinearRouter
from subtoken_train.routing.mlp import MLPRouter
from subtoken_train.routing.output_norm import OutputNormSelector
from subtoken_train.routing.random import RandomSelector
from subtoken_train.routing.static import StaticSelector
from subtoken_train.routing.value_norm import ValueNormSelector

AnySelector = LinearRouter | MLPRouter | ValueNormSelector | OutputNormSelector | RandomSelector | StaticSelector

SELECTORS: dict[str, type[AnySelector]] = {
    "linear": LinearRouter,
    "mlp": MLPRouter,
    "value_norm": ValueNormSelector,
    "output_norm": OutputNormSelector,
    "random": RandomSelector,
    "static": StaticSelector,
}


def build_selector(hidden_size: int, config: RoutingConfig) -> Selector:
    """One layer's selector by its name; an unknown name is a worded ``ValueError``."""
    if config.selector not in SELECTORS:
        raise unknown_name("selector", config.selector, SELECTORS)
    selector = SELECTORS[config.selector](hidden_size, config)
    wanted = {
        "query_conditioned": config.query_conditioned,
        "value_gate": config.value_gate,
        "score_prior": config.score_prior != "none",
    }
    refused = [option for option, is_wanted in wanted.items() if is_wanted and not selector.learned]
    if refused:
        raise ValueError(
            f"{refused[0]} needs a learned router (linear or mlp), not {config.selector!r}: take one of them, or leave "
            f"{refused[0]} out"
        )
    return selector


def build_prior(hidden_size: int, config: RoutingConfig) -> Selector | None:
    """The selector whose norms are the score prior; None where there is none."""
    return None if config.score_prior == "none" else SELECTORS[config.score_prior](hidden_size, config)


__all__ = ["SELECTORS", "RoutingConfig", "Selector", "SelectorInput", "build_prior", "build_selector"]
