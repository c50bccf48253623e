"""A backbone's own files, looked at before transformers opens them: JSON is bounded, and no name leads out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from subtoken_train.documents import check_file_name, read_json
from subtoken_train.errors import MAX_TOKENS, SubTokenWarning, check_range
from subtoken_train.typed import checked, shown

PEFT_FILE = "adapter_config.json"
_INDEX = "*.index.json"
_COUNTS = ("_size", "_layers", "_heads", "head_dim", "depth")
_MOST_LAYERS = 10_000
_MOST_SIDE = 2**14
MAX_PIXELS = 2**28
GENERATION = "generation_config.json"
_WHOLE = (
    "max_length max_new_tokens min_length min_new_tokens top_k num_beams num_beam_groups num_return_sequences "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size prompt_lookup_num_tokens"
)
_NUMBERS = (
    "temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty "
    "length_penalty diversity_penalty max_time guidance_scale"
)
_FLAGS = (
    "do_sample use_cache output_attentions output_hidden_states output_scores output_logits return_dict_in_generate "
    "renormalize_logits remove_invalid_values"
)
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_KINDS: dict[str, dict[str, Any]] = {
    GENERATION: {
        **dict.fromkeys(_WHOLE.split(), int),
        **dict.fromkeys(_NUMBERS.split(), float),
        **dict.fromkeys(_FLAGS.split(), bool),
    },
    "tokenizer_config.json": {
        **dict.fromkeys(_TOKENS, str | dict),
        "model_max_length": float,
        "padding_side": Literal["left", "right"],
        "truncation_side": Literal["left", "right"],
        "chat_template": str | list[dict[str, str]],
        "clean_up_tokenization_spaces": bool,
    },
}
"""Types of settings by file; null is none of them. Others are their readers' to check."""
_RANGES = {"resample": (int, 0, 5), "num_additional_image_tokens": (int, 0, 16), "rescale_factor": (float, 0, 1e6)}
_CHANNELS = {"image_mean": 0.0, "image_std": 1e-6}
"""Least values."""
_SIDES = ("size", "crop_size")


def check_local_files(folder: Path) -> None:
    """Raise a worded ``ValueError`` unless a folder's configurations are sound JSON and its shards lie in it.

    Weights are not opened. The tokenizer's large vocabulary is its own reader's to check. Warns of answers without end.

    Raises:
        ValueError: broken, deep or doubled JSON; an index that names files elsewhere or none; peft's configuration,
            which transformers would follow to another model.
    """
    configs: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*config.json")):
        if path.name == PEFT_FILE:
            raise ValueError(f"{folder} is a LoRA of peft ({PEFT_FILE}), not a backbone; name the model that it is for")
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path} is {shown(content)}; it must be a group of keys")
        _check_numbers(content, str(path))
        check_format(content)
        _check_settings(content, path)
        configs[path.name] = content
        if path.name.endswith("processor_config.json"):
            _check_pictures(content, str(path))
    if "config.json" in configs and GENERATION in configs:
        _warn_of_no_end(configs["config.json"], configs[GENERATION], folder / GENERATION)
    for path in sorted(folder.glob(_INDEX)):
        index = read_json(path)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{path} names no weights (weight_map)")
        for shard in set(map(str, shards.values())):
            check_file_name(shard, f"{path}: weight_map")
            if not (folder / shard).is_file():
                raise ValueError(f"{path} is incomplete: it names {shard[:120]}, which is not beside it")


def _check_settings(content: dict[str, Any], path: Path) -> None:
    """Check that settings of generation and of the tokenizer have the types that their readers take for granted.

    An id beyond the vocabulary is taken: random models made from a class's defaults have such ones, and transformers
    runs them. ``_warn_of_no_end`` says what that means.
    """
    kinds = _KINDS.get(path.name, {})
    for key, value in content.items():
        if value is None:
            continue
        if key in kinds:
            checked(kinds[key], value, f"{path}: {key}")
        elif path.name == GENERATION and key.endswith("_token_id"):
            ids = value if isinstance(value, list) else [value]
            for one in ids:
                check_range(f"{path}: {key}", checked(int, one, f"{path}: {key}"), -1, MAX_TOKENS)


def _warn_of_no_end(config: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> None:
    """Warn where a model has an end token and the file that generation reads leaves none that it can say."""
    inner = config.get("text_config")
    both = [each for each in (config, inner) if isinstance(each, dict)]
    size = max([each["vocab_size"] for each in both if type(each.get("vocab_size")) is int], default=MAX_TOKENS)
    given = generation.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(0 <= one < size for one in ids) or (not ids and all(each.get("eos_token_id") is None for each in both)):
        return
    words = (
        f"eos_token_id is {shown(given)}, and the vocabulary has {size:,} tokens" if ids else "it has no eos_token_id"
    )
    warnings.warn(
        f"{path}: {words}, so no token ends an answer, which goes on to max_new_tokens; set eos_token_id there",
        SubTokenWarning,
        stacklevel=1,  # one place, whoever loads
    )


def _check_pictures(content: dict[str, Any], place: str) -> None:
    """What pictures are made to is no size that nothing holds, and channels are numbers."""
    for key, value in content.items():
        name = f"{place}: {key}"
        if isinstance(value, dict) and key not in _SIDES:
            _check_pictures(value, name)
        elif value is None:
            continue
        elif key.startswith("do_"):
            checked(bool, value, name)
        elif key in _RANGES:
            kind, least, most = _RANGES[key]
            check_range(name, checked(kind, value, name), least, most)
        elif key in _CHANNELS:
            numbers = checked(list[float], value, name)
            if len(numbers) not in (1, 3):
                raise ValueError(f"{name} has {len(numbers)} numbers; it must have one for each of 3 channels")
            for one in numbers:
                check_range(name, one, _CHANNELS[key], 1e6)
        elif key in _SIDES:
            _check_sides(value, name)


def _check_sides(value: Any, place: str) -> None:
    """Sides in pixels; where there are a shortest and a longest edge, some families mean pixels in all."""
    sides = value if isinstance(value, dict) else {"": value}
    in_all = {"shortest_edge", "longest_edge"} <= sides.keys()
    if all(side is None for side in sides.values()) or (sides.get("height") is None) != (sides.get("width") is None):
        raise ValueError(f"{place} is {shown(value)}; it must say height and width, or an edge")
    for key, side in sides.items():
        if side is not None:
            name = f"{place}.{key}" if key else place
            check_range(name, checked(int, side, name), 1, MAX_PIXELS if in_all else _MOST_SIDE)


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
