r"""InternVL3 and 3.5 in the transformers 5 format: InternViT tiles, four patches a token, Qwen2 or Qwen3; frames too.

A picture is scaled to a grid of square tiles of the nearest aspect ratio and cut; where there are several, the whole
picture, scaled to one tile, follows them. Each tile's patches are merged 2 x 2 (pixel shuffle), 256 tokens at 448
pixels. In a prompt a picture is ``<img>``, its tokens, ``</img>``: the marks are rows of text, as in the originals. A
video is a line ``Frame1: <img>...</img>`` per frame of one tile each.

The tiles are those of transformers' PIL image processor. Its processor returns nothing but tiles, so what a prompt
shows is read from its runs of image tokens: a frame is then a picture of its own, and for that to be of no account a
tower reducer's choice is made tile by tile. That frames have the pixels of transformers' video processor, which needs
torchvision, is not proven; with several images each keeps as many tiles as alone, as there (the originals' evaluations
divide them).

Legend: I tiles, P patches of a tile, N the class token before them, T visual tokens of a tile, c width of a patch, C of
a merged token (4 * c), D model width, H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config, Qwen3Config
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as tiling

from subtoken_train.families.family import Family, GivenImages, PilProcessor
from subtoken_train.families.images import FP32_BYTES, Picture, Video, copied_bytes
from subtoken_train.families.text import qwen3_config
from subtoken_train.families.towers import class_attention, merged_statistics
from subtoken_train.forks import undoing
from subtoken_train.types import APACHE, Batch, Licence, RenderedPrompt, TowerStatistics, Turn, VisualStates

_LICENCE = Licence("other", "qwen", "https://huggingface.co/Qwen/Qwen2.5-72B-Instruct/blob/main/LICENSE")


class InternVLProcessor(PilProcessor):
    """Tokenizer and PIL image processor."""

    image_reader: ClassVar[Any] = tiling.GotOcr2ImageProcessorPil
    image_token: ClassVar[str] = "<IMG_CONTEXT>"


class InternVLFamily(Family):
    """``InternVLForConditionalGeneration`` behind the family interface; pixel values are the tiles of all pictures."""

    name = "internvl"
    auto_processor = InternVLProcessor
    lora_pattern = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head", "model.vision_tower", "model.multi_modal_projector")
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "OpenGVLab/InternVL3-1B-hf": lambda: _published(_qwen2(896, 4864, 24, 14, 2)),
        "OpenGVLab/InternVL3-2B-hf": lambda: _published(_qwen2(1536, 8960, 28, 12, 2)),
        "OpenGVLab/InternVL3-8B-hf": lambda: _published(_qwen2(3584, 18944, 28, 28, 4)),
        "OpenGVLab/InternVL3_5-8B-HF": lambda: _published(qwen3_config(4096, 12288, 36, 32), 151671),
        "OpenGVLab/InternVL3_5-14B-HF": lambda: _published(qwen3_config(5120, 17408, 40, 40), 151671),
    }
    licences: ClassVar[dict[str, Licence]] = {
        **{f"OpenGVLab/InternVL3-{size}B-hf": _LICENCE for size in (1, 2, 8)},
        **{f"OpenGVLab/InternVL3_5-{size}B-HF": APACHE for size in (8, 14)},
    }
    originals: ClassVar[dict[str, str]] = {"internvl_chat": "OpenGVLab/InternVL3-8B-hf"}
    takes_videos = True
    in_tiles = True
    # four tiles and the whole: 1,280 visual tokens
    nominal_image = (896, 896)
    # our reading, of a question of six tokens: <|im_start|>user, a newline and <img>; </img>, the rest of the format
    paper_text: ClassVar[dict[str, int]] = {"system": 4, "query": 13}

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        config, vision = model.config, model.config.vision_config
        side, patch = set(vision.image_size), set(vision.patch_size)
        if len(side) > 1 or len(patch) > 1 or config.downsample_ratio != 0.5:
            raise ValueError(
                f"internvl with tiles of {vision.image_size}, patches of {vision.patch_size} and downsample_ratio "
                f"{config.downsample_ratio} is not supported; square ones and 0.5 are, as in every published InternVL3"
            )
        if config.vision_feature_select_strategy != "default" or config.vision_feature_layer != -1:
            raise ValueError(
                f"internvl with vision_feature_layer {config.vision_feature_layer} and vision_feature_select_strategy "
                f"{config.vision_feature_select_strategy!r} is not supported; -1 and default are, as published"
            )
        self.side, self.high = int(side.pop()), int(vision.image_size[0] // vision.patch_size[0])
        tiler = tiling.GotOcr2ImageProcessorPil() if processor is None else processor.image_processor
        self.least_tiles, self.most_tiles = int(tiler.min_patches), int(tiler.max_patches)

    @property
    def tile_tokens(self) -> int:
        """Return T."""
        return (self.high // 2) ** 2

    def limit_pixels(self, max_pixels: int) -> None:
        """Cut an image into fewer tiles; the whole picture beside them is not counted."""
        if max_pixels < self.side**2:
            raise ValueError(f"max_pixels={max_pixels} is below one tile of internvl, {self.side**2} pixels")
        self.most_tiles = min(self.most_tiles, max_pixels // self.side**2)

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        r"""Write the published template: ChatML without a system text; pictures stand where the prompt has them.

        ``<|im_start|>user\n<IMG_CONTEXT>\nquestion<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n``, in one
        piece.
        An answer's span ends with its ``<|im_end|>``; the newline after it carries no loss.
        """
        marker, text, spans = self.processor.image_token, "", []
        for turn in turns:
            words = turn.prompt.strip().replace("<image>", marker)
            text += f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
            if turn.answer is not None:
                start = len(text)
                text += f"{turn.answer.strip()}<|im_end|>"
                spans.append((start, len(text)))
                text += "\n"
        return RenderedPrompt(text, spans, marker)

    def tiles(self, size: tuple[int, int]) -> int:
        """Count the tiles of an image of (height, width) pixels, the whole among them."""
        columns, rows = tiling.get_optimal_tiled_canvas(size, (self.side, self.side), self.least_tiles, self.most_tiles)
        return int(columns * rows + (columns * rows > 1))

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Count the merged patches of all tiles of an image of (height, width) pixels."""
        return self.tiles(image_size or self.nominal_image) * self.tile_tokens

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        """Return an image between its marks; a video's frames line by line."""
        if isinstance(picture, Video):
            shown = f"<img>{marker * self.tile_tokens}</img>"
            return "\n".join(f"Frame{i + 1}: {shown}" for i in range(len(picture.frames)))
        return f"<img>{marker * self.visual_tokens((picture.height, picture.width))}</img>"

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, None]:
        """Return all pictures' tiles, [I, 3, H, W]: an image's row by row, then its whole; a video's, one a frame."""
        made, tiler = [], self.processor.image_processor
        for picture in images:
            is_video = isinstance(picture, Video)
            frames = list(picture.frames) if is_video else [picture]
            cut = {"crop_to_patches": not is_video, "max_patches": self.most_tiles}
            made.append(tiler(frames, return_tensors="pt", **cut)["pixel_values"])
        pixels = torch.cat(made)
        self._check_tiles(pixels)
        return pixels, None

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read tiles one after another; every run of image tokens is a picture."""
        pixels, runs = given.get("pixel_values"), [_runs(row) for row in visual_BN.tolist()]
        if pixels is not None:
            self._check_tiles(pixels)
            odd = [run for of_sample in runs for run in of_sample if run % self.tile_tokens]
            tokens = sum(map(sum, runs))
            if odd or tokens != len(pixels) * self.tile_tokens:
                found = f"a run of {odd[0]} image tokens" if odd else f"{tokens} image tokens for {len(pixels)} tiles"
                raise ValueError(
                    f"{found}: internvl takes {self.tile_tokens} for each tile; pass the processor's whole output, "
                    "made with the same images"
                )
        counts = torch.tensor([len(of_sample) for of_sample in runs], device=visual_BN.device)
        return GivenImages(pixels, None, counts)

    def image_bytes(self) -> int:
        """Return the bytes of the nominal image's tiles, fp32."""
        return int(FP32_BYTES * 3 * self.side**2 * self.tiles(self.nominal_image))

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes for all tiles: the pixels in the tower's dtype and a layer's MLP at work.

        That is three states of a patch (the stream before and after attention, normed), and what goes into the GELU and
        comes out.
        """
        vision, element = self.model.config.vision_config, self.shape.element_bytes
        patches = (self.high**2 + 1) * (pixel_bytes // (FP32_BYTES * 3 * self.side**2))
        states = 3 * vision.hidden_size + 2 * vision.intermediate_size
        return int(copied_bytes(pixel_bytes, element) + patches * element * states)

    @classmethod
    def tower_statistics(cls, config: Any) -> frozenset[TowerStatistics]:
        """Return all kinds: the class token's attention, by heads and unsplit."""
        return frozenset({"received", "class", "unsplit"})

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates | None:
        """Return every tile's merged patches, an entry per tile; statistics are the last layer's (``towers``).

        The class token has no place among merged tokens: no reducer is given it to emit.
        """
        if batch.pixel_values is None:
            return None
        tower, calls = self.model.model.vision_tower, []
        last = tower.encoder.layer[-1]
        hook = last.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
        with undoing(hook.remove):
            hidden_INc = tower(batch.pixel_values.to(self.model.dtype)).last_hidden_state
        merged_ITC = self.merged(hidden_INc[:, 1:])
        if statistics is None:
            return VisualStates(list(merged_ITC))
        heads = 1 if statistics == "unsplit" else None
        received_IP, keys_IPd = class_attention(last.attention, last.layernorm_before(calls[0]), heads)
        return VisualStates(list(merged_ITC), None, *merged_statistics(self.merged, received_IP, keys_IPd))

    def merged(self, patches_IPc: Tensor) -> Tensor:
        """Merge each tile's patches 2 x 2 by transformers' own pixel shuffle, [I, T, 4 * c]."""
        tiles, _, width = patches_IPc.shape
        grid = patches_IPc.reshape(tiles, self.high, self.high, width)
        shuffled: Tensor = self.model.model.pixel_shuffle(grid, scale_factor=0.5)
        return shuffled.flatten(1, 2)

    def project(self, states_TC: Tensor) -> Tensor:
        """Apply the multi-modal projector."""
        features: Tensor = self.model.model.multi_modal_projector(states_TC)
        return features

    def _check_tiles(self, pixels: Tensor) -> None:
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != (3, self.side, self.side):
            raise ValueError(
                f"pixel_values {list(pixels.shape)}: this internvl takes tiles [tiles, 3, {self.side}, {self.side}]; "
                "use the processor of the same checkpoint, and pass its whole output"
            )


def _runs(visual_N: list[bool]) -> list[int]:
    """Return the lengths of the runs of image tokens."""
    return [len(list(run)) for is_visual, run in groupby(visual_N) if is_visual]


def _qwen2(width: int, mlp: int, layers: int, heads: int, kv_heads: int) -> Qwen2Config:
    """Return the Qwen2.5 of an InternVL3; its dynamic rotary scaling begins past any prompt's positions."""
    return Qwen2Config(
        vocab_size=151674,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000000.0},
        eos_token_id=151645,
        tie_word_embeddings=False,
    )


def _published(text: Qwen2Config | Qwen3Config, image_token: int = 151667) -> InternVLConfig:
    """Return InternViT-300M on a language model."""
    vision = InternVLVisionConfig(attention_bias=True)
    return InternVLConfig(vision_config=vision, text_config=text, image_token_id=image_token, tie_word_embeddings=False)
