"""``generate`` of transformers on a packed cache: its loop, sampling, beams and streamers, with our two passes.

transformers calls the model's ``forward`` once with the prompt and then with new tokens. While ``compressed`` is
active that call is ours: the first one runs reducer, routers and eviction and fills the cache, later ones only decode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import broken_rows
from subtoken_train.errors import no_numbers
from subtoken_train.families.decoder import CACHE
from subtoken_train.families.family import Family
from subtoken_train.forks import undoing
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import Prefill, append_rest, decode, prefill
from subtoken_train.types import Batch

ASKED = 32
"""Decoded tokens between two looks at a GPU for NaN among their logits."""
_serving: dict[int, object] = {}
"""Models that a call runs on, by identity, and the call: their ``forward`` is swapped meanwhile."""


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Let one call at a time use a model."""
    call = object()
    if _serving.setdefault(id(model), call) is not call:  # in one step, whatever other threads do
        raise ValueError(
            "this model is already generating, and runs one call at a time: wait for the other, or load it twice"
        )
    with undoing(partial(_serving.pop, id(model))):
        yield


@contextmanager
def serving(family: Family) -> Iterator[None]:
    """One call on a model, whose language model reads packed storage inside the block and is as it was after it."""
    with exclusive(family.model), reading_packed(family.decoder.config):
        yield


@contextmanager
def compressed(
    backbone: CompressedBackbone,
    compression: Compression,
    prompts: Batch | None,
    cache: PackedCache,
    filled: Callable[[Prefill], None] | None,
    room: int | None = None,
) -> Iterator[None]:
    """Let ``backbone.model.generate`` run on packed caches inside the block.

    A prompt is run once, however many beams or sequences transformers makes of it.

    Args:
        prompts: what the first call's input ids stand for; None where the cache holds a context that is asked.
        cache: empty, or with an earlier call's prompts, or a branch of a context.
        filled: called when the prompts are in the cache; None where they are a context.
        room: tokens that will be appended at most, for which room is made once; None: not known.
    """
    model, watch = backbone.model, _LogitWatch()
    asks = filled is None  # a context, and what the first call appends to it is the question, as ``ask`` does
    if cache.holds_prompt and room is not None:
        cache.reserve(room)

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **further: Any) -> CausalLMOutputWithPast:
        if further.get(CACHE) is not cache:
            raise ValueError(
                "the model was called with another cache while it generated; a logits processor or criterion that runs "
                "the model itself does not go with a compressed cache"
            )
        nonlocal asks
        if cache.holds_prompt and not asks:
            _check_append(backbone, input_ids, attention_mask, cache.prompt_length)
        if asks:
            _check_text(backbone, input_ids[:, 1:])
            asks, padding = False, torch.zeros_like(input_ids, dtype=torch.bool)
            if attention_mask is not None:  # transformers leaves out one that is all ones
                padding = attention_mask[:, cache.prompt_length :] == 0
            logits = append_rest(backbone, input_ids, padding, cache, compression.prefill_chunk)
        elif cache.holds_prompt:
            logits = watch.looked_at(decode(backbone, input_ids, cache), at_once=cache.evictor is not None)
        else:
            assert prompts is not None
            assert filled is not None
            assert input_ids.shape[1] == prompts.input_ids_BN.shape[1]
            result = prefill(backbone, prompts, cache, compression)
            filled(result)
            copies = len(input_ids) // len(prompts.input_ids_BN)
            logits = result.logits_BV.repeat_interleave(copies, dim=0)
            if copies > 1:
                cache.batch_repeat_interleave(copies)
            if room is not None:
                cache.reserve(room)
        return CausalLMOutputWithPast(logits=logits[:, None], **{CACHE: cache})

    # transformers checks generate's arguments against the signature
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    # a compiled forward and accelerate's hooks lie on the object; a compiled call would trace into ours
    with _attributes(model, forward=forward, _compiled_call_impl=None):
        yield
    watch.check()


class _LogitWatch:
    """Notes on the device whether a decoded token's logits were NaN or infinite.

    A step does not wait for a GPU: it is asked every ``ASKED`` steps, and at the end.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._broken: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def looked_at(self, logits_BV: Tensor, at_once: bool) -> Tensor:
        """Return the logits; a row that chooses no token is 0, which every way of sampling takes."""
        broken_B = broken_rows(logits_BV)
        self.steps, self._dtype = self.steps + 1, logits_BV.dtype
        self._broken = broken_B.any() if self._broken is None else self._broken | broken_B.any()
        if at_once or self.steps % ASKED == 0 or logits_BV.device.type == "cpu":
            self.check()
        return logits_BV.masked_fill(broken_B[:, None], 0)

    def check(self) -> None:
        """Raise a worded ``ValueError`` where a row chose no token."""
        if self._broken is not None and bool(self._broken):
            raise no_numbers(f"in the first {self.steps + 1} tokens of an answer", self._dtype)


@contextmanager
def _attributes(model: nn.Module, **values: Any) -> Iterator[None]:
    """Attributes of the object itself for a while; then what was there, and nothing where nothing was."""
    before = {name: model.__dict__[name] for name in values if name in model.__dict__}

    def undo() -> None:
        for name in values:
            model.__dict__.pop(name, None)
        model.__dict__.update(before)

    with undoing(undo):
        model.__dict__.update(values)
        yield


def _check_append(backbone: CompressedBackbone, ids_Bq: Tensor, mask_BN: Tensor | None, prompt_length: int) -> None:
    """Later tokens must be text, without padding: neither these nor those since the prompt."""
    if ids_Bq.shape[1] == 1:  # a generated token, whatever it is
        return
    _check_text(backbone, ids_Bq[:, 1:])  # the first is the last generated token, whatever it is
    if mask_BN is not None and not bool(mask_BN[:, prompt_length:].all()):
        raise ValueError(
            "the tokens after a compressed prompt are padded; a packed cache stores no padding: continue samples whose "
            "answers or new turns differ in length one by one"
        )


def _check_text(backbone: CompressedBackbone, ids_Bq: Tensor) -> None:
    """Raise a worded ``ValueError`` where what is appended holds an image; one is of several tokens."""
    if bool(backbone.family.is_visual(ids_Bq).any()):
        raise ValueError(
            "the tokens after a compressed prompt hold an image; reducer and eviction act on whole prompts: start "
            "again with all images, without past_key_values"
        )
