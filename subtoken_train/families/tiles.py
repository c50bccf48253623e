"""Pictures of any resolution as tiles: as LLaVA-NeXT and OneVision cut, pad and order them, and as runs of one length.

LLaVA's: a picture is scaled and padded to the best of a list of resolutions and cut into square tiles, behind the whole
picture, scaled to one. Patches of padding alone are cropped; each row that is left ends with the newline embedding.

Legend: B batch, N positions; of one picture: I tiles (the whole first), P patches of a tile, C channels, T
placeholders; of a batch: I pictures, M tiles of the largest, T tiles of all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llava_next import modeling_llava_next as anyres

from subtoken_train.families.family import Family
from subtoken_train.families.images import FP32_BYTES, UNCUT, tower_peak


def padded_tiles(tiles_T3HW: Tensor, tiles: Sequence[int]) -> Tensor:
    """Pad the tiles of every picture to those of the largest: [I, M, 3, H, W], zeros behind its own."""
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(tiles_T3HW, list(tiles))), batch_first=True)


def ordered_pictures(kind_BN: Tensor, tokens: Mapping[int, Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Return each sample's pictures in the order of its prompt: their kinds, and their numbers among that kind.

    ``kind_BN``: the kind of picture of each placeholder; 0 for text. ``tokens``: of every picture of a kind.
    """
    left, samples, fit = {kind: enumerate(own) for kind, own in tokens.items()}, [], True
    for row in kind_BN.tolist():
        shown, kinds = [], [kind for kind in row if kind]
        while kinds and fit:
            kind = kinds[0]
            number, count = next(left[kind], (0, 0))
            fit = count > 0 and kinds[:count] == [kind] * count
            shown.append((kind, number))
            kinds = kinds[count:]
        samples.append(shown)
    if not fit or any(next(pictures, None) is not None for pictures in left.values()):
        counts, given = [count for own in tokens.values() for count in own], (kind_BN != 0).sum(-1).tolist()
        raise ValueError(f"pictures of {counts} visual tokens but prompts of {given}; {UNCUT}")
    return samples


def pictures_per_sample(tokens: Sequence[int], visual_BN: Tensor) -> Tensor:
    """Count each sample's pictures, int64 [B], if all are of one kind."""
    samples = ordered_pictures(visual_BN.long(), {1: tokens})
    return torch.tensor([len(shown) for shown in samples], device=visual_BN.device)


_TOO_MANY = 1.1  # times the limit that the side of a crop may have before it is scaled down (LLaVA-OneVision)


