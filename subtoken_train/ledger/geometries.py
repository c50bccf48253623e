"""Cache geometries of well-known models in bf16, so that budgets need neither weights nor a network."""

from __future__ import annotations

from subtoken_train.errors import check_word
from subtoken_train.ledger.kv_budget import KVShape

GEOMETRIES = {
    "llava-1.5-7b": KVShape(num_layers=32, num_kv_heads=32, head_dim=128),
    "llava-1.5-13b": KVShape(num_layers=40, num_kv_heads=40, head_dim=128),
    "llama-2-7b": KVShape(num_layers=32, num_kv_heads=32, head_dim=128),
    "qwen2.5-7b": KVShape(num_layers=28, num_kv_heads=4, head_dim=128),
    "qwen2.5-vl-3b": KVShape(num_layers=36, num_kv_heads=2, head_dim=128),
    "qwen2.5-vl-7b": KVShape(num_layers=28, num_kv_heads=4, head_dim=128),
}


def geometry(name: str) -> KVShape:
    """The cache geometry of a model by its short name.

    Raises:
        ValueError: the name is not in the table.
    """
    check_word("model", name, GEOMETRIES)
    return GEOMETRIES[name]
