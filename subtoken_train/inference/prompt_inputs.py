"""From a prompt to the inputs that a processor makes, and from these to a ``Batch`` with regions.

Legend: B batch, N positions.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from subtoken_train.datasets.text_batches import context_tokens, padding_id
from subtoken_train.documents import check_characters, text_problem
from subtoken_train.errors import SubTokenWarning, check_word, clipped, panics_in_words, refuse
from subtoken_train.families.chat_template import Message, checked_variables, messages_of
from subtoken_train.families.family import Family, GivenImages
from subtoken_train.families.images import Picture, Video, count_images, to_rgb
from subtoken_train.families.literal_marks import IMAGE_MARK, VIDEO_MARK, as_text, hidden_turn, picture_marks, tokenise
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.inference.text_prompts import as_turns, check_raw, encode_messages, rendered_turns, text_batch
from subtoken_train.typed import shown
from subtoken_train.types import Batch, Region, Turn

IMAGE_INPUTS = (
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "mm_token_type_ids", "image_sizes", "batch_num_images"),
    *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
)
"""Outputs of processors for images and videos; each family lists those that it takes."""
Prompt = str | Sequence[Turn] | Sequence[Mapping[str, Any]]
"""A text, turns, or OpenAI's messages, whose parts' pictures stand beside the prompt or in them."""
Pictures = Picture | Sequence[Picture] | Sequence[Sequence[Picture]]
"""One, several, or (of several prompts) those of each."""
ROLES = ("system", "user", "assistant")
_MARKS = {"image": IMAGE_MARK, "video": VIDEO_MARK}


def batch_from_inputs(
    family: Family, input_ids_BN: Tensor, visible_BN: Tensor, inputs: Mapping[str, Any], context_length: int | None
) -> Batch:
    """Mark the regions of prompts, padded on either side.

    A model that sees images: SYSTEM before a sample's first image token, VISUAL, QUERY for everything else; the ranking
    token is the last one. A language model: CONTEXT (of every sample ``context_length`` tokens; None: the given
    ``regions``, or the default split) and QUERY. ``inputs`` are the processor's, by the names ``IMAGE_INPUTS``.
    """
    device, regions_BN, given = family.device, inputs.get("regions"), dict[str, Tensor]()
    input_ids_BN, visible = input_ids_BN.to(device).long(), visible_BN.to(device)
    for name in IMAGE_INPUTS:
        if (each := inputs.get(name)) is not None:
            if not isinstance(each, Tensor):
                raise ValueError(f'{name} must be a tensor, not {type(each).__name__}; use return_tensors="pt"')
            given[name] = each.to(device)
    kinds, pixels = given.get("mm_token_type_ids"), [name for name in given if name.startswith("pixel_values")]
    unlike = kinds is not None and not torch.equal(kinds.ne(0), family.is_visual(input_ids_BN))
    refuse((unlike, "mm_token_type_ids do not mark the image tokens of input_ids; pass the processor's whole output"))
    last_B = torch.where(visible, torch.arange(input_ids_BN.shape[1], device=device), -1).amax(-1)
    if family.image_token_id is None:
        whole = context_length is None or type(context_length) is int
        refuse(
            (not whole, f"context_length={context_length!r} must be a whole number of tokens"),
            (pixels, f"{''.join(pixels[:1])} were given, but {family.name} sees no images"),
        )
        regions = _text_regions(family, input_ids_BN, visible, context_length, regions_BN)
        rank, shown = last_B, GivenImages(None, None, torch.zeros_like(last_B))
    else:
        visual, foreign = visible & family.is_visual(input_ids_BN), given.keys() - set(family.image_inputs)
        count, taken = int(visual.sum()), f"{family.name} takes {', '.join(family.image_inputs)}"
        unshown = f"{count} image tokens in the prompt but {'some' if pixels else 'no'} pixel_values"
        for name, value in (("context_length", context_length), ("regions", regions_BN)):
            refuse((value is not None, f"{name} is for language models; {family.name} compresses the visual tokens"))
        refuse(
            (foreign, f"{min(foreign, default='')}: {taken}; leave it out, or load its own processor"),
            (bool(count) != bool(pixels), f"{unshown}; write one placeholder per image and pass the whole output"),
        )
        shown = family.read_images({**given, "input_ids": input_ids_BN}, visual)
        regions = torch.where(visual, int(Region.VISUAL), int(Region.QUERY))
        before = (visual.long().cumsum(-1) == 0) & visual.any(-1, keepdim=True)
        regions = regions.masked_fill(before, int(Region.SYSTEM)).masked_fill(~visible, int(Region.PADDING))
        rank = torch.where(visual.any(-1), last_B, -1)
    return Batch(
        input_ids_BN=input_ids_BN, labels_BN=torch.full_like(input_ids_BN, IGNORE_INDEX), regions_BN=regions,
        rank_position_B=rank, record_ids=[f"prompt {i}" for i in range(len(input_ids_BN))],
        pixel_values=shown.pixel_values, images_per_sample_B=shown.images_per_sample_B,
        image_grid_I3=shown.image_grid_I3, seconds_I=shown.seconds_I,
    )  # fmt: skip


def joined_batches(batches: Sequence[Batch], pad_id: int) -> Batch:
    """Join prompts without answers, or parts of them, into one batch, padded on the left, on one device."""
    width = max(batch.input_ids_BN.shape[1] for batch in batches)

    def padded(name: str, fill: int) -> Tensor:
        rows = [getattr(batch, name) for batch in batches]
        return torch.cat([F.pad(row, (width - row.shape[1], 0), value=fill) for row in rows])

    def joined(name: str) -> Tensor | None:
        there = [part for batch in batches if (part := getattr(batch, name)) is not None]
        return torch.cat(there) if there else None

    ranks = [(batch.rank_position_B, width - batch.input_ids_BN.shape[1]) for batch in batches]
    seconds = [torch.zeros(int(b.images_per_sample_B.sum())) if b.seconds_I is None else b.seconds_I for b in batches]
    given = any(batch.seconds_I is not None for batch in batches)
    return Batch(
        input_ids_BN=padded("input_ids_BN", pad_id),
        labels_BN=padded("labels_BN", IGNORE_INDEX),
        regions_BN=padded("regions_BN", int(Region.PADDING)),
        rank_position_B=torch.cat([torch.where(rank_B < 0, -1, rank_B + more) for rank_B, more in ranks]),
        pixel_values=joined("pixel_values"),
        images_per_sample_B=torch.cat([batch.images_per_sample_B for batch in batches]),
        record_ids=[name for batch in batches for name in batch.record_ids],
        image_grid_I3=joined("image_grid_I3"),
        seconds_I=torch.cat([each.to(batches[0].regions_BN.device) for each in seconds]) if given else None,
        followed=batches[0].followed,
    )


def _text_regions(family: Family, ids_BN: Tensor, visible_BN: Tensor, context_length: int | None, given: Any) -> Tensor:
    """CONTEXT, then QUERY of each sample; where regions are given these, SYSTEM always."""
    regions = torch.full_like(ids_BN, int(Region.PADDING))
    if given is not None:
        fits = isinstance(given, Tensor) and given.shape == visible_BN.shape
        told = given.to(visible_BN.device).long() if fits else regions
        last_B1 = torch.where(visible_BN, torch.arange(told.shape[1], device=told.device), -1).amax(-1, keepdim=True)
        known = (told >= int(Region.PADDING)) & (told <= int(Region.QUERY)) & (told != int(Region.VISUAL))
        right = (known & ((told != int(Region.PADDING)) == visible_BN)).all()
        if not bool(right & (told.gather(1, last_B1) == int(Region.QUERY)).all()):
            codes = "1 (system), 3 (context) or 4 (query, as the last) for each token, 0 of padding"
            words = f"regions must be {list(visible_BN.shape)} as input_ids are: {codes}"
            raise ValueError(f"{words}; pass what inputs returned, or leave regions out")
        if context_length is None:
            return told
    for row, (ids, visible) in enumerate(zip(ids_BN, visible_BN, strict=True)):
        real = ids[visible].tolist()
        length = context_tokens(family, real) if context_length is None else context_length
        place = f"prompt {row} has {len(real)} tokens, and at least one of them must ask"
        outside = f"context_length={length} must lie between 0 and {len(real) - 1}: {place}"
        refuse((not 0 <= length < len(real), outside))
        split = [int(Region.CONTEXT)] * length + [int(Region.QUERY)] * (len(real) - length)
        regions[row, visible] = torch.tensor(split, device=regions.device)
    return regions if given is None else torch.where(told == int(Region.SYSTEM), told, regions)


def read_messages(prompt: Any, pictures: Sequence[Picture] = ()) -> tuple[list[Message], list[Picture]]:
    """Return a prompt as messages of texts, the last one the user's or an assistant's, and its marks' pictures."""
    found = list(pictures)
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise _no_prompt(prompt)
    elif not prompt:
        raise ValueError("the prompt has no message; write what the model should answer")
    else:
        turns = all(isinstance(each, Turn) for each in prompt)
        messages, found = (messages_of(prompt), found) if turns else _read_mappings(prompt, pictures)
        if (role := messages[-1]["role"]) == "system" or all(each["role"] != "user" for each in messages):
            raise ValueError(f"the last message is the {role}'s, and nothing is asked; end with what the user says")
    check_characters([each["content"] for each in messages], "the prompt")
    if problem := text_problem(messages[-1]["content"]):
        raise ValueError(f"the prompt {problem}; write what the model should answer or continue")
    return messages, found


