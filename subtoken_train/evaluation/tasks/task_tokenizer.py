"""The tokenizer by which a task measures the texts that it makes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from subtoken_train.errors import clipped
from subtoken_train.families.backbone_config import is_hub_id, resolve


@lru_cache(maxsize=2)
def read_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder (that of a shipped model, too) or the Hub; no code that it brings is run.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=False)
    except Exception as error:  # whatever the readers of broken files raise
        words = clipped(" ".join(str(error).split()) or type(error).__name__, 160)
        raise ValueError(f"tokenizer {name!r} cannot be loaded ({words}); give a folder or a Hub id") from None


def not_at_hand(name: str | None) -> ValueError | None:
    """Return why a tokenizer of the Hub is not at hand now; None where it is, and for a folder's or none at all."""
    if name is None or not is_hub_id(name):
        return None
    try:
        read_tokenizer(name)
    except ValueError as error:
        return error
    return None
