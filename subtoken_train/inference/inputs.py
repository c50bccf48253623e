"""From a prompt to the inputs of ``generate``, as a processor makes them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import astuple, replace
from os import PathLike
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.documents import check_characters, text_problem
from subtoken_train.errors import SubTokenWarning, clipped
from subtoken_train.families.family import Family
from subtoken_train.families.images import Picture, Video, count_images
from subtoken_train.families.literal_marks import hidden, hidden_turn, picture_marks, tokenise
from subtoken_train.families.rgb import to_rgb
from subtoken_train.types import Turn


def inputs_of(family: Family, prompt: str | Sequence[Turn], shown: Picture | Sequence[Picture]) -> dict[str, Tensor]:
    """Write a prompt in the backbone's chat format, on its device, see ``SubTokenModel.inputs``."""
    device, images = family.device, picture_list(shown)
    if isinstance(prompt, str) and (problem := text_problem(prompt)):
        raise ValueError(f"the prompt {problem}; write what the model should answer or go on with")
    check_characters(prompt if isinstance(prompt, str) else list(map(astuple, prompt)), "the prompt")
    if family.image_token_id is None:
        if images or not isinstance(prompt, str):
            raise ValueError(f"{family.name} takes one text, and no images")
        encoded = family.tokenizer(prompt, return_tensors="pt")
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
    if not family.takes_videos and any(isinstance(image, Video) for image in images):
        raise family.no_video()
    rendered = family.render(_as_read(prompt, images))
    text, marker = rendered.text, rendered.image_marker
    parts = text.split(marker)
    if len(parts) - 1 != len(images):
        raise ValueError(
            f"{len(parts) - 1} image placeholders but {len(images)} images; write <image> once per image (or video), "
            "and \\<image> where it is text"
        )
    if not images:
        warnings.warn(
            f"the prompt has no image, so {family.name} answers from the text alone and no visual token is "
            "compressed; give one (--image FILE, or images=[...])",
            SubTokenWarning,
            stacklevel=3,
        )
    images = [image if isinstance(image, Video) else to_rgb(image, f"image {i + 1}") for i, image in enumerate(images)]
    together = count_images(images)
    for i, image in enumerate(images):
        parts[i] += family.picture_text(image, marker, together)
    input_ids = torch.tensor([tokenise(family.tokenizer, "".join(parts))[0]])
    made = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if images:
        pixels, grid = family.process_images(images, [together] * len(images))
        made |= family.given_images(pixels, grid, made["input_ids"])
        if (seconds_I := family.seconds(images)) is not None:
            videos = [isinstance(image, Video) for image in images]
            made["second_per_grid_ts"] = seconds_I[torch.tensor(videos)]
    return {name: tensor.to(device) for name, tensor in made.items()}


def picture_list(images: Any) -> list[Picture]:
    """Return the pictures of a prompt as a list, where one stands for itself.

    Raises:
        ValueError: it is a path or something else; what a list holds is not looked at.
    """
    if isinstance(images, Image.Image | Video):
        return [images]
    if isinstance(images, str | PathLike):
        raise ValueError(
            f"images={clipped(str(images), 100)!r} is a path, and no file is opened here; open it first: "
            "images=[PIL.Image.open(path)]"
        )
    if not isinstance(images, Sequence) or isinstance(images, bytes):
        raise ValueError(
            f"images of type {type(images).__name__}; give an image (PIL), a Video or a list of them, or leave it out"
        )
    return list(images)


def _as_read(prompt: str | Sequence[Turn], images: Sequence[Picture]) -> list[Turn]:
    """Return turns in which every picture has an ``<image>``, and nothing else has one."""
    videos = any(isinstance(image, Video) for image in images)
    if isinstance(prompt, str):
        return _one_mark([Turn(_with_placeholders(hidden(prompt, videos), images))], images)
    return _one_mark([hidden_turn(turn, videos) for turn in prompt], images)


def _with_placeholders(prompt: str, images: Sequence[Picture]) -> str:
    """Pictures stand before a prompt that places none."""
    return prompt if picture_marks(prompt) else "<image>\n" * len(images) + prompt


def _one_mark(turns: Sequence[Turn], images: Sequence[Picture]) -> list[Turn]:
    """``<video>`` as ``<image>``, where there are videos; it must stand for one."""
    if not any(isinstance(image, Video) for image in images):
        return list(turns)
    found = [mark for turn in turns for mark in picture_marks(turn.prompt)]
    for i, (mark, image) in enumerate(zip(found, images, strict=False)):
        if mark == "<video>" and not isinstance(image, Video):
            raise ValueError(f"picture {i + 1} is an image, and the prompt has <video> in its place; write <image>")
    return [replace(turn, prompt=turn.prompt.replace("<video>", "<image>")) for turn in turns]
