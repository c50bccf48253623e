"""Value-group selectors, one file each; a new one is its file and a line in ``SELECTORS``."""

from __future__ import annotations

from subtoken_train.registry import Registry
from subtoken_train.routing.base import RoutingConfig, Selector, SelectorInput

SELECTORS: Registry[Selector] = Registry(
    "selector",
    group="subtoken_train.selectors",
    package=__name__,
    base="base:Selector",
    builtin={
        "linear": "linear:LinearRouter",
        "mlp": "mlp:MLPRouter",
        "bilinear": "bilinear:BilinearRouter",
        "value_norm": "value_norm:ValueNormSelector",
        "output_norm": "output_norm:OutputNormSelector",
        "random": "random:RandomSelector",
        "static": "static:StaticSelector",
    },
)


def build_selector(hidden_size: int, config: RoutingConfig) -> Selector:
    """One layer's selector by its name; an unknown name is a worded ``ValueError``."""
    selector = SELECTORS.find(config.selector)(hidden_size, config)
    refused = [] if selector.learned else config.of_routers()
    if refused:
        raise ValueError(
            f"{refused[0]} needs a learned router (linear, mlp or bilinear), not {config.selector!r}: take one of "
            f"them, or leave {refused[0]} out"
        )
    return selector


__all__ = ["SELECTORS", "RoutingConfig", "Selector", "SelectorInput", "build_selector"]
