"""Pictures of Qwen's VLMs: sizes, patches, grids, runs of placeholders, processor names and mRoPE positions.

A video is one layer of patches per two frames (the last frame twice where they are odd), at most ``VIDEO_LAYERS`` times
the pixels of an image (a bound of ours). Frames are scaled by PIL: torchvision's pixels differ in the last bits.

Legend: B batch, N positions, I images and videos, V videos, F frames, P patches of a frame.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from subtoken_train.families.family import Family, GivenImages
from subtoken_train.families.images import UNCUT, Picture, Video, check_square, mean_colour, pad_to_square
from subtoken_train.types import Batch, Frames, Region

IMAGE, VIDEO = 1, 2  # values of ``mm_token_type_ids``


CAP_TOKENS = 1280  # visual tokens of an image at most, unless a cap is given; published ones allow 16,384
VIDEO_LAYERS = 4
_MAX_ASPECT = 200  # longer side / shorter side that Qwen's resizing accepts


class QwenInputs(Family):
    """The half of a Qwen VLM that turns pictures into inputs."""

    least_pixels: ClassVar[int] = 56 * 56  # pixels to which its published processors scale small images up
    counted: ClassVar[int] = 1  # times that its processor counts an image's pixels against its bounds
    takes_videos = tells_frames = True
    may_pad = True
    image_inputs: ClassVar[tuple[str, ...]] = (
        *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
        "mm_token_type_ids",
    )
    tower_positions = "mrope"
    nominal_image = (336, 336)

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        self.vision = model.config.vision_config
        self.unit = int(self.vision.patch_size * self.vision.spatial_merge_size)  # pixels of a visual token's side
        own = None if processor is None else processor.image_processor.size
        self.pads, self.min_pixels, self.max_pixels = False, self.least_pixels, CAP_TOKENS * self.unit**2
        if own is not None:
            self.min_pixels = int(own["shortest_edge"]) // self.counted
            self.max_pixels = min(int(own["longest_edge"]) // self.counted, self.max_pixels)

    def is_visual(self, ids: Tensor) -> Tensor:
        return self.kinds(ids).ne(0)

    def kinds(self, ids: Tensor) -> Tensor:
        """Return ``mm_token_type_ids``: 1 at images' placeholders, 2 at videos', 0 at text."""
        config = self.model.config
        kinds: Tensor = IMAGE * (ids == config.image_token_id).int() + VIDEO * (ids == config.video_token_id).int()
        return kinds

    def limit_pixels(self, max_pixels: int) -> None:
        if max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels={max_pixels} is below {self.min_pixels}, to which small images are scaled up")
        self.max_pixels = max_pixels

    def pad_images(self) -> None:
        """Show images as squares from now on, see ``BackboneConfig.image_aspect_ratio``."""
        self.pads = True  # frames of videos keep their shape

    def framed(self, image: Image.Image) -> Image.Image:
        return pad_to_square(image, mean_colour(self.processor.image_processor)) if self.pads else image

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        size = image_size or self.nominal_image
        if self.pads:
            check_square(*size)
            size = (max(size), max(size))
        high, wide = self.image_size(*size)
        return high * wide // self.unit**2

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels that an image of these is scaled to."""
        self.check_aspect(height, width)
        high, wide = smart_resize(height, width, self.unit, self.min_pixels, self.max_pixels)
        return int(high), int(wide)

    def layers(self, video: Video) -> int:
        """Count the layers of a video's grid."""
        return -(-len(video.frames) // int(self.vision.temporal_patch_size))

    def frame_size(self, video: Video) -> tuple[int, int]:
        """Return (height, width) in pixels that the frames of a video are scaled to."""
        self.check_aspect(*video.size)
        cap = min(self.max_pixels, VIDEO_LAYERS * self.max_pixels // self.layers(video))
        high, wide = smart_resize(*video.size, self.unit, self.min_pixels, max(self.min_pixels, cap))
        return int(high), int(wide)

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        if not isinstance(picture, Video):
            return super().picture_text(picture, marker, together)
        high, wide = self.frame_size(picture)
        return self.video_text(picture, high * wide // self.unit**2)

    def video_text(self, video: Video, tokens: int) -> str:
        """Return the text of a video whose layers have this many visual tokens each."""
        return str(self.processor.video_token) * self.layers(video) * tokens

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return all pictures' flattened patches, [num_patches, channels * pixels], and the grid of each in patches."""
        made = [self._patches(image) for image in images]
        return torch.cat([patches for patches, _ in made]), torch.cat([grid for _, grid in made])

    def _patches(self, picture: Picture) -> tuple[Tensor, Tensor]:
        """Return a picture's patches, of a video [layers * P, channels * pixels], and its grid [1, 3]."""
        processor = self.processor.image_processor
        if not isinstance(picture, Video):
            size = {"shortest_edge": self.counted * self.min_pixels, "longest_edge": self.counted * self.max_pixels}
            made = processor([self.framed(picture)], size=size, return_tensors="pt")
            return made["pixel_values"], made["image_grid_thw"]
        (high, wide), depth, side = self.frame_size(picture), processor.temporal_patch_size, processor.patch_size
        frames = [frame.resize((wide, high), Image.Resampling(processor.resample)) for frame in picture.frames]
        made = processor(frames, do_resize=False, return_tensors="pt")
        patches: Tensor = made["pixel_values"]
        alone_FPCx = patches.reshape(len(frames), len(patches) // len(frames), -1, depth, side * side)[:, :, :, 0]
        whole = torch.cat([alone_FPCx, alone_FPCx[-1:].expand(-len(frames) % depth, -1, -1, -1)])
        # layer, patch, channel, frame of the layer, pixel
        layers = whole.reshape(-1, depth, *whole.shape[1:]).permute(0, 2, 3, 1, 4)
        _, height, width = made["image_grid_thw"][0].tolist()
        return layers.flatten(2).flatten(0, 1), torch.tensor([[len(layers), height, width]])

    def video_runs(self, grid: list[int]) -> list[int]:
        """Return the lengths of the runs of placeholders of a video of (time, height, width) patches."""
        return [self.grid_tokens(grid)]

    def grid_tokens(self, grid: Sequence[int]) -> int:
        """Count the visual tokens of a grid of (time, height, width) patches."""
        time, height, width = grid
        return int(time * height * width) // int(self.vision.spatial_merge_size) ** 2

    def _pictures(self, kinds_BN: Tensor, names: list[str], *rows: list[list[int]]) -> tuple[list[int], list[int]]:
        """Match runs of placeholders with grids; return every picture's kind, and each prompt's count."""
        runs = [[(kind, len(list(run))) for kind, run in groupby(row) if kind] for row in kinds_BN.tolist()]
        left: list[Iterator[list[int]]] = [iter(each) for each in rows]
        kinds, counts, fit = list[int](), list[int](), True
        for prompt in runs:
            ahead, before = list(prompt), len(kinds)
            while ahead and fit:
                kind = ahead[0][0]
                grid = next(left[0 if kind == IMAGE else -1], None)
                runs_for = self.video_runs if kind == VIDEO else lambda grid: [self.grid_tokens(grid)]
                wanted = [] if grid is None else [(kind, length) for length in runs_for(grid)]
                fit = bool(wanted) and ahead[: len(wanted)] == wanted
                ahead = ahead[len(wanted) :]
                kinds.append(kind)
            counts.append(len(kinds) - before)
        if fit and all(next(each, None) is None for each in left):
            return kinds, counts
        shown = [self.grid_tokens(grid) for each in rows for grid in each]
        lengths = [length for prompt in runs for _, length in prompt]
        words = f"images of {shown} visual tokens but runs of {lengths} image tokens"
        raise ValueError(f"{words} in the batch of records {', '.join(names)}")

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read flattened patches and the grids that count them; images and videos in the order of the prompts."""
        images, videos = self._of_each(given, *self.image_inputs[:2]), self._of_each(given, *self.image_inputs[2:4])
        rows = ([grid.tolist() for _, grid in own] for own in (images, videos))
        names = [f"prompt {row}" for row in range(len(visual_BN))]
        kinds, counts = self._pictures(self.kinds(given["input_ids"]) * visual_BN.int(), names, *rows)
        counts_B = torch.tensor(counts, device=visual_BN.device)
        if not kinds:
            return GivenImages(None, None, counts_B)
        parts = {IMAGE: iter(images), VIDEO: iter(videos)}
        patches, grids = zip(*(next(parts[kind]) for kind in kinds), strict=True)
        return GivenImages(torch.cat(patches), torch.stack(grids), counts_B, self.read_seconds(given, kinds))

    def _of_each(self, given: Mapping[str, Tensor], pixels_name: str, grid_name: str) -> list[tuple[Tensor, Tensor]]:
        pixels, grid_I3 = given.get(pixels_name), given.get(grid_name)
        if pixels is None and grid_I3 is None:
            return []
        whole = grid_I3 is not None and grid_I3.dim() == 2 and grid_I3.shape[1] == 3 and not grid_I3.is_floating_point()
        lengths = grid_I3.prod(-1).tolist() if grid_I3 is not None and whole else [-1]
        if pixels is None or grid_I3 is None or pixels.dim() != 2 or len(pixels) != sum(lengths):
            raise ValueError(f"{pixels_name} of {self.name} must be [patches, channels] with {grid_name}; {UNCUT}")
        return list(zip(torch.split(pixels, lengths), grid_I3, strict=True))

    def read_seconds(self, given: Mapping[str, Tensor], kinds: list[int]) -> Tensor | None:
        """Return ``Batch.seconds_I`` of a processor's output, for pictures of these kinds."""
        return None

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        kinds_BN = self.kinds(input_ids_BN)
        parts = self._of_each({"pixels": pixels, "grid": grid_I3}, "pixels", "grid") if grid_I3 is not None else []
        kinds, _ = self._pictures(kinds_BN, ["the prompt"] * len(kinds_BN), [grid.tolist() for _, grid in parts])
        made = {"mm_token_type_ids": kinds_BN}
        for kind, names in ((IMAGE, self.image_inputs[:2]), (VIDEO, self.image_inputs[2:4])):
            if own := [part for part, of in zip(parts, kinds, strict=True) if of == kind]:
                made[names[0]] = torch.cat([patches for patches, _ in own])
                made[names[1]] = torch.stack([grid for _, grid in own])
        return made

    def positions(self, batch: Batch) -> Tensor:
        """Return mRoPE ids [3, B, N] (time, height, width), whatever the padding side; 0 at padding."""
        ids_BN, visible_BN = batch.input_ids_BN.cpu(), (batch.regions_BN != Region.PADDING).cpu()
        kinds_BN = self.kinds(ids_BN) * visible_BN.int()
        grid_I3 = None if batch.image_grid_I3 is None else batch.image_grid_I3.cpu()
        kinds, _ = self._pictures(kinds_BN, batch.record_ids, [] if grid_I3 is None else grid_I3.tolist())
        is_video = torch.tensor([kind == VIDEO for kind in kinds], dtype=torch.bool)
        of = {kind: None if grid_I3 is None else grid_I3[is_video == (kind == VIDEO)] for kind in (IMAGE, VIDEO)}
        given = {"mm_token_type_ids": kinds_BN, "image_grid_thw": of[IMAGE], "video_grid_thw": of[VIDEO]}
        if batch.seconds_I is not None:
            given["second_per_grid_ts"] = batch.seconds_I.cpu()[is_video]
        position_3BN, _ = self.model.model.get_rope_index(ids_BN, attention_mask=visible_BN, **given)
        on_device: Tensor = position_3BN.to(batch.input_ids_BN.device)
        return on_device

    def picture_frames(self, batch: Batch) -> list[Frames | None]:
        kinds_BN = self.kinds(batch.input_ids_BN) * (batch.regions_BN != Region.PADDING).int()
        grids = [] if batch.image_grid_I3 is None else batch.image_grid_I3.tolist()
        kinds, _ = self._pictures(kinds_BN, batch.record_ids, grids)
        shown = zip(kinds, grids, strict=True)
        return [Frames(grid[0], self.grid_tokens([1, *grid[1:]])) if kind == VIDEO else None for kind, grid in shown]

    def check_aspect(self, height: int, width: int) -> None:
        """Raise ``ValueError`` for a picture that is too long and thin for Qwen's resizing."""
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise ValueError(f"an image of {height} x {width} pixels: {self.name} takes sides of 1 to {_MAX_ASPECT}")
