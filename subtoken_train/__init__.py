"""Sub-token routing for KV-cache compression: train value-group routers, run them, compare them at equal bytes.

Public names are imported on first use, so that ``import subtoken_train`` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from subtoken_train.moved import keep_moved_modules
from subtoken_train.version import __version__

if TYPE_CHECKING:
    from subtoken_train.inference.model import SubTokenModel
    from subtoken_train.ledger.kv_budget import KVBudget

__all__ = ["KVBudget", "SubTokenModel", "__version__"]

_HOMES = {"KVBudget": "subtoken_train.ledger.kv_budget", "SubTokenModel": "subtoken_train.inference.model"}


keep_moved_modules()


if not TYPE_CHECKING:  # a type checker knows the names above, and tells a misspelt one

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
