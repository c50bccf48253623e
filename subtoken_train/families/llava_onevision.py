"""LLaVA-OneVision (any size) in the transformers 5 format: SigLIP tower, images as tiles, videos as pooled frames.

An image alone in its prompt is cut into tiles (``anyres_max_9``, see ``tiles``); of several, each is one tile and a
newline. A video's frames are one tile each, pooled two by two; one newline ends the video, and belongs to its last
frame. Newlines are visual rows; they receive no attention, and no tower reducer merges them. Tower reducers act on the
projector's output. ``image_grid_I3`` is (tiles, height, width in pixels) of an image, (frames, 0, 0) of a video.

Legend: B batch, N positions, D model width, I tiles and frames of all pictures, P patches of a tile, T visual tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from subtoken_train.families.chat import CHATML, pictures_first
from subtoken_train.families.family import Family, GivenImages, PilReader
from subtoken_train.families.images import FP32_BYTES, UNCUT, Picture, Video, check_square, tower_peak
from subtoken_train.families.tiles import TileLayout, ordered_pictures, padded_tiles
from subtoken_train.families.towers import features_with_statistics, patch_features
from subtoken_train.types import Batch, Frames, TowerStatistics, VisualStates

IMAGE, VIDEO = 1, 2
Pictures = tuple[list[Tensor], list[tuple[int, int, int]]]  # tiles or frames of each, and its row of a grid


OnevisionProcessor = PilReader(LlavaOnevisionImageProcessorPil, "<image>", "<video>")


class LlavaOnevisionFamily(Family):
    """``LlavaOnevisionForConditionalGeneration`` behind the family interface."""

    name = "llava_onevision"
    auto_processor = OnevisionProcessor
    takes_videos = tells_frames = True
    in_tiles = True
    image_inputs = ("pixel_values", "image_sizes", "batch_num_images", "pixel_values_videos")
    # four tiles and the whole: 3,645 patches and 54 newlines; this chat format makes 15 of a question of six tokens
    nominal_image = (768, 768)
    paper_text: ClassVar[dict[str, int]] = {"system": 3, "query": 12}
    chat = replace(CHATML, words=pictures_first)

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        config = model.config
        if config.vision_config.model_type != "siglip_vision_model" or config.vision_feature_select_strategy != "full":
            raise ValueError("llava_onevision is read with a SigLIP tower whose patches all stay (strategy 'full')")
        self.layout = TileLayout.of(config, int(config.vision_aspect_ratio.removeprefix("anyres_max_")))

    def is_visual(self, ids: Tensor) -> Tensor:
        return (ids == self.image_token_id) | torch.eq(ids, self.model.config.video_token_id)

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Count one image's patches and newlines; among several images, its whole and one newline."""
        if image_size is not None and together > 1:
            check_square(*image_size)
        return self.layout.placeholders(image_size or self.nominal_image, cut=together == 1)

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        if isinstance(picture, Video):
            return str(self.processor.video_token) * self.frames_of(len(picture.frames)).total
        return super().picture_text(picture, marker, together)

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the tiles and frames of all pictures, [I, 3, side, side], and ``image_grid_I3``."""
        pixels, grid, make = [], [], self.processor.image_processor
        for picture, others in zip(images, together or [1] * len(images), strict=True):
            if isinstance(picture, Video):  # each frame as the whole of a picture
                one_tile = {"image_grid_pinpoints": [[self.layout.side] * 2], "return_tensors": "pt"}
                pixels.append(make(list(picture.frames), **one_tile)["pixel_values"][:, 0])
                grid.append((len(picture.frames), 0, 0))
            else:  # of several pictures in a list the processor makes one tile each
                given = [picture] if others == 1 else [[picture, picture]]
                pixels.append(make(given, return_tensors="pt")["pixel_values"][0])
                grid.append((len(pixels[-1]), picture.height, picture.width))
        return torch.cat(pixels), torch.tensor(grid)

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read tiles and frames in the prompts' order, without padding.

        Images are padded to the largest one's tiles ([images, tiles, 3, side, side], with ``image_sizes``), counted by
        ``batch_num_images`` (missing: one); videos of equal length are stacked ([videos, frames, 3, side, side]).
        """
        kind_BN = visual_BN * (1 + (given["input_ids"] == self.model.config.video_token_id).long())
        pictures = {IMAGE: _images(given, self.layout), VIDEO: _videos(given, self.layout)}
        tokens = {kind: [self.visual_rows(row) for row in rows] for kind, (_, rows) in pictures.items()}
        samples = ordered_pictures(kind_BN, tokens)
        order = [each for shown in samples for each in shown]
        counts_B = torch.tensor([len(shown) for shown in samples], device=kind_BN.device)
        if not order:
            return GivenImages(None, None, counts_B)
        grid_I3 = torch.tensor([pictures[kind][1][number] for kind, number in order], device=kind_BN.device)
        return GivenImages(torch.cat([pictures[kind][0][number] for kind, number in order]), grid_I3, counts_B)

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        assert grid_I3 is not None
        rows, made = grid_I3.tolist(), {}
        shown = list(zip(torch.split(pixels, [count for count, _, _ in rows]), rows, strict=True))
        images = [(own, row) for own, row in shown if row[1]]
        videos = [own for own, row in shown if not row[1]]
        if images:
            made["pixel_values"] = padded_tiles(torch.cat([own for own, _ in images]), [len(own) for own, _ in images])
            made["image_sizes"] = torch.tensor([row[1:] for _, row in images])
            made["batch_num_images"] = torch.tensor([len(images)])
        if len(lengths := {len(own) for own in videos}) > 1:
            raise ValueError(f"videos of {sorted(lengths)} frames in one prompt; sample as many of each")
        return made | ({"pixel_values_videos": torch.stack(videos)} if videos else {})

    def image_bytes(self) -> int:
        return self.layout.tiles(self.nominal_image) * FP32_BYTES * 3 * self.layout.side**2

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes, at an MLP: the residual, its input to the GELU and the output."""
        vision = self.model.config.vision_config
        live = self.layout.whole * (2 * vision.hidden_size + 2 * vision.intermediate_size)
        return tower_peak(pixel_bytes, self.shape.element_bytes, self.layout.side, live)

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return projected features with newlines; statistics of the layer that made them are packed as they are."""
        assert batch.pixel_values is not None
        assert batch.image_grid_I3 is not None
        model, chosen = self.model.model, self.model.config.vision_feature_layer
        layers = [chosen] if isinstance(chosen, int) else list(chosen)
        pixels, grid = batch.pixel_values.to(self.model.dtype), batch.image_grid_I3.tolist()
        if statistics is None:
            features_IPC = patch_features(model.vision_tower, pixels, layers)
            return VisualStates(self._packed(model.multi_modal_projector(features_IPC), grid, model.image_newline))
        features_IPC, received_IP, keys_IPd = features_with_statistics(model.vision_tower, pixels, layers)
        tokens = self._packed(model.multi_modal_projector(features_IPC), grid, model.image_newline)
        received = self._packed(received_IP[..., None], grid, received_IP.new_zeros(1))
        keys = self._packed(keys_IPd, grid, keys_IPd.new_zeros(keys_IPd.shape[-1]))
        tiles = self._packed(torch.zeros_like(received_IP[..., None]), grid, received_IP.new_full((1,), -1))
        received, tiles = ([part_T1[:, 0] for part_T1 in part] for part in (received, tiles))
        return VisualStates(tokens, None, received, keys, tiles=[part_T.long() for part_T in tiles])

    def project(self, states_TC: Tensor) -> Tensor:
        return states_TC  # they are projected before they are resampled

    def visual_rows(self, row: Sequence[int]) -> int:
        """Count the visual tokens of a picture, by its row of ``image_grid_I3``."""
        count, height, width = row
        return self.layout.placeholders((height, width), cut=count > 1) if height else self.frames_of(count).total

    def frames_of(self, number: int) -> Frames:
        """Return the tokens of a video of as many frames: pooled patches, and a newline behind the last one."""
        return Frames(number, ((self.layout.patches + 1) // 2) ** 2, after=1)

    def picture_frames(self, batch: Batch) -> list[Frames | None]:
        rows = [] if batch.image_grid_I3 is None else batch.image_grid_I3.tolist()
        return [None if height else self.frames_of(count) for count, height, _ in rows]

    def _packed(self, values_IPC: Tensor, grid: list[list[int]], newline_C: Tensor) -> list[Tensor]:
        """Put every tile's patches in the order of placeholders, [T, C] for each image and frame."""
        packed = []
        for own, (_, height, width) in zip(torch.split(values_IPC, [row[0] for row in grid]), grid, strict=True):
            if height:
                packed.append(self.layout.pack(own, (height, width), newline_C))
                continue
            *frames, last = self.model.model.apply_pooling(own)
            packed += [*frames, torch.cat([last, newline_C.to(last)[None]])]
        return packed


def _images(given: Mapping[str, Tensor], layout: TileLayout) -> Pictures:
    pixels, sizes, counts = (given.get(name) for name in ("pixel_values", "image_sizes", "batch_num_images"))
    if pixels is None and sizes is None:
        return [], []
    whole = (
        sizes is not None and sizes.dim() == 2 and sizes.shape[1] == 2 and len(sizes) and not sizes.is_floating_point()
    )
    if pixels is not None and sizes is not None and pixels.dim() == 5 and whole and bool((sizes > 0).all()):
        several = [False] * len(sizes)
        if counts is not None:
            several = [count != 1 for count in counts.tolist() for _ in range(count)]
        if len(pixels) == len(sizes) == len(several):
            tiles = [1 if among else layout.tiles(size) for size, among in zip(sizes.tolist(), several, strict=True)]
            if max(tiles) <= pixels.shape[1]:
                rows = [(count, height, width) for count, (height, width) in zip(tiles, sizes.tolist(), strict=True)]
                return [own[:count] for own, count in zip(pixels, tiles, strict=True)], rows
    others = "image_sizes [images, 2] and batch_num_images"
    raise ValueError(f"pixel_values must be [images, tiles, 3, height, width] with {others}; {UNCUT}")


def _videos(given: Mapping[str, Tensor], layout: TileLayout) -> Pictures:
    if (pixels := given.get("pixel_values_videos")) is None:
        return [], []
    if pixels.dim() != 5 or pixels.shape[2:] != (3, layout.side, layout.side) or not pixels.shape[1]:
        raise ValueError(f"pixel_values_videos must be [videos, frames, 3, {layout.side}, {layout.side}]; {UNCUT}")
    return list(pixels), [(pixels.shape[1], 0, 0)] * len(pixels)
