"""Idefics3 and SmolVLM in the transformers 5 format: SigLIP tiles, 4, 9 or 16 patches a token, Llama or SmolLM2.

A picture's longer side is scaled to four tiles, its sides are rounded up to whole tiles, and it is cut; the whole
picture, scaled to one tile, follows. Each tile's patches are merged (pixel shuffle), to 64 to 169 tokens. The marks of
tiles (``<row_1_col_2>``, ``<global-img>``) and newlines are rows of text, which no reducer drops. SmolVLM2's videos are
not taken: its processor writes the number of frames in words.

Legend: B batch, I tiles, M tiles of the sample with the most, P patches of a tile, T visual tokens of a tile, c width
of a patch, C of a merged token, D model width.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.idefics3 import image_processing_pil_idefics3 as tiling

from subtoken_train.families.chat import ChatFormat, joined
from subtoken_train.families.family import GivenImages, PilReader
from subtoken_train.families.images import UNCUT, Picture, Video
from subtoken_train.families.tiles import MergedTilesFamily, padded_tiles
from subtoken_train.families.towers import merged_statistics, with_statistics
from subtoken_train.types import Batch, TowerStatistics, VisualStates

FAKE = "<fake_token_around_image>"
_TILES = 4  # tiles that the longer side of a picture is scaled to, as published


Idefics3Processor = PilReader(tiling.Idefics3ImageProcessorPil, "<image>")


def _words(prompt: str, picture: str) -> str:
    words = joined(prompt, picture)
    return words if words.startswith(picture) else f" {words}"


class Idefics3Family(MergedTilesFamily):
    """Idefics3-8B, and the first SmolVLM, which has its ``model_type``; a tower reducer chooses tile by tile."""

    name = "idefics3"
    auto_processor = Idefics3Processor
    lora_pattern = r"model\.text_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    unquantised = ("lm_head", "model.vision_model", "model.connector")
    image_inputs = ("pixel_values", "pixel_attention_mask")
    # a photograph: four by three tiles and the whole, 832 visual tokens of SmolVLM-500M
    nominal_image = (768, 1024)
    # our reading, of a question of six tokens: <|im_start|>User: and the marks of the first tile; then the other tiles'
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 38}
    chat = ChatFormat(
        "User:{}<end_of_utterance>\nAssistant:", " {}<end_of_utterance>", "{bos}", after="\n", words=_words
    )

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        vision, self.merge = model.config.vision_config, int(model.config.scale_factor)
        self.side, self.high = int(vision.image_size), int(vision.image_size // vision.patch_size)
        if self.high % self.merge:
            raise ValueError(f"{self.name}: {self.high} x {self.high} patches and scale_factor {self.merge} do not fit")
        tiler = None if processor is None else processor.image_processor
        self.longest = self.side * _TILES if tiler is None else int(tiler.size["longest_edge"])
        self.cuts = tiler is None or bool(tiler.do_image_splitting)

    @property
    def decoder(self) -> Any:
        return self.model.model.text_model

    def limit_pixels(self, max_pixels: int) -> None:
        self.longest = min(self.longest, math.isqrt(self.most_pixels(max_pixels)) // self.side * self.side)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tiles of an image of (height, width) pixels; (0, 0): it is its whole alone."""
        if not self.cuts:
            return 0, 0
        # transformers' own count leaves out that the second side follows the rounded first one
        height, width = tiling.get_resize_output_image_size(torch.empty(size, device="meta"), self.longest)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            rows = math.ceil(int(columns * self.side / ratio) / self.side)
        else:
            rows = math.ceil(height / self.side)
            columns = math.ceil(int(rows * self.side * ratio) / self.side)
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        rows, columns = self.grid(image_size or self.nominal_image)
        return (rows * columns + 1) * self.tile_tokens

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        if isinstance(picture, Video):
            raise self.no_video()
        (rows, columns), shown = self.grid((picture.height, picture.width)), marker * self.tile_tokens
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{FAKE}<row_{row}_col_{column}>{shown}" for column in range(1, columns + 1)) + "\n"
        return text + ("\n" if text else "") + f"{FAKE}<global-img>{shown}{FAKE}"

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, None]:
        """Return all pictures' tiles, [I, 3, H, W]: an image's row by row, then its whole."""
        scaled = {"size": {"longest_edge": self.longest}, "return_tensors": "pt"}
        pixels = torch.cat([self.processor.image_processor(image, **scaled)["pixel_values"][0] for image in images])
        self.check_tiles(pixels)
        self.check_count(len(pixels), sum(self.visual_tokens((image.height, image.width)) for image in images))
        return pixels, None

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read every prompt's tiles, [B, M, 3, H, W], and leave out those of zeros, which fill up the batch."""
        pixels, mask, tokens_B = given.get("pixel_values"), given.get("pixel_attention_mask"), visual_BN.sum(-1)
        if pixels is not None:
            if pixels.dim() != 5 or len(pixels) != len(visual_BN):
                raise ValueError(f"pixel_values of {self.name} must be [prompts, tiles, 3, height, width]; {UNCUT}")
            real_BM = pixels.flatten(2).any(-1)
            for count, tokens in zip(real_BM.sum(-1).tolist(), tokens_B.tolist(), strict=True):
                self.check_count(count, tokens)
            pixels = pixels[real_BM]
            self.check_tiles(pixels)
            if mask is not None and not bool(mask[real_BM].all()):
                raise ValueError(f"pixel_attention_mask hides a part of a tile; {self.name} takes whole tiles here")
        return GivenImages(pixels, None, tokens_B // self.tile_tokens)

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        tiles_B = self.is_visual(input_ids_BN).sum(-1) // self.tile_tokens
        return {"pixel_values": padded_tiles(pixels, tiles_B.tolist())}

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return every tile's merged patches, an entry per tile; statistics are the last layer's (``towers``)."""
        assert batch.pixel_values is not None
        tower, pixels = self.model.model.vision_model, batch.pixel_values.to(self.model.dtype)
        if statistics is None:
            return VisualStates(list(self.merged(tower(pixels).last_hidden_state)))
        attention = tower.encoder.layers[-1].self_attn
        hidden_IPc, *parts = with_statistics(attention, lambda: tower(pixels).last_hidden_state)
        return VisualStates(list(self.merged(hidden_IPc)), None, *merged_statistics(self.merged, *parts))

    def merged(self, patches_IPc: Tensor) -> Tensor:
        """Merge each tile's patches by transformers' own pixel shuffle, [I, T, C]."""
        shuffled: Tensor = self.model.model.connector.pixel_shuffle(patches_IPc, self.merge)
        return shuffled

    def project(self, states_TC: Tensor) -> Tensor:
        features: Tensor = self.model.model.connector.modality_projection(states_TC)
        return features


class SmolVLMFamily(Idefics3Family):
    """SmolVLM2 (256M, 500M, 2.2B): Idefics3's parts around SmolLM2; images, and no videos."""

    name = "smolvlm"
