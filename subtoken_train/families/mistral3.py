"""Mistral Small 3.1 and 3.2 in the transformers 5 format: a Pixtral tower, pictures of any size, 2 x 2 patches a token.

A picture's longer side is scaled down to 1,540 pixels at most, and its sides are rounded up to whole tokens of 28 x 28.
``[IMG_BREAK]`` stands behind each row of its tokens and ``[IMG_END]`` behind the last: rows of text, which no reducer
drops. The tower sees all pictures of a batch as one sequence, whose mask has the square of its patches. The template's
own system text, which names the day, is left out.

Legend: I pictures, P patches of all pictures, T visual tokens of a picture, c width of a patch, C of a merged token (4
* c), D model width, H heads, d head width.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb

from subtoken_train.families.chat import ChatFormat
from subtoken_train.families.family import Family, GivenImages, PilReader
from subtoken_train.families.images import FP32_BYTES, UNCUT, Picture, Video, copied_bytes
from subtoken_train.families.tiles import pictures_per_sample
from subtoken_train.families.towers import received_attention, with_inputs
from subtoken_train.types import Batch, TowerStatistics, VisualStates

_LONGEST = 1540  # pixels of a picture's longer side at most, as published


Mistral3Processor = PilReader(PixtralImageProcessorPil, "[IMG]")


class Mistral3Family(Family):
    """``Mistral3ForConditionalGeneration`` behind the family interface; layouts are (1, rows, columns) of patches."""

    name = "mistral3"
    auto_processor = Mistral3Processor
    image_inputs = ("pixel_values", "image_sizes")
    # a photograph: 24 x 32 visual tokens
    nominal_image = (672, 896)
    # our reading, of a question of six tokens: <s>[INST]; the marks of 24 rows and [/INST]
    paper_text: ClassVar[dict[str, int]] = {"system": 2, "query": 31}
    chat = ChatFormat("[INST]{}[/INST]", "{}{eos}", "{bos}")

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        config = model.config
        self.patch, self.merge = int(config.vision_config.patch_size), int(config.spatial_merge_size)
        if config.vision_feature_layer != -1:
            raise ValueError(f"mistral3 with vision_feature_layer {config.vision_feature_layer} is not read; -1 is")
        self.unit = self.patch * self.merge  # pixels of a visual token's side
        self.longest = _LONGEST if processor is None else int(processor.image_processor.size["longest_edge"])

    def limit_pixels(self, max_pixels: int) -> None:
        if max_pixels < self.unit**2:
            raise ValueError(f"max_pixels={max_pixels} is below one visual token of mistral3, {self.unit**2} pixels")
        self.longest = min(self.longest, math.isqrt(max_pixels) // self.unit * self.unit)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of visual tokens of an image of (height, width) pixels."""
        shape, unit = torch.empty(3, *size, device="meta"), (self.unit, self.unit)
        height, width = get_resize_output_image_size(shape, (self.longest,) * 2, unit, ChannelDimension.FIRST)
        if not height * width:
            raise ValueError(f"an image of {size[0]} x {size[1]} pixels: mistral3 leaves nothing of its shorter side")
        return height // self.unit, width // self.unit

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        return math.prod(self.grid(image_size or self.nominal_image))

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        if isinstance(picture, Video):
            raise self.no_video()
        rows, columns = self.grid((picture.height, picture.width))
        return "[IMG_BREAK]".join([marker * columns] * rows) + "[IMG_END]"

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return all pictures' flattened patches, [P, 3 * pixels], and the grid of each in patches."""
        options = {"size": {"longest_edge": self.longest}, "patch_size": {"height": self.unit, "width": self.unit}}
        made = [self.processor.image_processor([image], return_tensors="pt", **options) for image in images]
        patches = [self._flat(each["pixel_values"][0]) for each in made]
        return torch.cat(patches), self._grids(torch.cat([each["image_sizes"] for each in made]))

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read pictures padded to the largest one, [I, 3, height, width], and their sizes in pixels."""
        pixels, sizes = given.get("pixel_values"), given.get("image_sizes")
        if pixels is None and sizes is None:
            return GivenImages(None, None, visual_BN.sum(-1) * 0)
        whole = sizes is not None and sizes.dim() == 2 and sizes.shape[1] == 2 and not bool((sizes % self.unit).any())
        if pixels is None or sizes is None or not whole or pixels.dim() != 4 or len(pixels) != len(sizes):
            raise ValueError(f"pixel_values need image_sizes [images, 2] in multiples of {self.unit}; {UNCUT}")
        each = zip(pixels, sizes.tolist(), strict=True)
        patches = torch.cat([self._flat(image[:, :height, :width]) for image, (height, width) in each])
        tokens = [height * width // self.unit**2 for height, width in sizes.tolist()]
        return GivenImages(patches, self._grids(sizes), pictures_per_sample(tokens, visual_BN))

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        assert grid_I3 is not None
        return {"pixel_values": self._padded(pixels, grid_I3), "image_sizes": grid_I3[:, 1:] * self.patch}

    def image_bytes(self) -> int:
        return FP32_BYTES * 3 * self.unit**2 * self.visual_tokens()

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes: the pixels, flat and padded, the mask of P * P, six states of a patch at an MLP."""
        vision, element = self.model.config.vision_config, self.shape.element_bytes
        patches = pixel_bytes // (FP32_BYTES * 3 * self.patch**2)
        states = 3 * vision.hidden_size + 3 * vision.intermediate_size
        pixels = copied_bytes(pixel_bytes, element) + pixel_bytes * element // FP32_BYTES
        return int(pixels + element * patches * (patches + states))

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return every picture's normed patches, merged two by two; statistics are the last layer's, as Qwen's are."""
        assert batch.pixel_values is not None
        assert batch.image_grid_I3 is not None
        model, grid = self.model.model, batch.image_grid_I3.tolist()
        pixels = self._padded(batch.pixel_values.to(self.model.dtype), batch.image_grid_I3)
        sizes = [(rows * self.patch, columns * self.patch) for _, rows, columns in grid]
        tower, attention = model.vision_tower, model.vision_tower.transformer.layers[-1].attention
        made, _, options = with_inputs(attention, lambda: tower(pixels, image_sizes=sizes))
        tokens = self.merged(model.multi_modal_projector.norm(made.last_hidden_state[0]), grid)
        if statistics is None:
            return VisualStates(tokens)
        # what each patch receives, [P], and its turned key, [P, d], in fp32: the attention is computed again
        split = (1, -1, attention.num_heads, attention.head_dim)
        projected = (part(options["hidden_states"]).view(split) for part in (attention.q_proj, attention.k_proj))
        query, key = (each.transpose(1, 2) for each in projected)
        query, key = apply_rotary_pos_emb(query, key, *options["position_embeddings"], unsqueeze_dim=0)
        query_PHd, key_PHd = (each[0].transpose(0, 1) for each in (query, key))
        lengths = [rows * columns for _, rows, columns in grid]
        received_P = received_attention(query_PHd, key_PHd, lengths, attention.scaling)
        keys_Pd = key_PHd.float().mean(1)
        received = [token_T4.mean(-1) for token_T4 in self.merged(received_P[:, None], grid)]
        keys = [key_TC.reshape(len(key_TC), keys_Pd.shape[-1], -1).mean(-1) for key_TC in self.merged(keys_Pd, grid)]
        return VisualStates(tokens, None, received, keys)

    def merged(self, patches_Pc: Tensor, grid: list[list[int]]) -> list[Tensor]:
        """Merge each picture's patches two by two, [T, C] of each: a channel of all four, then the next."""
        parts = zip(torch.split(patches_Pc, [h * w for _, h, w in grid]), grid, strict=True)
        pictures = (own.T.reshape(1, -1, rows, columns) for own, (_, rows, columns) in parts)
        return [F.unfold(picture, self.merge, stride=self.merge)[0].T for picture in pictures]

    def project(self, states_TC: Tensor) -> Tensor:
        projector = self.model.model.multi_modal_projector
        merged = projector.patch_merger.merging_layer(states_TC)
        features: Tensor = projector.linear_2(projector.act(projector.linear_1(merged)))
        return features

    def _grids(self, sizes_I2: Tensor) -> Tensor:
        return F.pad(sizes_I2.long() // self.patch, (1, 0), value=1)

    def _flat(self, image_3HW: Tensor) -> Tensor:
        return F.unfold(image_3HW[None], self.patch, stride=self.patch)[0].T

    def _padded(self, patches: Tensor, grid_I3: Tensor) -> Tensor:
        grid, side = grid_I3.tolist(), self.patch
        high, wide = (max(row[axis] for row in grid) * side for axis in (1, 2))
        made, lengths = patches.new_zeros(len(grid), 3, high, wide), [rows * columns for _, rows, columns in grid]
        for image, own, (_, rows, columns) in zip(made, torch.split(patches, lengths), grid, strict=True):
            size = (rows * side, columns * side)
            image[:, : size[0], : size[1]] = F.fold(own.T[None], size, side, stride=side)[0]
        return made