def goes_on(prompt: Any, raw: bool = False) -> bool:
    """Return whether the answer goes on with a text: a raw prompt, or what the assistant says last."""
    return raw or (not isinstance(prompt, str) and read_messages(prompt)[0][-1]["role"] == "assistant")


def _read_mappings(prompt: Sequence[Any], pictures: Sequence[Picture]) -> tuple[list[Message], list[Picture]]:
    messages: list[Message] = []
    own: list[Picture] = []
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping):
            raise _no_prompt(message, f"message {number}")
        _check_keys(message, ("role", "content"), f"message {number}")
        role, content = message.get("role"), message.get("content")
        check_word(f"role of message {number}", role, ROLES)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence) or not parts:
            raise ValueError(f"message {number} says {shown(content)}; its content is a text, or a list of parts")
        texts = []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            said: Any = part.get(kind) if isinstance(kind, str) else None
            if kind not in ("text", *_MARKS) or (kind == "text" and not isinstance(said, str)):
                raise ValueError(f"message {number} has a part {shown(part)}; parts are text, image or video")
            _check_keys(part, ("type", str(kind)), f"a part of message {number}")
            if kind != "text" and isinstance(said, str):
                words = f"message {number} names the {kind} {shown(said)}, but files are not opened here"
                raise ValueError(f"{words}; open it, or give it beside the prompt")
            texts.append(str(said) if kind == "text" else _MARKS[str(kind)])
            own += [] if kind == "text" or said is None else [said]
        messages.append({"role": str(role), "content": "\n".join(texts)})
    refuse((own and pictures, "pictures are given both in the messages and beside them; give them in one place"))
    return messages, own or list(pictures)


