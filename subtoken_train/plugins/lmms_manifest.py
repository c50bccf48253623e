"""The manifest that the entry point ``lmms_eval.models`` loads: the model's name and the path of its class.

It is read whenever lmms-eval starts, whatever model runs; so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The ``ModelManifest`` of lmms-eval 0.6 and newer, for ``--model subtoken``."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("subtoken", simple_class_path="subtoken_train.plugins.lmms_eval.SubTokenLmms")
