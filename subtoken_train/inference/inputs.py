"""From a prompt to the inputs of ``generate``, as a processor makes them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import astuple

from PIL import Image
from torch import Tensor

from subtoken_train.documents import check_characters
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.family import Family
from subtoken_train.families.images import to_rgb
from subtoken_train.types import Turn


def inputs_of(family: Family, prompt: str | Sequence[Turn], images: Sequence[Image.Image]) -> dict[str, Tensor]:
    """A prompt in the backbone's chat format, on its device, see ``SubTokenModel.inputs``."""
    device = family.device
    if isinstance(prompt, str) and not prompt.strip():
        raise ValueError("the prompt is empty; write what the model should answer or go on with")
    check_characters(prompt if isinstance(prompt, str) else list(map(astuple, prompt)), "the prompt")
    if family.image_token_id is None:
        if images or not isinstance(prompt, str):
            raise ValueError(f"{family.name} takes one text, and no images")
        encoded = family.tokenizer(prompt, return_tensors="pt")
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
    turns = prompt if not isinstance(prompt, str) else [Turn(_with_placeholders(prompt, len(images)))]
    rendered = family.render(turns)
    text, marker = rendered.text, rendered.image_marker
    parts = text.split(marker)
    if len(parts) - 1 != len(images):
        raise ValueError(f"{len(parts) - 1} image placeholders but {len(images)} images; write <image> once per image")
    if not images:
        warnings.warn(
            f"the prompt has no image, so {family.name} answers from the text alone and no visual token is "
            "compressed; give one (--image FILE, or images=[...])",
            SubTokenWarning,
            stacklevel=3,
        )
    images = [to_rgb(image, f"image {i + 1}") for i, image in enumerate(images)]
    for i, image in enumerate(images):
        parts[i] += family.picture_text(image, marker, len(images))
    encoded = family.tokenizer("".join(parts), add_special_tokens=False, return_tensors="pt")
    made = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    if images:
        pixels, grid = family.process_images(images, [len(images)] * len(images))
        made |= family.given_images(pixels, grid, made["input_ids"])
    return {name: tensor.to(device) for name, tensor in made.items()}


def _with_placeholders(prompt: str, images: int) -> str:
    """Images stand before a prompt that places none."""
    return prompt if "<image>" in prompt or not images else "<image>\n" * images + prompt
