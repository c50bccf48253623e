"""Positions that a model was made for, and rotary angles that depend on how long a sequence is.

``max_position_embeddings`` is the original length in some files (Qwen's yarn) and the extended one in others (Llama
3.1), so the larger of it and ``original x factor`` counts. Nothing is refused past it, as in transformers. ``dynamic``
and ``longrope`` change their frequencies with the length: a prompt has those of its own, every later call those of its
last position; keys in a cache stay as they were turned; in a batch the longest sample decides.

Legend: B batch, N positions, d head width.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subtoken_train.errors import SubTokenWarning
from subtoken_train.forks import changed

LENGTH_DEPENDENT = ("dynamic", "longrope")  # kinds of rotary embeddings whose frequencies depend on a sequence's length
_UNSCALED = ("default", "mrope", "proportional", "axial")


def position_bound(config: Any) -> int | None:
    """Return how many positions a model was made for, None where its configuration does not say."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    named: int | None = getattr(text, "max_position_embeddings", None)
    if named is None:
        return None
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    bounds = [named]
    for scaling in [each for each in found.values() if isinstance(each, Mapping)] or [found]:  # of each kind of layer
        factor, kind = scaling.get("factor"), scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in _UNSCALED and isinstance(factor, int | float):
            own = getattr(text, "original_max_position_embeddings", None)
            bounds.append(int((scaling.get("original_max_position_embeddings") or own or named) * factor))
    return max(bounds)


def warn_beyond(config: Any, positions: int, before: int = 0) -> None:
    """Warn where a sequence passes the positions that a model was made for, and had not ``before``."""
    bound = position_bound(config)
    if bound is not None and before <= bound < positions:
        # the same words every time, from one place: Python, and so the command line, show them once
        words = f"a sequence is longer than the {bound:,} positions that this model ({config.model_type}) was made for"
        instead = "shorten the prompt, or load the model with its positions extended (rope_parameters)"
        warnings.warn(f"{words}, so answers may be worse; {instead}", SubTokenWarning, stacklevel=1)


def rotary_kind(rotary: Any) -> str:
    """Return the kind of a rotary embedding, by transformers' name; all of them where layers have their own."""
    kind = getattr(rotary, "rope_type", "default")
    return " and ".join(sorted(set(kind.values()))) if isinstance(kind, dict) else str(kind)


def rotary_angles(
    rotary: Any, like: Tensor, position_ids: Tensor, length: Tensor | None, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position ids [B, N], or [3, B, N] under mRoPE, by transformers' module: [..., N, d].

    ``length``: of the whole sequence, a scalar, for ``LENGTH_DEPENDENT`` kinds; None: up to the largest position.
    ``layer_type``: where each kind of layer has frequencies of its own, which depend on no length.
    """
    kind = rotary_kind(rotary)
    if layer_type is not None or kind not in LENGTH_DEPENDENT:
        cos, sin = rotary(like, position_ids, *([] if layer_type is None else [layer_type]))
        return cos, sin
    if length is not None:  # which transformers reads off the largest position
        position_ids = torch.cat([position_ids, (length.to(position_ids) - 1).expand(*position_ids.shape[:-1], 1)], -1)
    own: dict[str, Any] = {}
    if kind == "dynamic":  # which remembers the longest sequence
        inv_freq = rotary.original_inv_freq.to(rotary.inv_freq.device)
        own = {"inv_freq": inv_freq, "max_seq_len_cached": rotary.original_max_seq_len}
    with changed(rotary, **own):
        cos, sin = rotary(like, position_ids)
    return (cos, sin) if length is None else (cos[..., :-1, :], sin[..., :-1, :])
