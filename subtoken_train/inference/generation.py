"""``generate`` of transformers on a packed cache: its loop, sampling, beams and streamers, with our two passes.

transformers calls the model's ``forward`` once with the prompt and then with new tokens. While ``compressed`` is
active that call is ours: the first one runs reducer, routers and eviction and fills the cache, later ones only decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.cache.cache import PackedCache
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import Prefill, decode, prefill
from subtoken_train.types import Batch

UNAVAILABLE = {"use_cache": False, "output_attentions": True, "output_hidden_states": True}
"""Decoding is on the cache, and makes neither attention matrices nor a list of hidden states."""
ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Assisted decoding, which asks for the logits of several new tokens at once."""


@contextmanager
def compressed(
    backbone: CompressedBackbone, compression: Compression, prompts: Batch, filled: Callable[[Prefill], None]
) -> Iterator[None]:
    """Let ``backbone.model.generate`` run on packed caches inside the block.

    A prompt is run once, however many beams or sequences transformers makes of it.

    Args:
        backbone: in evaluation mode.
        compression: eviction and precision.
        prompts: what the first call's input ids stand for.
        filled: called when the prompts are in the cache.
    """
    model = backbone.model
    original = model.forward

    @functools.wraps(original)  # transformers checks generate's arguments against the signature
    def forward(
        input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **further: Any
    ) -> CausalLMOutputWithPast:
        assert isinstance(past_key_values, PackedCache)
        if past_key_values.is_filled:
            _check_append(backbone, input_ids, attention_mask, past_key_values.prompt_length)
            logits = decode(backbone, input_ids, past_key_values)
        else:
            if input_ids.shape[1] != prompts.input_ids_BN.shape[1]:
                raise ValueError(
                    f"{input_ids.shape[1]} tokens were run first of prompts of {prompts.input_ids_BN.shape[1]}: "
                    "reducer, routers and eviction read whole prompts; leave prefill_chunk_size out"
                )
            result = prefill(backbone, prompts, past_key_values, compression)
            filled(result)
            copies = len(input_ids) // len(prompts.input_ids_BN)
            logits = result.logits_BV.repeat_interleave(copies, dim=0)
            if copies > 1:
                past_key_values.batch_repeat_interleave(copies)
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=past_key_values)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward  # the class's own is visible again


def check_settings(settings: Mapping[str, Any], config: GenerationConfig) -> None:
    """Raise a worded ``ValueError`` for settings of ``generate`` that a packed cache has no answer to."""
    for name, wanted in UNAVAILABLE.items():
        if settings.get(name, getattr(config, name, None)) is wanted:
            raise ValueError(f"{name}={wanted} does not go with a compressed cache; leave it out")
    for name in ASSISTED:
        if settings.get(name, getattr(config, name, None)) is not None:
            raise ValueError(f"{name}: assisted decoding does not go with a compressed cache; leave it out")


def _check_append(backbone: CompressedBackbone, ids_Bq: Tensor, mask_BN: Tensor | None, prompt_length: int) -> None:
    """Later tokens must be text, without padding: neither these nor those since the prompt.

    Raises:
        ValueError: an image in a later turn (the reducer has chosen by the first one), or rows of unequal length.
    """
    if ids_Bq.shape[1] == 1:  # a generated token, whatever it is
        return
    image = backbone.family.image_token_id
    if image is not None and bool((ids_Bq == image).any()):
        raise ValueError(
            "the tokens after a compressed prompt hold an image; reducer and eviction act on whole prompts: start "
            "again with all images, without past_key_values"
        )
    if mask_BN is not None and not bool(mask_BN[:, prompt_length:].all()):
        raise ValueError(
            "the tokens after a compressed prompt are padded; a packed cache stores no padding: continue samples whose "
            "answers or new turns differ in length one by one"
        )
