"""Configurations of published language models, as their ``config.json`` on the Hub says, for checks without network.

The numbers were checked against public copies of these files and against the parameter counts that the models are
published with (a test counts them).
"""

from __future__ import annotations

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config


def llama_config(vocabulary: int, width: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    """A published Llama 2, which LLaVA-1.5's language model is too."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )


def llama31_config() -> LlamaConfig:
    """Llama-3.1-8B: grouped heads, and slow rotary frequencies stretched for 131,072 positions."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=128000,
        eos_token_id=128001,
    )


def yi_config(vocabulary: int) -> LlamaConfig:
    """Nous-Hermes-2-Yi-34B, the language model of LLaVA-NeXT 34B."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=7168,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )


def qwen25_config() -> Qwen2Config:
    """Qwen2.5-7B; it names a window that no layer uses."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )


def qwen3_config(width: int, mlp: int, layers: int, heads: int) -> Qwen3Config:
    """A published Qwen3 of 8B or 14B: eight key-value heads of width 128, queries and keys normed head by head."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    )


def mistral_config(vocabulary: int = 32000, window: int | None = 4096, theta: float = 1e4) -> MistralConfig:
    """Mistral-7B-v0.1; without a window, at a base of 1e6, the Instruct-v0.2 of a LLaVA-NeXT."""
    return MistralConfig(
        vocab_size=vocabulary,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        sliding_window=window,
    )
