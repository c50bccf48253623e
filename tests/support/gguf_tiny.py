"""GGUF files of a tiny Llama, written as llama.cpp's converter writes one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

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
            turned = weight.reshape(heads[module], 2, -1, weight.shape[1]).swapaxes(1, 2)
            weight = turned.reshape(weight.shape)
        name = f"blk.{layer}.{_NAMES[module]}.weight"
    else:
        name = "token_embd.weight" if "embed" in name else "output_norm.weight"
    stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
    data = gguf.quants.quantize(np.ascontiguousarray(weight), stored)
    writer.add_tensor(name, data, raw_dtype=stored)
