"""Prompts of a given length for timing: random pictures and random words, alike in every sample, without padding.

A model that sees images gets as many whole images as fit beside the family's text, a word between two of them; the rest
is its question. A language model gets a context and a question of 64 tokens (of short prompts half).

Legend: B batch, N positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from subtoken_train.datasets.text_batches import QUERY_TOKENS
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family, with_processor
from subtoken_train.families.positions import position_bound
from subtoken_train.families.qwen_inputs import QwenInputs
from subtoken_train.inference.pool import ModelPool
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Batch

IMAGE_SIZE = (336, 336)
"""(height, width) in pixels, the paper's."""
TEXT_LENGTH = 2048


@dataclass(frozen=True)
class PromptParts:
    """The parts of a prompt, in tokens: ``system`` before the first image, ``query`` all but these and the context."""

    system: int
    images: int
    image_tokens: int
    query: int
    context: int

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.system + self.images * self.image_tokens + self.query + self.context

    @property
    def words(self) -> str:
        """For people."""
        if self.images == 0:
            return f"{self.length:,} tokens ({self.context:,} of context)"
        images = "1 image" if self.images == 1 else f"{self.images} images"
        return f"{self.length:,} tokens ({images} of {self.image_tokens:,})"


def prompt_parts(family: Family, length: int | None = None) -> PromptParts:
    """Return the parts of a prompt of that length; None: an image and the paper's text, or 2,048 of text at most."""
    if family.image_token_id is None:
        most = position_bound(family.decoder.config) or TEXT_LENGTH
        length = min(TEXT_LENGTH, most // 2) if length is None else length
        if (query := min(QUERY_TOKENS, length // 2)) == 0:
            raise ValueError(f"--lengths {length}: context and question take a token each; give 2 or more")
        return PromptParts(0, 0, 0, query, length - query)
    text, each = family.nominal_text, family.visual_tokens(IMAGE_SIZE)
    system, query = text["system"], text["query"]
    least = system + each + query
    if length is None:
        return PromptParts(system, 1, each, query, 0)
    if length < least:
        raise ValueError(f"--lengths {length}: an image of {family.name} takes {least} tokens; give at least {least}")
    images, several = 1, family.visual_tokens(IMAGE_SIZE, together=2)
    if (fit := (length - system - query + 1) // (several + 1)) > 1:
        images, each = fit, several
    return PromptParts(system, images, each, length - system - images * each, 0)


def check_positions(family: Family, parts: PromptParts, new_tokens: int) -> None:
    """Raise a worded ``ValueError`` where prompt and new tokens are more than the model's positions."""
    limit, needed = position_bound(family.decoder.config), parts.length + new_tokens
    if limit is not None and needed > limit:
        asked = f"--lengths {parts.length} and --new-tokens {new_tokens} need {needed} positions"
        raise ValueError(f"{asked} and the model has {limit}; give shorter prompts or fewer new tokens")


def draw_prompts(family: Family, parts: PromptParts, batch_size: int) -> Batch:
    """Draw a batch of prompts on the model's device."""
    generator = torch.Generator().manual_seed(0)
    ids_BN = _words(family, (batch_size, parts.length), generator)
    if family.image_token_id is None:
        return batch_from_inputs(family, ids_BN, torch.ones_like(ids_BN).bool(), {}, parts.context)
    for image in range(parts.images):
        start = parts.system + image * (parts.image_tokens + 1)
        ids_BN[:, start : start + parts.image_tokens] = family.image_token_id
    pixels, grid = _pictures(family, batch_size * parts.images, parts.images, generator)
    inputs = _given(family, pixels, grid, ids_BN, torch.full((batch_size,), parts.images))
    return batch_from_inputs(family, ids_BN, torch.ones_like(ids_BN).bool(), inputs, None)


def plain_inputs(family: Family, prompts: Batch) -> Mapping[str, Any]:
    """Return the same prompts as transformers' own forward pass takes them."""
    inputs: dict[str, Any] = {"input_ids": prompts.input_ids_BN}
    if prompts.pixel_values is not None:
        shown, grid, count_B = prompts.pixel_values, prompts.image_grid_I3, prompts.images_per_sample_B
        inputs |= _given(family, shown, grid, prompts.input_ids_BN, count_B)
    return inputs


def _given(
    family: Family, pixels: Tensor, grid_I3: Tensor | None, ids_BN: Tensor, images_B: Tensor
) -> dict[str, Tensor]:
    given = family.given_images(pixels, grid_I3, ids_BN)
    return given | ({"batch_num_images": images_B} if "batch_num_images" in given else {})  # of one prompt: all


def _words(family: Family, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Token ids that are no image's or video's, nor among the first few, which often are special."""
    vocabulary = int(family.model.get_input_embeddings().num_embeddings)
    ids = torch.arange(min(10, vocabulary - 1), vocabulary)
    if family.image_token_id is not None:
        ids = ids[~family.is_visual(ids)]
    return ids[torch.randint(len(ids), shape, generator=generator)]


def _pictures(family: Family, count: int, together: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    height, width = IMAGE_SIZE
    if family.processor is not None:
        noise = torch.randint(256, (count, height, width, 3), generator=generator, dtype=torch.uint8)
        return family.process_images([Image.fromarray(np.asarray(picture)) for picture in noise], [together] * count)
    if isinstance(family, QwenInputs):
        vision = family.vision
        grid = torch.tensor([[1, *(side // vision.patch_size for side in family.image_size(height, width))]] * count)
        channels = 3 * vision.temporal_patch_size * vision.patch_size**2
        return torch.randn(int(grid.prod(-1).sum()), channels, generator=generator), grid
    if family.in_tiles or "image_sizes" in family.image_inputs:
        words = "by a processor, which no Hub id has here; give the backbone's folder, or leave --random out"
        raise ValueError(f"pictures of {family.name} are scaled {words}")
    size = family.model.config.vision_config.image_size
    return torch.randn(count, 3, size, size, generator=generator), None


_TOWERS = {"llava": ("num_hidden_layers", None), "qwen2_5_vl": ("depth", "out_hidden_size")}
"""Model types that are made narrower: where their tower says its layers, and the language model's width."""


@dataclass(frozen=True)
class Shrink:
    """The reductions of an architecture.

    Attributes:
        layers: of the language model, at most; None: all.
        narrower: divides widths and numbers of heads of the language model (heads keep their width); the tower then has
            as many layers as the language model. Other model types than ``_TOWERS`` stay as they are.
    """

    layers: int | None = None
    narrower: int = 1

    def apply(self, config: Any) -> None:
        """Change a backbone's configuration in place."""
        text = config.get_text_config()
        if self.layers is not None:
            text.num_hidden_layers = min(self.layers, text.num_hidden_layers)
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[: self.layers]
        if self.narrower > 1 and config.model_type in _TOWERS:
            depth, width = _TOWERS[config.model_type]
            text.hidden_size //= self.narrower
            text.intermediate_size //= self.narrower
            text.num_attention_heads //= self.narrower
            text.num_key_value_heads = max(1, text.num_key_value_heads // self.narrower)
            setattr(config.vision_config, depth, text.num_hidden_layers)
            if hasattr(config.vision_config, "fullatt_block_indexes"):  # the last block sees the whole image, as it did
                config.vision_config.fullatt_block_indexes = [text.num_hidden_layers - 1]
            if width is not None:
                setattr(config.vision_config, width, text.hidden_size)


def random_family(config: BackboneConfig, shrink: Shrink, device: torch.device, seed: int = 0) -> Family:
    """Build a backbone's architecture with random weights, in evaluation mode, without a download."""
    if config.quantization != "none":
        raise ValueError(f"quantization {config.quantization!r} is asked for, not of --random weights; leave one out")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        family = layout_family(config, shrink.apply, device)
    family.model.eval()
    return with_processor(family, config) if Path(resolve(config.path)).exists() else family


class DrawnPool(ModelPool):
    """Hands out models that are laid out (on ``meta``) or drawn at random; the Hub is not asked for published ones."""

    def __init__(self, shrink: Shrink, device: str | torch.device) -> None:
        super().__init__()
        self._shrink, self._where = shrink, torch.device(device)

    def _load(self, source: BackboneConfig, reducer: Reducer) -> Family:
        if self._where.type == "meta":
            return layout_family(source, self._shrink.apply)
        return random_family(source, self._shrink, self._where)

    def _placed(self, backbone: CompressedBackbone) -> CompressedBackbone:
        return (backbone if self._where.type == "meta" else backbone.to(self._where)).eval()
