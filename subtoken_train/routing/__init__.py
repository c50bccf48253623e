"""Value-group selectors; a new one is its class and a line in ``SELECTORS``."""

import operator
from dataclasses import asdict, replace
from typing import Any, cast

from subtoken_train.errors import unknown_name
from subtoken_train.registry import Registry
from subtoken_train.routing.base import RoutingConfig as RoutingConfig
from subtoken_train.routing.base import Selector as Selector
from subtoken_train.routing.base import SelectorInput as SelectorInput
from subtoken_train.typed import own_settings
from subtoken_train.types import Layout

SELECTORS: Registry[Selector] = Registry(
    "selector",
    group="subtoken_train.selectors",
    package=__name__,
    base="base:Selector",
    builtin={
        "linear": "routers:LinearRouter",
        "mlp": "routers:MLPRouter",
        "bilinear": "routers:BilinearRouter",
        "value_norm": "routers:ValueNormSelector",
        "output_norm": "routers:OutputNormSelector",
        "random": "routers:RandomSelector",
        "static": "routers:StaticSelector",
        "leading": "routers:LeadingSelector",
    },
)


def build_selector(hidden_size: int, config: RoutingConfig) -> Selector:
    """Build one layer's selector; an unknown name or setting is a worded ``ValueError``."""
    name, own = config.selector, _own(config)
    selector = SELECTORS.find(name)(hidden_size, config, *([] if own is None else [own]))
    routers = "a learned router (linear, mlp or bilinear)"
    if config.budget == "bytes" and not selector.learned:
        raise ValueError(f"budget 'bytes' needs a logit for every key, and selector {name!r} gives none: use {routers}")
    if config.query_conditioned and selector.learned and not selector.query_conditioned:
        raise ValueError(f"query_conditioned does nothing with selector {name!r}, which reads no query")
    for setting in [] if selector.learned else config.of_routers():
        raise ValueError(f"{setting} needs {routers}, not {name!r}: use one of them, or leave {setting} out")
    return selector


def with_defaults(config: RoutingConfig) -> RoutingConfig:
    """Return the same with every setting of the selector's own written out."""
    own = _own(config)
    return config if own is None else replace(config, selector_options=asdict(own))


def _own(config: RoutingConfig) -> Any:
    kind, owner = SELECTORS.find(config.selector).settings, f"selector {config.selector!r}"
    return own_settings(kind, config.selector_options, "routing.selector_options", owner)


def check_untrained(selector: str) -> None:
    """Raise a worded ``ValueError`` unless a selector chooses without training."""
    free = [name for name in SELECTORS if not SELECTORS[name].learned]
    if selector in free:
        return
    if selector not in SELECTORS:
        raise unknown_name("selector without training", selector, free)
    raise ValueError(f"selector {selector!r} is a trained router: give an adapter with one, or use {', '.join(free)}")


def untrained_routing(
    groups: object, selector: str | None = None, layout: str | None = None, seed: int | None = None
) -> RoutingConfig | None:
    """Return the routing of a backbone alone; None where no groups are asked for.

    Args:
        groups: S and K, as numbers or written ``16,12``.
        selector: one that needs no training; None: ``value_norm``.
        layout: None: ``contiguous``.
    """
    if groups is None:
        for name, value in (("selector", selector), ("layout", layout)):
            if value is not None:
                raise ValueError(f"{name} {value!r} of a backbone alone needs groups, S and K, for instance 16,12")
        return None
    parts = groups.split(",") if isinstance(groups, str) else groups
    try:
        num_groups, kept_groups = [int(part) if isinstance(part, str) else operator.index(part) for part in parts]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"groups {groups!r} must be two whole numbers, S and K, for instance 16,12") from None
    chosen = "value_norm" if selector is None else selector
    check_untrained(chosen)
    return RoutingConfig(chosen, num_groups, kept_groups, cast("Layout", layout or "contiguous"), seed=seed or 0)
