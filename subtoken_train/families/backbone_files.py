"""A backbone's own files, looked at before transformers opens them: JSON is bounded, and no name leads out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subtoken_train.documents import check_file_name, read_json
from subtoken_train.errors import MAX_TOKENS, check_range
from subtoken_train.typed import shown

PEFT_FILE = "adapter_config.json"
_INDEX = "*.index.json"
_COUNTS = ("_size", "_layers", "_heads", "head_dim", "depth")
_MOST_LAYERS = 10_000


def check_local_files(folder: Path) -> None:
    """Raise a worded ``ValueError`` unless a folder's configurations are sound JSON and its shards lie in it.

    Weights are not opened. The tokenizer's large vocabulary is its own reader's to check.

    Raises:
        ValueError: broken, deep or doubled JSON; an index that names files elsewhere or none; peft's configuration,
            which transformers would follow to another model.
    """
    for path in sorted(folder.glob("*config.json")):
        if path.name == PEFT_FILE:
            raise ValueError(f"{folder} is a LoRA of peft ({PEFT_FILE}), not a backbone; name the model that it is for")
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path} is {shown(content)}; it must be a group of keys")
        _check_numbers(content, str(path))
        check_format(content)
    for path in sorted(folder.glob(_INDEX)):
        index = read_json(path)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{path} names no weights (weight_map)")
        for shard in set(map(str, shards.values())):
            check_file_name(shard, f"{path}: weight_map")
            if not (folder / shard).is_file():
                raise ValueError(f"{path} is incomplete: it names {shard[:120]}, which is not beside it")


def check_format(content: Mapping[str, Any]) -> None:
    """Raise a worded ``ValueError`` where a configuration is of the original LLaVA code, whose weights fit no class."""
    if "mm_vision_tower" in content:
        raise ValueError(
            f"it is of LLaVA's original code ({shown(content.get('model_type'))}, mm_vision_tower), not of "
            "transformers; take the same model in transformers' format (llava-hf/... on the Hub)"
        )


def _check_numbers(content: dict[str, Any], place: str) -> None:
    """No size is beyond what models have: libraries build as many layers as they are told."""
    for key, value in content.items():
        if isinstance(value, dict):
            _check_numbers(value, f"{place}: {key}")
        elif isinstance(value, int) and not isinstance(value, bool) and key.endswith(_COUNTS):
            check_range(f"{place}: {key}", value, 0, _MOST_LAYERS if key.endswith("layers") else MAX_TOKENS)
