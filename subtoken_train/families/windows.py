"""Windows: what a decoder must not have, because its layers would not see all that a packed cache keeps."""

from __future__ import annotations

from typing import Any


def check_full_attention(config: Any) -> None:
    """Refuse layers that attend in a window or in chunks: it would hide kept context tokens from the query.

    Args:
        config: a model's configuration; what its text model says counts.

    Raises:
        ValueError: a layer of the text model attends otherwise than in full.
    """
    text = config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(text, "layer_types", None) or []) - {"full_attention"})
    window = getattr(text, "sliding_window", None)
    # Mistral has no kinds of layers: a window is every layer's. Qwen2 has, and names a window that no layer may use
    slides = "sliding_attention" in kinds or (window is not None and not getattr(text, "layer_types", None))
    if slides or (window is not None and text.model_type == "mistral"):
        raise ValueError(
            f"{text.model_type} with sliding-window attention (window {window}) is not supported: the window would "
            "hide kept context tokens; use a model, or a config.json, without it (sliding_window: null)"
        )
    if not kinds and getattr(text, "attention_chunk_size", None) is not None:
        kinds = ["chunked_attention"]
    if kinds:
        raise ValueError(
            f"{text.model_type} with layers of {', '.join(kinds)} is not supported: they do not see all that a packed "
            "cache keeps; use a model with full attention in every layer"
        )
