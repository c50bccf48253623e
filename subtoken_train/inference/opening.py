"""How prompts come into a packed cache: whole (``query_aware``), or their context first, before the question is seen.

``context_first`` is the protocol under which KVCompose reports: reducer, routers and eviction see a prompt's context
alone, and the rest of the prompt is appended as it is, at the positions that it has in the whole prompt. The context of
a model that sees images is everything up to and including the last visual token; of a language model, everything up to
the end of the CONTEXT region. No token is read from the context's last row, so it can be dropped like any other.

Legend: B batch, N positions of the prompts, M of their contexts, q of what follows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.finite_states import check_logits
from subtoken_train.errors import check_word
from subtoken_train.functional.gather import kept_index, take_rows
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import Prefill, append, next_logits, prefill
from subtoken_train.reducers.context import ContextReducer
from subtoken_train.types import Batch, Protocol, Region, in_compressed_region


def reader_of_question(backbone: CompressedBackbone, compression: Compression) -> str | None:
    """What of all that compresses reads the question, in words; None: nothing does."""
    bank, reducer = backbone.bank, backbone.reducer
    if isinstance(reducer, ContextReducer) and reducer.acts and reducer.reads_question:
        return f"reducer {reducer.name!r} chooses pages by the question"
    if bank is not None and backbone.active_routing is not None and bank.reads_query:
        return "the routers are conditioned on the question"
    if compression.eviction is not None and compression.eviction.needs_image:
        return f"eviction {compression.eviction.name!r} reads the attention from the question to the image"
    if compression.eviction is not None and compression.eviction.reads_question:
        return f"eviction {compression.eviction.name!r} is set to score by the question"
    return None


def check_context_first(backbone: CompressedBackbone, compression: Compression) -> None:
    """Raise a worded ``ValueError`` where something that compresses reads the question."""
    if (reads := reader_of_question(backbone, compression)) is not None:
        raise ValueError(f"context_first compresses before the question is seen, but {reads}; use query_aware")


def open_prompts(
    backbone: CompressedBackbone, prompts: Batch, cache: PackedCache, compression: Compression, protocol: Protocol
) -> Prefill:
    """Fill ``cache`` with a batch of prompts.

    Args:
        backbone: in evaluation mode.
        prompts: a batch without answers, padded on either side.
        cache: an empty one.
        compression: eviction and precision.
        protocol: ``query_aware`` or ``context_first``. Under the latter a prompt without context is not compressed:
            its first token is run alone, and all others follow in full.

    Raises:
        ValueError: as ``prefill``; or, under ``context_first``, a method that reads the question, or a prompt that ends
            with its context.
    """
    check_word("protocol", protocol, get_args(Protocol))
    if protocol == "query_aware":
        return prefill(backbone, prompts, cache, compression)
    check_context_first(backbone, compression)
    compression.check(backbone.family)
    compression.check_prompts(prompts)
    visible_BN = prompts.regions_BN != Region.PADDING
    context_BN = context_part(prompts.regions_BN)
    rest_BN = visible_BN & ~context_BN
    for name, ends in zip(prompts.record_ids, (~rest_BN.any(-1)).tolist(), strict=True):
        if ends:
            raise ValueError(f"context_first: nothing follows the context of {name!r}; a prompt must ask after it")
    first = prefill(backbone, _taken(prompts, context_BN), cache, compression)
    index_Bq, valid_Bq = kept_index(rest_BN, pad_left=True)
    ids_Bq = take_rows(prompts.input_ids_BN, index_Bq)
    return replace(first, logits_BV=append_rest(backbone, ids_Bq, ~valid_Bq, cache, compression.prefill_chunk))


def append_rest(
    backbone: CompressedBackbone, ids_Bq: Tensor, padding_Bq: Tensor, cache: PackedCache, chunk: int | None
) -> Tensor:
    """Append what follows the contexts of a cache, in full; logits of the next token, [B, V].

    Args:
        backbone: in evaluation mode.
        ids_Bq: text, padded on the left.
        padding_Bq: which of it is padding, bool.
        cache: with the contexts, and nothing after them.
        chunk: tokens that run at a time; None: all.

    Raises:
        ValueError: the model gives NaN or infinity.
    """
    padding_B, length = padding_Bq.sum(-1), ids_Bq.shape[1]
    for layer in cache.layers:  # before it is appended, so that nothing is evicted between its chunks
        if layer.record is not None:
            layer.record.given = length
    size = chunk or length
    assert cache.next_position is not None
    with backbone.family.as_long_as(cache.next_position - padding_B[:, None] + length):
        hidden = append(backbone, ids_Bq[:, :size], cache, padding_B if bool(padding_B.any()) else None)
        for start in range(size, length, size):
            hidden = append(backbone, ids_Bq[:, start : start + size], cache)
    logits_BV = next_logits(backbone, hidden)
    check_logits(logits_BV, [f"what follows context {b}" for b in range(len(logits_BV))])
    return logits_BV


def contexts_of(prompts: Batch) -> Batch:
    """The contexts of prompts alone, padded on the left, as ``context_first`` compresses them."""
    return _taken(prompts, context_part(prompts.regions_BN))


def context_part(regions_BN: Tensor) -> Tensor:
    """A prompt's tokens up to the last VISUAL or CONTEXT one, bool [B, N]; its first token where there is none."""
    visible_BN = regions_BN != Region.PADDING
    compressed_BN = in_compressed_region(regions_BN)
    upto_BN = compressed_BN.flip(-1).cumsum(-1).flip(-1) > 0
    first_BN = visible_BN & (visible_BN.cumsum(-1) == 1)
    return visible_BN & (upto_BN | first_BN)


def _taken(prompts: Batch, part_BN: Tensor) -> Batch:
    """The marked tokens as a batch, padded on the left; the last of them ranks where the prompts have a ranking token.

    All image tokens must be among them.
    """
    index_BM, valid_BM = kept_index(part_BN, pad_left=True)
    # an id that is no image token, whatever stands at the index that padding points to
    ids_BM = take_rows(prompts.input_ids_BN, index_BM)
    pad_B1 = take_rows(prompts.input_ids_BN, (prompts.regions_BN != Region.VISUAL).int().argmax(-1, keepdim=True))
    return replace(
        prompts,
        input_ids_BN=torch.where(valid_BM, ids_BM, pad_B1),
        labels_BN=torch.full_like(ids_BM, IGNORE_INDEX),
        regions_BN=take_rows(prompts.regions_BN, index_BM).masked_fill(~valid_BM, Region.PADDING),
        rank_position_B=torch.where(prompts.rank_position_B < 0, -1, index_BM.shape[1] - 1),
        followed=True,
    )
