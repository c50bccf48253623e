"""Tiny language models of every kind, and GGUF files of one as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoints.tiny_llava import build_processor
from subtoken_train.families.text import TextFamily
from subtoken_train.types import Batch, Region
from tests.support.helpers import sharpen
from tests.support.tiny import assembled

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
BASES = {"sliding_attention": _rope("default", 100.0), "full_attention": _rope("linear", factor=4.0)}
STRETCHED = _rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1)
"""Ministral 3's, whose queries grow with every 16 positions."""
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
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
    return sharpen(TextFamily(model, build_processor().tokenizer), 8)


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


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    architecture: str = "llama",
    kind: str = "F32",
    **metadata: Any,
) -> Path:
    """Write a model with its tokenizer; matrices in the format ``kind``, whose rounding then is the file's own."""
    gguf = pytest.importorskip("gguf", reason="pip install 'subtoken_train[gguf]'")
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    for key, value in metadata.items():
        name = key.replace("__", ".")
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    _add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            _add_tensor(writer, gguf, name, tensor.numpy(), config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["content"] for token in whole["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in whole["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)


def _add_tensor(writer: Any, gguf: Any, name: str, weight: np.ndarray, config: Any, kind: str) -> None:
    parts = name.split(".")
    if parts[1] == "layers":
        layer, module = parts[2], ".".join(parts[3:-1])
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        if module in heads:  # llama.cpp turns neighbouring channels, transformers halves of a head
            weight = weight.reshape(heads[module], 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        name = f"blk.{layer}.{_NAMES[module]}.weight"
    else:
        name = "token_embd.weight" if "embed" in name else "output_norm.weight"
    stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weight), stored), raw_dtype=stored)
