"""Random tiny language models of the real classes, and batches of contexts and queries."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpoints.tiny_llava import build_processor
from subtoken_train.families.text import TextFamily
from subtoken_train.types import Batch, Region
from tests.support.tiny_parts import assembled

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama31": (LlamaConfig, LlamaForCausalLM),
    "mistral_window": (MistralConfig, MistralForCausalLM),
    "qwen2_window": (Qwen2Config, Qwen2ForCausalLM),
}
WINDOWED = ("mistral_window", "qwen2_window")
WINDOW = 20
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Llama 3.1's rotary frequencies, with a model's as wide as these: some are kept, some are scaled, some in between."""
KINDS_OF_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
OWN = {
    "qwen3": {"hidden_size": 48},
    "llama31": {"rope_parameters": SCALED},
    "mistral_window": {"sliding_window": WINDOW},
    "qwen2_window": {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": KINDS_OF_LAYERS},
}
"""Qwen3's heads are together wider than the model. Windows are shorter than prompts."""


def text_family(kind: str = "llama", layers: int = 3, seed: int = 0, **settings: object) -> TextFamily:
    """Four query heads on two key-value heads of width 16; attention far from uniform."""
    torch.manual_seed(seed)
    config_class, model_class = KINDS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "vocab_size": 90}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    own = OWN.get(kind, {})
    if kind == "qwen2_window":
        own = {**own, "layer_types": KINDS_OF_LAYERS[:layers]}
    model = model_class(config_class(**{**sizes, **heads, "sliding_window": None, **own, **settings})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            if kind == "qwen3":
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                    norm.weight.uniform_(0.5, 2)
            layer.self_attn.q_proj.weight.mul_(8)
            layer.self_attn.k_proj.weight.mul_(8)
    return TextFamily(model, build_processor().tokenizer)


def text_batch(samples: list[tuple[int, int, int]], pad_left: bool = False, seed: int = 0) -> Batch:
    """Per sample (context tokens, query tokens, answer tokens); the first token is SYSTEM."""
    generator = torch.Generator().manual_seed(seed)
    rows, codes = [], []
    for context, query, answer in samples:
        parts = [Region.SYSTEM] + [Region.CONTEXT] * context + [Region.QUERY] * query + [Region.ANSWER] * answer
        codes.append(torch.tensor(parts))
        rows.append(torch.randint(10, 60, (len(parts),), generator=generator))
    ranks = [len(row) - 1 - answer for row, (_, _, answer) in zip(rows, samples, strict=True)]
    return assembled(rows, codes, ranks, pad_left, [0] * len(rows), name="text")
