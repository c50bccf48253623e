"""Random tiny language models of the real classes, and batches of contexts and queries."""

import torch
import transformers

from checkpoints.tiny_llava import build_processor
from subtoken_train.families.decoder import FUSED
from subtoken_train.families.text import TextFamily
from subtoken_train.types import Batch, Region
from tests.support.tiny_parts import assembled

KINDS = {
    "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "qwen3": "Qwen3", "gemma3": "Gemma3", "llama31": "Llama",
    "mistral_window": "Mistral", "qwen2_window": "Qwen2", "phi3": "Phi3", "olmo3": "Olmo3", "glm4": "Glm4",
    "granite": "Granite", "smollm3": "SmolLM3", "ministral3": "Ministral3", "qwen3_moe": "Qwen3Moe",
    "cohere": "Cohere", "cohere2": "Cohere2", "exaone4": "Exaone4",
}  # fmt: skip
"""Names of transformers' classes, without what they all end in."""
WINDOWED = ("mistral_window", "qwen2_window", "gemma3", "olmo3", "ministral3", "cohere2", "exaone4")
OTHERS = ("phi3", "glm4", "granite", "smollm3", "qwen3_moe", "cohere")
DECODERS = (*OTHERS, "gemma3", "olmo3", "ministral3", "cohere2", "exaone4")  # those that the registry does not name
NAMED = tuple(kind for kind in KINDS if kind not in DECODERS)
WINDOW = 20


def _rope(kind: str, theta: float = 10000.0, **more: float) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": theta, **more}


SCALED = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
"""Llama 3.1's rotary frequencies, with a model's as wide as these: some are kept, some are scaled, some in between."""
KINDS_OF_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
BASES = {"sliding_attention": _rope("default", 100.0), "full_attention": _rope("linear", factor=4.0)}
STRETCHED = _rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1)
"""Ministral 3's, whose queries grow with every 16 positions."""
SLIDING = {"sliding_window": WINDOW, "layer_types": KINDS_OF_LAYERS}
HALF_TURNED = _rope("default", partial_rotary_factor=0.5)
OWN = {
    "qwen3": {"hidden_size": 48}, "llama31": {"rope_parameters": SCALED}, "mistral_window": {"sliding_window": WINDOW},
    "qwen2_window": {**SLIDING, "use_sliding_window": True},
    "gemma3": {**SLIDING, "query_pre_attn_scalar": 24, "rope_parameters": BASES},
    "phi3": {"rope_parameters": HALF_TURNED, "pad_token_id": 0}, "olmo3": {**SLIDING, "rope_parameters": BASES},
    "glm4": {"rope_parameters": HALF_TURNED, "pad_token_id": 0},
    "granite": {
        "attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 4.0, "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "ministral3": {"sliding_window": WINDOW, "rope_parameters": STRETCHED},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5}, "cohere2": {**SLIDING, "logit_scale": 0.5},
    "exaone4": {**SLIDING, "pad_token_id": 0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip
"""Qwen3's heads are together wider than the model. Windows are shorter than prompts."""
BY_LAYER = ("layer_types", "no_rope_layers")


def text_model(kind: str, layers: int = 3, **settings: object) -> transformers.PreTrainedModel:
    """Four query heads on two key-value heads of width 16."""
    config_class = getattr(transformers, KINDS[kind] + ("TextConfig" if kind == "gemma3" else "Config"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "vocab_size": 90}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    own = {name: value[:layers] if name in BY_LAYER else value for name, value in OWN.get(kind, {}).items()}
    config = config_class(**{**sizes, **heads, "sliding_window": None, **own, **settings})
    return getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).eval()


def text_family(kind: str = "llama", layers: int = 3, seed: int = 0, **settings: object) -> TextFamily:
    """A ``text_model`` whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = text_model(kind, layers, **settings)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")):
                if norm is not None:
                    norm.weight.uniform_(0.5, 2)
            sharpen(layer.self_attn, 8)
    return TextFamily(model, build_processor().tokenizer)


def sharpen(attention: torch.nn.Module, factor: float) -> None:
    if hasattr(attention, FUSED):
        attention.qkv_proj.weight[:-32].mul_(factor)
        return
    attention.q_proj.weight.mul_(factor)
    attention.k_proj.weight.mul_(factor)


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
