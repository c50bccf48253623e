"""The arguments of ``generate``: each is read as transformers reads it, or refused in words.

Settings come as keyword arguments, in ``generation_config=`` or in the model's own generation configuration, in this
order of precedence, as in transformers.

Legend: B batch, N positions.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from subtoken_train.inference.prompt_inputs import IMAGE_INPUTS

INPUTS = frozenset({"input_ids", "attention_mask", *IMAGE_INPUTS})
"""Inputs that processors return."""
_LOOP = (
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
)
_COUNTS = {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences"}
_LENGTH = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time", "stop_strings")
_CHOICE = ("do_sample", "num_beams", "num_return_sequences", "temperature", "top_k", "top_p", "min_p", "top_h")
_CUTS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
_PENALTIES = ("repetition_penalty", "encoder_repetition_penalty", "length_penalty", "exponential_decay_length_penalty")
_REPEATS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "sequence_bias", "watermarking_config")
_SCORES = ("renormalize_logits", "remove_invalid_values", "output_scores", "output_logits", "return_dict_in_generate")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id")
SERVED = frozenset({*_LOOP, *_LENGTH, *_CHOICE, *_CUTS, *_PENALTIES, *_REPEATS, *_SCORES, *_TOKENS, "disable_compile"})
"""Settings that act on the logits, on the loop or on what is returned: transformers' own code runs them."""

_ASSISTED = "assisted decoding asks for the logits of several new tokens at once"
_GUIDED = "guidance runs a second prompt beside the first"
_REMOTE = "transformers runs it with code from the Hub"
_OWN_CACHE = "the cache is SubTokenModel's own"
_POSITIONS = "positions are those of the prompt's own tokens"
_ENCODER = "it is for encoder-decoder models"
_COMPILED = "steps have other shapes after every prompt; FixedStep (inference.fixed_step) compiles those of one cache"
_FORWARD = "it is an argument of the model's forward, which this wrapper calls itself"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": ((True,), "decoding is on the cache"),
    "output_attentions": ((False,), "no attention matrix is made"),
    "output_hidden_states": ((False,), "no list of hidden states is made"),
    "cache_implementation": (("hybrid",), _OWN_CACHE),  # which transformers leaves out itself
    "prefill_chunk_size": ((), "reducer, routers and eviction read whole prompts"),
    "token_healing": ((False,), "it rewrites prompts"),
    "guidance_scale": ((1,), _GUIDED),
    "prompt_lookup_num_tokens": ((), _ASSISTED),
    "assistant_early_exit": ((), _ASSISTED),
    "use_mtp": ((False,), _ASSISTED),
    "is_assistant": ((False,), _ASSISTED),
    "speculation_type": ((), _ASSISTED),
    "penalty_alpha": ((0,), _REMOTE),
    "dola_layers": ((), _REMOTE),
    "constraints": ((), _REMOTE),
    "force_words_ids": ((), _REMOTE),
    "num_beam_groups": ((1,), _REMOTE),
}
"""Settings that change how the model is called, wherever they stand: values without effect, and why not."""
REFUSED_IF_GIVEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "diversity_penalty": ((0,), _REMOTE),
    "low_memory": ((False,), _REMOTE),
    "custom_generate": ((), _REMOTE),
    "trust_remote_code": ((False,), _REMOTE),
    "cache_config": ((), _OWN_CACHE),
    "max_cache_len": ((), _OWN_CACHE),
    "compile_config": ((), _COMPILED),
    "continuous_batching_config": ((), "batches are decoded as they are given"),
    "synced_gpus": ((False,), "the model is on one device"),
    "negative_prompt_ids": ((), _GUIDED),
    "negative_prompt_attention_mask": ((), _GUIDED),
    "assistant_model": ((), _ASSISTED),
    "assistant_tokenizer": ((), _ASSISTED),
    "assistant_ensemble_weight": ((), _ASSISTED),
    "assistant_confidence_threshold": ((0.4,), _ASSISTED),
    "assistant_lookbehind": ((10,), _ASSISTED),
    "target_lookbehind": ((10,), _ASSISTED),
    "num_assistant_tokens": ((20,), _ASSISTED),
    "num_assistant_tokens_schedule": (("constant",), _ASSISTED),
    "max_matching_ngram_size": ((), _ASSISTED),
    "decoder_start_token_id": ((), _ENCODER),
    "decoder_input_ids": ((), _ENCODER),
    "encoder_outputs": ((), _ENCODER),
    "position_ids": ((), _POSITIONS),
    "cache_position": ((), _POSITIONS),
    "inputs": ((), "prompts are given as input_ids"),
    "inputs_embeds": ((), "the regions of a prompt are read from its input_ids"),
    "token_type_ids": ((), "no backbone here reads it"),
    "labels": ((), _FORWARD),
    "logits_to_keep": ((), _FORWARD),
    "mm_encoder_outputs": ((), _FORWARD),
    "vision_feature_layer": ((), _FORWARD),
    "vision_feature_select_strategy": ((), _FORWARD),
}
"""Settings refused only when passed: a model's own configuration may hold them, as its authors' defaults."""