def _check_keys(given: Mapping[str, Any], allowed: Sequence[str], place: str) -> None:
    if more := [name for name, value in given.items() if name not in allowed and value is not None]:
        raise ValueError(f"{place} has {shown(more[0])}, which is not read; leave it out ({', '.join(allowed)})")


def _no_prompt(given: Any, place: str = "the prompt") -> ValueError:
    forms = 'a text, a list of Turn, or a list of messages: [{"role": "user", "content": "..."}]'
    return ValueError(f"{place} is of type {type(given).__name__}; a prompt is {forms}")


@panics_in_words()
def inputs_of(
    family: Family,
    prompt: Prompt | Sequence[Prompt],
    shown: Pictures,
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write a prompt, or several as a batch, in the backbone's chat format, on its device."""
    if is_several(prompt):
        own: list[Any] = [*picture_list(shown)] or [()] * len(prompt)
        unlike = f"{len(prompt)} prompts, but pictures for {len(own)}; give a list for each, [] where it has none"
        refuse((len(own) != len(prompt), unlike))
        pairs = zip(prompt, own, strict=True)
        return padded_left(family, [inputs_of(family, *each, raw, chat_template_kwargs) for each in pairs])
    one: Any = prompt
    messages, images = read_messages(one, picture_list(shown))
    check_raw(family, raw)
    tokenizer, reads = family.tokenizer, not (raw or family.sees_images)
    variables = checked_variables(tokenizer if reads else None, chat_template_kwargs)
    if family.image_token_id is None:
        refuse(
            (images, f"{family.name} takes text, and no images; leave them out, or use a model that sees images"),
            (raw and not isinstance(one, str), "a raw prompt is one text to continue; give a text, or leave raw out"),
        )
        if isinstance(one, str) and (raw or not tokenizer.chat_template):
            encoded = tokenizer(one, return_tensors="pt")
            return {name: encoded[name].to(family.device) for name in ("input_ids", "attention_mask")}
        batch = text_batch(family, [encode_messages(family, messages, **variables)])
        made = {"input_ids": batch.input_ids_BN, "attention_mask": torch.ones_like(batch.input_ids_BN)}
        made |= {"regions": batch.regions_BN} if tokenizer.chat_template else {}
        return {name: tensor.to(family.device) for name, tensor in made.items()}
    if not family.takes_videos and any(isinstance(image, Video) for image in images):
        raise family.no_video()
    rendered = rendered_turns(family, _as_read(family, one, messages, images))
    marker, parts = rendered.image_marker, rendered.text.split(rendered.image_marker)
    if len(parts) - 1 != len(images):
        words = "write <image> once per image (or video), and \\<image> where it is text"
        raise ValueError(f"{len(parts) - 1} image placeholders but {len(images)} images; {words}")
    if not images:
        words = f"the prompt has no image, so {family.name} answers from the text alone and compresses no visual token"
        warnings.warn(f"{words}; give one (--image FILE, or images=[...])", SubTokenWarning, stacklevel=3)
    images = [image if isinstance(image, Video) else to_rgb(image, f"image {i + 1}") for i, image in enumerate(images)]
    together = count_images(images)
    for i, image in enumerate(images):
        parts[i] += family.picture_text(image, marker, together)
    input_ids = torch.tensor([tokenise(tokenizer, "".join(parts))[0]])
    made = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if images:
        pixels, grid = family.process_images(images, [together] * len(images))
        made |= family.given_images(pixels, grid, input_ids)
        if (seconds_I := family.seconds(images)) is not None:
            made["second_per_grid_ts"] = seconds_I[torch.tensor([isinstance(image, Video) for image in images])]
    return {name: tensor.to(family.device) for name, tensor in made.items()}


def is_several(prompt: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a list holds prompts: texts, or lists of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(p, str | list | tuple) for p in prompt)


def padded_left(family: Family, prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the inputs of several prompts into those of one batch, padded on the left."""
    batches = [batch_from_inputs(family, p["input_ids"], p["attention_mask"].bool(), p, None) for p in prompts]
    batch = joined_batches(batches, padding_id(family.tokenizer))
    made = {"input_ids": batch.input_ids_BN, "attention_mask": (batch.regions_BN != int(Region.PADDING)).long()}
    if "regions" in prompts[0]:
        made["regions"] = batch.regions_BN
    if batch.pixel_values is not None:
        made |= family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    if seconds := [p["second_per_grid_ts"] for p in prompts if "second_per_grid_ts" in p]:
        made["second_per_grid_ts"] = torch.cat(seconds)
    return made


def picture_list(images: Any) -> list[Picture]:
    """Return the pictures of a prompt as a list, where one stands for itself."""
    if isinstance(images, Image.Image | Video):
        return [images]
    closed = f"images={clipped(str(images), 100)!r} is a path, but files are not opened here; open it first"
    listed = isinstance(images, Sequence) and not isinstance(images, bytes)
    kind = f"images of type {type(images).__name__}; give an image (PIL), a Video or a list of them, or leave it out"
    refuse((isinstance(images, str | PathLike), f"{closed}: images=[PIL.Image.open(path)]"), (not listed, kind))
    return list(images)


def _as_read(family: Family, prompt: Prompt, messages: Sequence[Message], images: Sequence[Picture]) -> list[Turn]:
    """Return turns in which every picture or video has an ``<image>``, and nothing else has one."""
    videos = any(isinstance(image, Video) for image in images)
    if isinstance(prompt, str):
        text = as_text(family, prompt, videos)
        turns = [Turn(("" if picture_marks(text) else "<image>\n" * len(images)) + text)]
    else:
        given = [turn for turn in prompt if isinstance(turn, Turn)] or as_turns(messages)
        turns = [hidden_turn(family, turn, videos) for turn in given]
    if not videos:
        return turns
    found = [mark for turn in turns for mark in picture_marks(turn.prompt)]
    for i, (mark, image) in enumerate(zip(found, images, strict=False)):
        if mark == "<video>" and not isinstance(image, Video):
            raise ValueError(f"picture {i + 1} is an image, and the prompt has <video> in its place; write <image>")
    return [replace(turn, prompt=turn.prompt.replace("<video>", "<image>")) for turn in turns]
