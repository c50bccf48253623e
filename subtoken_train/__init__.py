"""Sub-token routing for KV-cache compression: train value-group routers, run them, compare them at equal bytes.

Public names are imported on first use, so that ``import subtoken_train`` needs neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from subtoken_train.moved import keep_moved_modules
from subtoken_train.version import __version__

if TYPE_CHECKING:
    from subtoken_train.evictions import build_eviction
    from subtoken_train.families.backbone_config import BackboneConfig
    from subtoken_train.families.images import Video
    from subtoken_train.inference.model import SubTokenModel
    from subtoken_train.ledger.kv_budget import KVBudget
    from subtoken_train.reducers import build_reducer
    from subtoken_train.types import Turn

__all__ = [
    "BackboneConfig",
    "KVBudget",
    "SubTokenModel",
    "Turn",
    "Video",
    "__version__",
    "build_eviction",
    "build_reducer",
]

_HOMES = {
    "BackboneConfig": "subtoken_train.families.backbone_config",
    "KVBudget": "subtoken_train.ledger.kv_budget",
    "SubTokenModel": "subtoken_train.inference.model",
    "Turn": "subtoken_train.types",
    "Video": "subtoken_train.families.images",
    "build_eviction": "subtoken_train.evictions",
    "build_reducer": "subtoken_train.reducers",
}


keep_moved_modules()


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker knows the names above, and tells a misspelt one

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
