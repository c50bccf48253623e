"""The LLaMA-shaped random model of the speed programs."""

from __future__ import annotations

from transformers import LlamaConfig

WIDTH, HEADS, HEAD_DIM, MLP = 1024, 8, 128, 2816


def llama_config(layers: int, positions: int, vocabulary: int) -> LlamaConfig:
    """D = 1024, 8 heads of 128, no grouped queries."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=positions,
    )
