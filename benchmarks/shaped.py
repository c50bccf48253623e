"""The LLaMA-shaped random model of the speed programs."""

from transformers import LlamaConfig

WIDTH, HEADS, HEAD_DIM, MLP = 1024, 8, 128, 2816


def llama_config(layers: int, positions: int, vocabulary: int, times: int = 1) -> LlamaConfig:
    """D = 1024, 8 heads of 128, no grouped queries; ``times`` as wide: 4 is LLaMA-7B with 2 % more MLP."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=times * WIDTH,
        intermediate_size=times * MLP,
        num_hidden_layers=layers,
        num_attention_heads=times * HEADS,
        num_key_value_heads=times * HEADS,
        max_position_embeddings=positions,
    )
