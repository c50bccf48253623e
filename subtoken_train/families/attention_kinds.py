"""How the layers of a language model attend: in full, or in a sliding window; everything else is refused."""

from __future__ import annotations

from typing import Any

PREFIX = "subtoken_"
"""Of the names of attention functions that also read packed storage."""
WINDOWED = ("mistral", "qwen2", "qwen3")
"""Language models whose windows are served."""
_GEMMA = "its windowed layers turn positions by a rotary base of their own, and one base for all layers is served here"
UNSERVED = {"gemma3": _GEMMA, "gemma3_text": _GEMMA}
"""Model types that people ask for, and what is missing."""


def layer_windows(config: Any, mrope: bool = False) -> list[int | None]:
    """Of every layer the positions that a row sees, its own included; None where it sees all before it.

    Args:
        config: a model's configuration; what its text model says counts.
        mrope: whether a row's position is a place in a grid, in which a window has no length.

    Raises:
        ValueError: a layer attends in a way that is not served, see the message.
    """
    text = config.get_text_config(decoder=True)
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or []
    if text.model_type == "mistral":  # it has no kinds of layers: a window is every layer's
        slides = [window is not None] * text.num_hidden_layers
    else:  # Qwen names a window that no layer may use
        slides = [kind == "sliding_attention" for kind in kinds] or [window is not None] * text.num_hidden_layers
    if any(slides):
        _check_window(text.model_type, window, mrope)
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if not kinds and getattr(text, "attention_chunk_size", None) is not None:
        others = ["chunked_attention"]
    if others:
        raise ValueError(
            f"{text.model_type} with layers of {', '.join(others)} is not supported: they do not see all that a packed "
            "cache keeps; use a model with full attention, or sliding windows, in every layer"
        )
    return [window if slides_here else None for slides_here in slides]


def _check_window(model_type: str, window: Any, mrope: bool) -> None:
    if mrope or model_type not in WINDOWED:
        why = "places in a grid have no distance" if mrope else f"served are those of {', '.join(WINDOWED)}"
        raise ValueError(
            f"{model_type} with sliding-window attention (window {window}) is not supported: {why}; use a model, or a "
            "config.json, without it"
        )
    if type(window) is not int or window < 1:
        raise ValueError(f"{model_type}: sliding_window={window!r} must be a whole number of at least 1")


def check_window_runs(windows: list[int | None], implementation: str | None) -> None:
    """Raise a worded ``ValueError`` where layers have windows and run on something else than ``sdpa``."""
    sliding = next((window for window in windows if window is not None), None)
    if sliding is not None and implementation is not None and not implementation.endswith("sdpa"):
        raise ValueError(
            f"a sliding window ({sliding} positions) runs on attention: sdpa, not on {implementation!r}, which counts "
            "rows instead of positions; set model.backbone.attention: sdpa"
        )
