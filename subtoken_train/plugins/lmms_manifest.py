"""The manifest that the entry point ``lmms_eval.models`` loads whenever lmms-eval starts: nothing heavy is here."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The ``ModelManifest`` of lmms-eval 0.6 and newer, for ``--model subtoken``."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("subtoken", simple_class_path="subtoken_train.plugins.lmms_eval.SubTokenLmms")
