"""InternVL3 and 3.5 in the transformers 5 format: InternViT tiles, four patches a token, Qwen2 or Qwen3; frames too.

A picture is scaled to a grid of square tiles of the nearest aspect ratio and cut; behind several stands the whole
picture, scaled to one tile. Each tile's patches are merged 2 x 2 (pixel shuffle), 256 tokens at 448 pixels, between
``<img>`` and ``</img>``, which are rows of text. A video is a line ``Frame1: <img>...</img>`` per frame of one tile;
that frames have the pixels of transformers' video processor, which needs torchvision, is not proven.

Legend: I tiles, P patches of a tile, N the class token before them, T visual tokens of a tile, c width of a patch, C of
a merged token (4 * c), D model width, H heads, d head width.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as tiling

from subtoken_train.families.chat import CHATML
from subtoken_train.families.family import GivenImages, PilReader
from subtoken_train.families.images import Picture, Video
from subtoken_train.families.tiles import MergedTilesFamily
from subtoken_train.families.towers import class_attention, merged_statistics, with_inputs
from subtoken_train.types import Batch, TowerStatistics, VisualStates

InternVLProcessor = PilReader(tiling.GotOcr2ImageProcessorPil, "<IMG_CONTEXT>")


class InternVLFamily(MergedTilesFamily):
    """``InternVLForConditionalGeneration`` behind the family interface."""

    name = "internvl"
    auto_processor = InternVLProcessor
    takes_videos = True
    merge, class_tokens = 2, 1
    # four tiles and the whole: 1,280 visual tokens
    nominal_image = (896, 896)
    # our reading, of a question of six tokens: <|im_start|>user, a newline and <img>; </img>, the rest of the format
    paper_text: ClassVar[dict[str, int]] = {"system": 4, "query": 13}
    chat = replace(CHATML, words=lambda prompt, picture: prompt.strip().replace("<image>", picture))

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        config, vision = model.config, model.config.vision_config
        square = len({*vision.image_size}) == len({*vision.patch_size}) == 1
        layer = config.vision_feature_layer, config.vision_feature_select_strategy
        if not square or config.downsample_ratio != 0.5 or layer != (-1, "default"):
            found = f"tiles of {vision.image_size}, patches of {vision.patch_size}, ratio {config.downsample_ratio}"
            raise ValueError(f"internvl with {found}, vision_feature_layer {layer[0]} ({layer[1]}) is not supported")
        self.side, self.high = int(vision.image_size[0]), int(vision.image_size[0] // vision.patch_size[0])
        tiler = tiling.GotOcr2ImageProcessorPil() if processor is None else processor.image_processor
        self.least_tiles, self.most_tiles = int(tiler.min_patches), int(tiler.max_patches)

    def limit_pixels(self, max_pixels: int) -> None:
        self.most_tiles = min(self.most_tiles, self.most_pixels(max_pixels) // self.side**2)

    def tiles(self, size: tuple[int, int]) -> int:
        """Count the tiles of an image of (height, width) pixels, the whole among them."""
        columns, rows = tiling.get_optimal_tiled_canvas(size, (self.side, self.side), self.least_tiles, self.most_tiles)
        return int(columns * rows + (columns * rows > 1))

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        return self.tiles(image_size or self.nominal_image) * self.tile_tokens

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        if isinstance(picture, Video):
            shown = f"<img>{marker * self.tile_tokens}</img>"
            return "\n".join(f"Frame{i + 1}: {shown}" for i in range(len(picture.frames)))
        return f"<img>{super().picture_text(picture, marker, together)}</img>"

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, None]:
        """Return all pictures' tiles, [I, 3, H, W]: an image's row by row, then its whole; a video's, one a frame."""
        made, cut = [], {"max_patches": self.most_tiles, "return_tensors": "pt"}
        for picture in images:
            is_video = isinstance(picture, Video)
            frames = list(picture.frames) if is_video else [picture]
            made.append(self.processor.image_processor(frames, crop_to_patches=not is_video, **cut)["pixel_values"])
        pixels = torch.cat(made)
        self.check_tiles(pixels)
        return pixels, None

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read tiles one after another; every run of image tokens is a picture."""
        pixels = given.get("pixel_values")
        runs = [[len(list(run)) for is_visual, run in groupby(row) if is_visual] for row in visual_BN.tolist()]
        if pixels is not None:
            self.check_tiles(pixels)
            for odd in (run for of_sample in runs for run in of_sample if run % self.tile_tokens):
                self.check_count(-(-odd // self.tile_tokens), odd)
            self.check_count(len(pixels), sum(map(sum, runs)))
        return GivenImages(pixels, None, torch.tensor([len(of_sample) for of_sample in runs], device=visual_BN.device))

    @classmethod
    def tower_statistics(cls, config: Any) -> frozenset[TowerStatistics]:
        return frozenset({"received", "class", "unsplit"})

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return every tile's merged patches (no class token), an entry per tile; statistics are the last layer's."""
        assert batch.pixel_values is not None
        tower, pixels = self.model.model.vision_tower, batch.pixel_values.to(self.model.dtype)
        last = tower.encoder.layer[-1]
        hidden_INc, (seen_INc, *_), _ = with_inputs(last, lambda: tower(pixels).last_hidden_state)
        merged_ITC = self.merged(hidden_INc[:, 1:])
        if statistics is None:
            return VisualStates(list(merged_ITC))
        heads = 1 if statistics == "unsplit" else None
        received_IP, keys_IPd = class_attention(last.attention, last.layernorm_before(seen_INc), heads)
        return VisualStates(list(merged_ITC), None, *merged_statistics(self.merged, received_IP, keys_IPd))

    def merged(self, patches_IPc: Tensor) -> Tensor:
        """Merge each tile's patches 2 x 2 by transformers' own pixel shuffle, [I, T, 4 * c]."""
        grid = patches_IPc.reshape(len(patches_IPc), self.high, self.high, -1)
        shuffled: Tensor = self.model.model.pixel_shuffle(grid, scale_factor=0.5)
        return shuffled.flatten(1, 2)
