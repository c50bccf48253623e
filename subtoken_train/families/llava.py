"""LLaVA-1.5 and LLaVA-NeXT in the transformers 5 format.

Legend: B batch, N positions (of the tower: class token first), I images or tiles, P patches of a tile, T visual tokens
(placeholders of a picture in NeXT), C tower width, D model width, H heads, d head width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from subtoken_train.families.chat import LLAVA_MODES, llava_chat
from subtoken_train.families.family import Family, GivenImages
from subtoken_train.families.images import FP32_BYTES, UNCUT, check_square, mean_colour, pad_to_square, tower_peak
from subtoken_train.families.tiles import TileLayout, pictures_per_sample
from subtoken_train.families.towers import class_attention
from subtoken_train.types import APACHE, Batch, TowerStatistics, VisualStates

_YI_IMAGE_TOKEN = 64000  # image token of the 34B LLaVA-NeXT, the only one on Yi; it stands behind Yi's vocabulary


class LlavaFamily(Family):
    """LLaVA-1.5 (any size) in the transformers 5 format: CLIP tower, projector, Llama-like language model."""

    name = "llava"
    # 595 = 576 + 19; how the 19 split is our reading. The system text cannot be among them: with it 35 tokens stand
    # before the image (FitPrune and SparseVLM hard-code that), without it 5 (as FastV's demo does).
    paper_text = {"system": 5, "query": 14}  # noqa: RUF012
    chooses_chat = True
    chat = llava_chat()

    def choose_chat(self, template: str | None, system: str | None) -> None:
        """Take another chat format, or system text; None: the family's own."""
        self.chat = llava_chat(template, system)

    @property
    def nominal_text(self) -> dict[str, int]:
        return self.chat.tokens or self.paper_text

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Count the patches of the tower's fixed resolution (CLS dropped by the ``default`` strategy)."""
        if image_size is not None:
            check_square(*image_size)
        vision = self.model.config.vision_config
        cls_kept = self.model.config.vision_feature_select_strategy != "default"
        return int((vision.image_size // vision.patch_size) ** 2 + cls_kept)

    def framed(self, image: Image.Image) -> Image.Image:
        return pad_to_square(image, mean_colour(self.processor.image_processor))

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        squares = [self.framed(image) for image in images]
        return self.processor.image_processor(squares, return_tensors="pt")["pixel_values"], None

    def image_bytes(self) -> int:
        return int(FP32_BYTES * 3 * self.model.config.vision_config.image_size**2)

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes: every layer's hidden states, and at an MLP three states around the quick GELU."""
        vision = self.model.config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2 + 1
        live = (vision.num_hidden_layers + 1) * vision.hidden_size + 3 * vision.intermediate_size
        return tower_peak(pixel_bytes, self.shape.element_bytes, vision.image_size, patches * live)

    @classmethod
    def tower_statistics(cls, config: Any) -> frozenset[TowerStatistics]:
        """Return all kinds if the class token is no visual token itself, else none."""
        return frozenset({"received", "class", "unsplit"} if config.vision_feature_select_strategy == "default" else ())

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return CLIP's hidden states; statistics are from the layer that made them, ``unsplit`` ones from the last."""
        assert batch.pixel_values is not None
        config, tower = self.model.config, self.model.model.vision_tower
        states = tower(batch.pixel_values.to(self.model.dtype), output_hidden_states=True).hidden_states
        chosen = config.vision_feature_layer
        indices = [index % len(states) for index in ([chosen] if isinstance(chosen, int) else chosen)]
        hidden_INC = torch.cat([states[index] for index in indices], dim=-1)
        has_cls = config.vision_feature_select_strategy == "default"
        tokens_ITC = hidden_INC[:, 1:] if has_cls else hidden_INC
        if statistics is None:
            return VisualStates(list(tokens_ITC))
        if not has_cls or indices[-1] == 0:
            raise ValueError("a tower's reducer needs a layer past the embeddings, and the strategy 'default'")
        whole = statistics == "unsplit"
        number = len(tower.encoder.layers) - 1 if whole else indices[-1] - 1
        layer = tower.encoder.layers[number]
        normed_INC = layer.layer_norm1(states[number])
        received_IT, keys_ITd = class_attention(layer.self_attn, normed_INC, 1 if whole else None)
        return VisualStates(list(tokens_ITC), list(hidden_INC[:, 0]), list(received_IT), list(keys_ITd))


LlavaFamily.licences["checkpoints/tiny-llava"] = APACHE


class LlavaNextFamily(LlavaFamily):
    """LLaVA-NeXT (LLaVA-1.6; Vicuna or Mistral) in the transformers 5 format: pictures of any resolution in CLIP tiles.

    Placeholders are the patches of the whole, then row after row of patches and a newline each: a visual row, as
    FastV's span of image tokens has it. To a tower reducer newlines receive no attention and are of no tile.
    """

    # a layout's row is (tiles, height, width of the picture in pixels); pixel values are the tiles of all pictures

    name = "llava_next"
    image_inputs = ("pixel_values", "image_sizes")
    # four tiles and the whole: the 2,880 patches of the papers, and 48 newlines
    nominal_image = (672, 672)
    chooses_chat = False
    in_tiles = True

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        if (strategy := model.config.vision_feature_select_strategy) != "default":
            raise ValueError(f"vision_feature_select_strategy {strategy!r} of llava_next is not supported; use default")
        self.layout = TileLayout.of(model.config)
        # by the language model, as the published templates; LLaVA takes llava_v1 for v1.6 on Vicuna
        mistral = model.config.text_config.model_type == "mistral"
        yi = model.config.image_token_id == _YI_IMAGE_TOKEN
        self.chat = LLAVA_MODES["mistral_instruct" if mistral else "chatml_direct" if yi else "llava_v1"]

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        return self.layout.placeholders(image_size or self.nominal_image)

    def framed(self, image: Image.Image) -> Image.Image:
        return image  # the processor scales and pads it tile by tile

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the tiles of all pictures, [tiles, 3, H, W], each picture's whole first, and the layouts."""
        made = [self.processor.image_processor(image, return_tensors="pt")["pixel_values"][0] for image in images]
        layouts = torch.tensor([[len(own), image.height, image.width] for own, image in zip(made, images, strict=True)])
        pixels = torch.cat(made)
        self._check_tiles(pixels, layouts)
        return pixels, layouts

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read tiles padded by transformers' processor, [pictures, most tiles, 3, H, W], or one after another."""
        pixels, sizes = given.get("pixel_values"), given.get("image_sizes")
        if pixels is None and sizes is None:
            return GivenImages(None, None, visual_BN.sum(-1) * 0)
        if pixels is None or sizes is None or pixels.dim() not in (4, 5) or sizes.dim() != 2 or sizes.shape[1] != 2:
            raise ValueError(f"pixel_values of llava_next must be tiles, with image_sizes [images, 2]; {UNCUT}")
        tiles = [self.layout.tiles(size) for size in sizes.tolist()]
        if pixels.dim() == 5:
            if len(pixels) != len(tiles):
                raise ValueError(f"pixel_values of {len(pixels)} images but image_sizes of {len(tiles)}")
            pixels = torch.cat([own[:count] for own, count in zip(pixels, tiles, strict=True)])  # no padding tiles
        layouts = torch.cat([torch.tensor(tiles, device=sizes.device)[:, None], sizes.long()], 1)
        self._check_tiles(pixels, layouts)
        tokens = [self.layout.placeholders(size) for size in sizes.tolist()]
        return GivenImages(pixels, layouts, pictures_per_sample(tokens, visual_BN))

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        assert grid_I3 is not None  # transformers' model takes tiles one after another too
        return {"pixel_values": pixels, "image_sizes": grid_I3[:, 1:]}

    def image_bytes(self) -> int:
        return self.layout.tiles(self.nominal_image) * super().image_bytes()

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return CLIP's hidden states in the order of placeholders; one channel more is 0 at patches, 1 at newlines."""
        states = super().visual_states(batch, statistics)
        assert batch.image_grid_I3 is not None
        layouts = batch.image_grid_I3.tolist()
        counts = [tiles for tiles, _, _ in layouts]

        def packed(each: list[Tensor], end: float) -> list[Tensor]:
            """Turn every tile's [P, C] into every picture's [T, C]; ``end`` stands in a newline's last channel."""
            newline_C = pad(each[0].new_zeros(each[0].shape[-1] - 1), (0, 1), value=end)
            pictures = torch.split(torch.stack(each), counts)
            return [self.layout.pack(own, row[1:], newline_C) for own, row in zip(pictures, layouts, strict=True)]

        tokens = packed([pad(tile_PC, (0, 1)) for tile_PC in states.tokens], 1)
        if states.received is None or states.keys is None or states.cls is None:
            return VisualStates(tokens)
        numbers = [torch.full_like(states.received[0], place) for count in counts for place in range(count)]
        received, tiles = (
            [picture_T1[:, 0] for picture_T1 in packed([tile_P[:, None] for tile_P in each], end)]
            for each, end in ((states.received, 0), (numbers, -1))
        )
        classes = list(torch.split(pad(torch.stack(states.cls), (0, 1)), counts))
        return VisualStates(tokens, classes, received, packed(states.keys, 0), tiles=[each.long() for each in tiles])

    def project(self, states_TC: Tensor) -> Tensor:
        """Apply the multi-modal projector to patches; newlines become the newline embedding."""
        features_TD = super().project(states_TC[:, :-1].contiguous())
        return torch.where(states_TC[:, -1:].bool(), self.model.model.image_newline.to(features_TD), features_TD)

    def _check_tiles(self, pixels: Tensor, layouts_I3: Tensor) -> None:
        side, rows = self.layout.side, layouts_I3.tolist()
        expected = [self.layout.tiles(size) for _, *size in rows]
        if tuple(pixels.shape[1:]) != (3, side, side) or len(pixels) != sum(expected):
            found = f"{len(pixels)} tiles of {tuple(pixels.shape[1:])} but this llava_next takes {sum(expected)} of"
            sizes = [tuple(size) for _, *size in rows]
            raise ValueError(f"{found} {(3, side, side)} for images of {sizes}; use the checkpoint's own processor")
        if [count for count, *_ in rows] != expected:
            raise ValueError(f"the image processor cuts {rows} tiles but the model {expected}")
