"""``generate`` of transformers on a packed cache: its loop, sampling, beams and streamers, with our two passes.

transformers calls the model's ``forward`` once with the prompt and then with new tokens. While ``compressed`` is
active that call is ours: the first one runs reducer, routers and eviction and fills the cache, later ones only decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.cache.cache import PackedCache
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import Prefill, decode, prefill
from subtoken_train.types import Batch


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
                    "prefill_chunk_size cuts the prompt, but reducer, routers and eviction read whole prompts; leave "
                    "it out, or append text to a compressed prompt by past_key_values"
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


def _check_append(backbone: CompressedBackbone, ids_Bq: Tensor, mask_BN: Tensor | None, prompt_length: int) -> None:
    """Later tokens must be text, without padding: neither these nor those since the prompt.

    Raises:
        ValueError: an image in a later turn (the reducer has chosen by the first one), or rows of unequal length.
    """
    image = backbone.family.image_token_id
    if image is not None and bool((ids_Bq == image).any()):
        raise ValueError(
            "the tokens after a compressed prompt hold an image; reducer and eviction act on whole prompts: start "
            "again with all images, without past_key_values"
        )
    if mask_BN is not None and ids_Bq.shape[1] > 1 and not bool(mask_BN[:, prompt_length:].all()):
        raise ValueError(
            "the tokens after a compressed prompt are padded; a packed cache stores no padding: continue samples whose "
            "answers or new turns differ in length one by one"
        )