@dataclass(frozen=True)
class TileLayout:
    """Cut of a model's pictures into tiles."""

    resolutions: tuple[tuple[int, int], ...]
    """(height, width) in pixels that pictures are scaled to, multiples of ``side``."""
    side: int  # side of a tile, in pixels
    patches: int  # in a row of a tile
    most_tiles: int | None = None  # patches of a crop at most, in tiles (``anyres_max_9``: 9); None: no limit

    @classmethod
    def of(cls, config: Any, most_tiles: int | None = None) -> Self:
        """Return the layout of a configuration with ``image_grid_pinpoints`` and a ``vision_config``."""
        vision = config.vision_config
        resolutions = tuple((int(high), int(wide)) for high, wide in config.image_grid_pinpoints)
        return cls(resolutions, int(vision.image_size), int(vision.image_size // vision.patch_size), most_tiles)

    @property
    def whole(self) -> int:
        """Count the patches of one tile, which are a picture's first placeholders."""
        return self.patches**2

    def tiles(self, size: Sequence[int]) -> int:
        """Count the tiles of a picture of (height, width) pixels, the whole among them."""
        return int(anyres.image_size_to_num_patches(tuple(size), list(self.resolutions), self.side))

    def crop(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of patches left of a picture of (height, width) pixels, without newlines."""
        rows, columns = self._grid(size)
        grid = torch.empty(1, rows * self.patches, columns * self.patches, device="meta")
        return self._limited(*anyres.unpad_image(grid, tuple(size)).shape[1:])

    def placeholders(self, size: Sequence[int], cut: bool = True) -> int:
        """Return T of a picture of (height, width) pixels; if it is not ``cut``, its whole and one newline."""
        high, wide = self.crop(size) if cut else (1, 0)
        return self.whole + high * (wide + 1)

    def pack(self, tiles_IPC: Tensor, size: Sequence[int], newline_C: Tensor) -> Tensor:
        """Put the patches of a picture (the whole first) in the order of its placeholders, [T, C]."""
        newline_C = newline_C.to(tiles_IPC)
        if len(tiles_IPC) == 1:
            return torch.cat([tiles_IPC[0], newline_C[None]])
        rows, columns = self._grid(size)
        grid = tiles_IPC[1:].reshape(rows, columns, self.patches, self.patches, -1)
        crop_Chw = anyres.unpad_image(grid.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2), tuple(size))
        if (shape := self._limited(*crop_Chw.shape[1:])) != crop_Chw.shape[1:]:
            crop_Chw = F.interpolate(crop_Chw[None], shape, mode="bilinear")[0]
        ends_Ch1 = newline_C[:, None, None].expand(-1, shape[0], 1)
        return torch.cat([tiles_IPC[0], torch.cat([crop_Chw, ends_Ch1], 2).flatten(1).T])

    def _grid(self, size: Sequence[int]) -> tuple[int, int]:
        rows, columns = anyres.get_anyres_image_grid_shape(tuple(size), list(self.resolutions), self.side)
        return int(rows), int(columns)

    def _limited(self, high: int, wide: int) -> tuple[int, int]:
        if self.most_tiles is None:
            return high, wide
        ratio = math.sqrt(high * wide / (self.most_tiles * self.whole))
        return (int(high // ratio), int(wide // ratio)) if ratio > _TOO_MANY else (high, wide)


class MergedTilesFamily(Family):
    """A family whose pictures are tiles of equally many merged patches; a tower reducer chooses tile by tile."""

    in_tiles = True
    side: int  # pixels of a tile's side
    high: int  # patches of a tile's side
    merge: int  # patches of a visual token's side
    class_tokens: ClassVar[int] = 0  # tokens of a tile's tower beside its patches

    @property
    def tile_tokens(self) -> int:
        """Return the visual tokens of a tile."""
        return (self.high // self.merge) ** 2

    def most_pixels(self, max_pixels: int) -> int:
        """Return the cap of an image, which must hold a tile; the whole picture beside its tiles is not counted."""
        if max_pixels < self.side**2:
            raise ValueError(f"max_pixels={max_pixels} is below one tile of {self.name}, {self.side**2} pixels")
        return max_pixels

    def image_bytes(self) -> int:
        return FP32_BYTES * 3 * self.side**2 * (self.visual_tokens() // self.tile_tokens)

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes, at a layer's MLP: its input, the stream, normed, and the GELU's input and output."""
        vision, patches = self.model.config.vision_config, self.high**2 + self.class_tokens
        live = patches * (3 * vision.hidden_size + 2 * vision.intermediate_size)
        return tower_peak(pixel_bytes, self.shape.element_bytes, self.side, live)

    def check_tiles(self, pixels: Tensor) -> None:
        """Raise ``ValueError`` unless pixels are tiles of the model's size."""
        if tuple(pixels.shape[1:]) != (3, self.side, self.side):
            takes = f"{self.name} takes {[3, self.side, self.side]}; use the processor of the same checkpoint"
            raise ValueError(f"tiles of {list(pixels.shape[1:])}: {takes}")

    def check_count(self, tiles: int, tokens: int) -> None:
        """Raise ``ValueError`` unless as many tiles take as many image tokens."""
        if tiles * self.tile_tokens != tokens:
            raise ValueError(f"{tokens} image tokens for {tiles} tiles: {self.name} takes {self.tile_tokens} a tile")
