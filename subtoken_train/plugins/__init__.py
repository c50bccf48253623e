"""The model inside other evaluation harnesses; no harness is imported unless its own module here is."""

from typing import Any


def manifest() -> Any:
    """Return the ``ModelManifest`` that lmms-eval (0.6 or newer) loads whenever it starts; nothing heavy is here."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("subtoken", simple_class_path="subtoken_train.plugins.lmms_eval.SubTokenLmms")
