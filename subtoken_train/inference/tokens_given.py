"""The tokens and masks that ``generate`` is given: read as transformers reads them, or refused in words.

Legend: B batch, N positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from subtoken_train.inference.generate_arguments import copies_asked, setting


def check_ids(ids: Any, vocabulary: int) -> Tensor:
    """The same ids, [B, N].

    Raises:
        ValueError: no tensor of whole numbers in rows, or an id outside of a vocabulary of that many tokens.
    """
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
            f"input_ids hold {low if low < 0 else high}, but the model knows tokens 0 to {vocabulary - 1}; use its own "
            "tokenizer"
        )
    return ids


def visible_tokens(
    ids_BN: Tensor, mask_BN: Tensor | None, settings: Mapping[str, Any], own: GenerationConfig
) -> Tensor:
    """Real tokens of prompts, bool [B, N]: what the mask says or, without one, what transformers infers.

    It takes padding tokens for padding, unless padding and end of text are one token (then it warns, and so every
    position is real).

    Raises:
        ValueError: a mask of another shape or with other values, or a prompt without a token.
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
        cached_ids_BN: the prompt of every row of the cache.
        cached: tokens that the cache has seen.
        settings: keyword arguments of ``generate``.
        own: the model's generation configuration.
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
    """The mask as bool."""
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask must be {list(shape)} as input_ids are, not {_kind(mask)}; pass the processor's whole "
            "output"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask holds other values than 0 (padding) and 1 (tokens)")
    return mask.bool()


def _ids(value: Any) -> list[int]:
    """Token ids that are given as none, one or several, in any form."""
    if value is None:
        return []
    return [int(each) for each in torch.as_tensor(value).flatten().tolist()]


def _kind(thing: Any) -> str:
    """A tensor's shape and dtype, or a type's name."""
    return (
        f"{list(thing.shape)} of {thing.dtype}".replace("torch.", "")
        if isinstance(thing, Tensor)
        else type(thing).__name__
    )