def drop_silent(settings: dict[str, Any]) -> None:
    """Take ``token_type_ids`` away where they are all 0: a tokenizer writes them for models that read them."""
    kinds = settings.get("token_type_ids")
    if isinstance(kinds, Tensor) and not bool(kinds.any()):
        del settings["token_type_ids"]


def check_settings(settings: Mapping[str, Any], own: GenerationConfig) -> None:
    """Raise a worded ``ValueError`` for arguments that a packed cache has no answer to, or that do not exist."""
    given = settings.get("generation_config")
    if given is not None and not isinstance(given, GenerationConfig):
        raise ValueError(f"generation_config must be a transformers GenerationConfig, not {type(given).__name__}")
    asked = {name: value for name, value in settings.items() if value is not None or name == "use_cache"}
    if given is not None:
        further = {name: value for name, value in vars(given).items() if value is not None and name[0] != "_"}
        # a copy of the model's configuration may hold what its authors wrote
        further = {name: value for name, value in further.items() if not _same(value, getattr(own, name, None))}
        asked = {**further, **asked}
    for name in _COUNTS & asked.keys():
        if not isinstance(asked[name], Integral):
            raise ValueError(f"{name}={asked[name]!r} must be a whole number")
    for name, value in asked.items():
        neutral, why = REFUSED.get(name) or REFUSED_IF_GIVEN.get(name) or ((value,), "")
        if name not in INPUTS and name != "transformers_version" and not any(_same(value, each) for each in neutral):
            raise _refusal(name, value, why)
        if not why and name not in INPUTS | SERVED | {"transformers_version"}:
            nearest = difflib.get_close_matches(name, sorted(INPUTS | SERVED), n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(
                f"generate has no argument {name!r}.{hint} It takes what the processor returns, and the settings of "
                "transformers' generate"
            )
    for name, (neutral, why) in REFUSED.items():
        value = getattr(own, name, None)
        if name not in asked and value is not None and not any(_same(value, each) for each in neutral):
            raise _refusal(f"model.generation_config.{name}", value, why)


def steered_from_outside(own: GenerationConfig) -> GenerationConfig:
    """Return a copy of a model's configuration without what ends, copies or searches answers on its own account.

    What chooses their tokens stays, as do the ids of special ones.
    """
    made = copy.deepcopy(own)
    for name, (neutral, _) in REFUSED.items():
        if getattr(made, name, None) is not None:
            setattr(made, name, next(iter(neutral), None))
    made.max_time = made.stop_strings = made.return_dict_in_generate = None
    made.num_beams = made.num_return_sequences = 1
    return made


def setting(name: str, settings: Mapping[str, Any], own: GenerationConfig) -> Any:
    """The value of a setting that transformers will use; None where none is set."""
    if name in settings:
        return settings[name]
    given = getattr(settings.get("generation_config"), name, None)
    return getattr(own, name, None) if given is None else given


def copies_asked(settings: Mapping[str, Any], own: GenerationConfig) -> tuple[int, int]:
    """(beams, rows that transformers makes of each prompt)."""
    counts = [1 if (n := setting(name, settings, own)) is None else n for name in ("num_beams", "num_return_sequences")]
    if any(type(count) is not int or count < 1 for count in counts):
        raise ValueError(f"num_beams and num_return_sequences must be whole numbers of at least 1, not {counts}")
    return counts[0], max(counts)


def tokens_appended(settings: Mapping[str, Any], own: GenerationConfig, given: int, held: int) -> int | None:
    """Tokens that are appended to a cache at most; None where the settings do not say. An answer's last one is not.

    Args:
        held: of them, those that are in the cache when tokens are appended.
    """
    new, whole = (setting(name, settings, own) for name in ("max_new_tokens", "max_length"))
    if new is None and whole is None:
        return None
    last = int(whole if new is None else given + new)
    return max(0, last - held - 1)


def _refusal(name: str, value: Any, why: str) -> ValueError:
    shown = f"={value!r}" if isinstance(value, bool | int | float | str) or value is None else ""
    return ValueError(f"{name}{shown[:60]} does not go with a compressed cache: {why}; leave it out")


def _same(value: Any, other: Any) -> bool:
    return type(value) is not Tensor and type(other) is not Tensor and bool(value == other)


def check_ids(ids: Any, vocabulary: int) -> Tensor:
    """Return token ids, [B, N], once they are checked."""
    if not isinstance(ids, Tensor) or ids.numel() == 0:
        raise ValueError("generate needs input_ids with at least one token; pass the processor's whole output")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be whole numbers [batch, tokens], int64 or int32, not {_kind(ids)}; a processor makes "
            'them with return_tensors="pt"'
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"input_ids hold {low if low < 0 else high}, but the model's tokens are 0 to {vocabulary - 1}; use its own "
            "tokenizer"
        )
    return ids


def visible_tokens(
    ids_BN: Tensor, mask_BN: Tensor | None, settings: Mapping[str, Any], own: GenerationConfig
) -> Tensor:
    """Real tokens of prompts, bool [B, N]: what the mask says or, without one, what transformers infers.

    It takes padding tokens for padding, unless padding and end of text are one token (then it warns, and so every
    position is real).
    """
    if mask_BN is None:
        pad, end = (_ids(setting(name, settings, own)) for name in ("pad_token_id", "eos_token_id"))
        pad = pad or end[:1]
        visible = torch.ones_like(ids_BN, dtype=torch.bool)
        if pad and pad[0] not in end:
            visible = ids_BN != pad[0]
    else:
        visible = _read_mask(mask_BN, tuple(ids_BN.shape)).to(ids_BN.device)
    empty = (~visible.any(-1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"prompt {empty[0]} is all padding; every row of input_ids needs at least one token")
    return visible


def check_turn(
    ids_BN: Tensor, mask: Any, cached_ids_BN: Tensor, cached: int, settings: Mapping[str, Any], own: GenerationConfig
) -> None:
    """Raise a worded ``ValueError`` unless ``ids`` go on from a filled cache.

    Args:
        ids_BN: all tokens, or the new ones alone with a mask over all.
        mask: of all tokens; None: all are real, or padding tokens are padding.
    """
    rows, prompt = cached_ids_BN.shape
    if copies_asked(settings, own)[1] > 1:
        raise ValueError(
            "num_beams and num_return_sequences make copies of prompts; with past_key_values the prompts are in the "
            "cache: leave both out, or start again without past_key_values"
        )
    if len(ids_BN) != rows:
        raise ValueError(
            f"past_key_values holds {rows} rows and input_ids {len(ids_BN)}; give as many, or choose rows of the cache "
            "with batch_select_indices"
        )
    alone = mask is not None and isinstance(mask, Tensor) and mask.shape[-1:] != ids_BN.shape[-1:]
    total = cached + ids_BN.shape[1] if alone else ids_BN.shape[1]
    if mask is not None:
        _read_mask(mask, (rows, total))
    if total <= cached:
        raise ValueError(
            f"past_key_values has seen {cached} tokens and input_ids end after {total}; give everything so far and at "
            "least one new token"
        )
    if not alone and not torch.equal(ids_BN[:, :prompt].to(cached_ids_BN.device).long(), cached_ids_BN.long()):
        raise ValueError(
            "input_ids do not begin with the prompt that past_key_values holds; give everything so far, or start again "
            "without past_key_values"
        )


def _read_mask(mask: Any, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask must be {list(shape)} as input_ids are, not {_kind(mask)}; pass the processor's whole "
            "output"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask holds other values than 0 (padding) and 1 (tokens)")
    return mask.bool()


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(each) for each in torch.as_tensor(value).flatten().tolist()]


def _kind(thing: Any) -> str:
    return (
        f"{list(thing.shape)} of {thing.dtype}".replace("torch.", "")
        if isinstance(thing, Tensor)
        else type(thing).__name__
    )
