r"""Idefics3 and SmolVLM in the transformers 5 format: SigLIP tiles, 4, 9 or 16 patches a token, Llama or SmolLM2.

A picture's longer side is scaled to four tiles, up or down, its sides are rounded up to whole tiles, and it is cut; the
whole picture, scaled to one tile, follows. Each tile's patches are merged (pixel shuffle): 64 tokens of 512 x 512
pixels in SmolVLM-256M and -500M, 81 of 384 x 384 in -2.2B, 169 of 364 x 364 in Idefics3. In a prompt every tile stands
behind ``<fake_token_around_image>`` and its place (``<row_1_col_2>``), a newline ends each row of tiles, and the whole
is ``<global-img>``: these marks are rows of text, as in the models, which no reducer drops.

The tiles are those of transformers' PIL image processor. A prompt shows tiles and not where a picture ends, so what a
prompt's inputs show is one picture a tile, and for that to be of no account a tower reducer's choice is made tile by
tile. SmolVLM2's videos are not taken: its processor writes the number of frames in words.

Legend: B batch, I tiles, M tiles of the sample with the most, P patches of a tile, T visual tokens of a tile, c width
of a patch, C of a merged token, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Idefics3Config, LlamaConfig, SmolVLMConfig
from transformers.models.idefics3 import image_processing_pil_idefics3 as tiling

from subtoken_train.families.family import Family, GivenImages, PilProcessor
from subtoken_train.families.images import FP32_BYTES, Picture, Video, copied_bytes
from subtoken_train.families.llava.tiles import padded_tiles
from subtoken_train.families.text import llama31_config
from subtoken_train.families.towers import merged_statistics, with_statistics
from subtoken_train.types import APACHE, Batch, Licence, RenderedPrompt, TowerStatistics, Turn, VisualStates

FAKE = "<fake_token_around_image>"
_END = "<end_of_utterance>"
_TILES = 4
"""Tiles that the longer side of a picture is scaled to, as published."""


class Idefics3Processor(PilProcessor):
    """Tokenizer and PIL image processor."""

    image_reader: ClassVar[Any] = tiling.Idefics3ImageProcessorPil
    image_token: ClassVar[str] = "<image>"


class Idefics3Family(Family):
    """Idefics3-8B, and the first SmolVLM, which has its ``model_type``; pixel values are the tiles of all pictures."""

    name = "idefics3"
    auto_processor = Idefics3Processor
    # Anchored: the SigLIP tower has q_proj and v_proj too.
    lora_pattern = r"model\.text_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head", "model.vision_model", "model.connector")
    image_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_attention_mask")
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "HuggingFaceTB/SmolVLM-256M-Instruct": lambda: Idefics3Config(**_smallest()),
        "HuggingFaceTB/SmolVLM-500M-Instruct": lambda: Idefics3Config(**_small()),
        "HuggingFaceTB/SmolVLM-Instruct": lambda: Idefics3Config(**_large(49155)),
        "HuggingFaceM4/Idefics3-8B-Llama3": lambda: Idefics3Config(**_idefics3()),
    }
    licences: ClassVar[dict[str, Licence]] = dict.fromkeys(published, APACHE)
    in_tiles = True
    # a photograph: four by three tiles and the whole, 832 visual tokens of SmolVLM-500M
    nominal_image = (768, 1024)
    # our reading, of a question of six tokens: <|im_start|>User: and the marks of the first tile; then the other tiles'
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 38}

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        vision, self.merge = model.config.vision_config, int(model.config.scale_factor)
        self.side, self.high = int(vision.image_size), int(vision.image_size // vision.patch_size)
        if self.high % self.merge:
            raise ValueError(
                f"{self.name} with tiles of {self.high} x {self.high} patches and scale_factor {self.merge} is not "
                "supported: patches are merged in squares; use a scale_factor that divides the tile's side"
            )
        tiler = None if processor is None else processor.image_processor
        self.longest = self.side * _TILES if tiler is None else int(tiler.size["longest_edge"])
        self.cuts = tiler is None or bool(tiler.do_image_splitting)

    @property
    def decoder(self) -> Any:
        return self.model.model.text_model

    @property
    def tile_tokens(self) -> int:
        """Return T."""
        return (self.high // self.merge) ** 2

    def limit_pixels(self, max_pixels: int) -> None:
        """Cut an image into fewer tiles; the whole picture beside them is not counted."""
        if max_pixels < self.side**2:
            raise ValueError(f"max_pixels={max_pixels} is below one tile of {self.name}, {self.side**2} pixels")
        self.longest = min(self.longest, math.isqrt(max_pixels) // self.side * self.side)

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        r"""Write the published template; pictures stand where the prompt has them, without white space beside them.

        ``<|im_start|>User:<image>question<end_of_utterance>\nAssistant: answer<end_of_utterance>\n``, in one piece; the
        first is the tokenizer's BOS, and a space stands behind ``User:`` where the turn begins with words. An answer's
        span begins with its space and ends with its mark; the newline after it carries no loss.
        """
        marker, spans = self.processor.image_token, []
        text = self.tokenizer.bos_token or ""
        for turn in turns:
            words = marker.join(part.strip() for part in turn.prompt.split("<image>"))
            text += f"User:{'' if words.startswith(marker) else ' '}{words}{_END}\nAssistant:"
            if turn.answer is not None:
                start = len(text)
                text += f" {turn.answer.strip()}{_END}"
                spans.append((start, len(text)))
                text += "\n"
        return RenderedPrompt(text, spans, marker)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tiles of an image of (height, width) pixels; (0, 0): it is its whole alone.

        Written out, because the second side follows the rounded first one, which transformers' own count leaves out.
        """
        if not self.cuts:
            return 0, 0
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
        """Count the merged patches of all tiles of an image of (height, width) pixels."""
        rows, columns = self.grid(image_size or self.nominal_image)
        return (rows * columns + 1) * self.tile_tokens

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        """Return an image's tiles row by row, then its whole, each behind its marks."""
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
        made = [self.processor.image_processor(image, **scaled)["pixel_values"][0] for image in images]
        pixels = torch.cat(made)
        self._check_tiles(pixels)
        tokens = sum(self.visual_tokens((image.height, image.width)) for image in images)
        self._check_count(len(pixels), tokens)
        return pixels, None

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Read every prompt's tiles, [B, M, 3, H, W], and leave out those of zeros, which fill up the batch."""
        pixels, mask, tokens_B = given.get("pixel_values"), given.get("pixel_attention_mask"), visual_BN.sum(-1)
        if pixels is not None:
            if pixels.dim() != 5 or len(pixels) != len(visual_BN):
                raise ValueError(
                    f"pixel_values {list(pixels.shape)} of {self.name} must be [prompts, tiles, 3, height, width]; "
                    "pass the processor's whole output"
                )
            real_BM = pixels.flatten(2).any(-1)
            for count, tokens in zip(real_BM.sum(-1).tolist(), tokens_B.tolist(), strict=True):
                self._check_count(count, tokens)
            pixels = pixels[real_BM]
            self._check_tiles(pixels)
            if mask is not None and not bool(mask[real_BM].all()):
                raise ValueError(f"pixel_attention_mask hides a part of a tile; {self.name} takes whole tiles here")
        return GivenImages(pixels, None, tokens_B // self.tile_tokens)

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        """Return them as transformers' processor does, prompts of fewer tiles filled up with zeros."""
        tiles_B = self.is_visual(input_ids_BN).sum(-1) // self.tile_tokens
        return {"pixel_values": padded_tiles(pixels, tiles_B.tolist())}

    def image_bytes(self) -> int:
        """Return the bytes of the nominal image's tiles, fp32."""
        return FP32_BYTES * 3 * self.side**2 * (self.visual_tokens() // self.tile_tokens)

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes for all tiles: the pixels in the tower's dtype and a layer's MLP at work.

        That is three states of a patch (the layer's input, the stream after attention, normed), and what goes into the
        GELU and comes out.
        """
        vision, element = self.model.config.vision_config, self.shape.element_bytes
        patches = self.high**2 * (pixel_bytes // (FP32_BYTES * 3 * self.side**2))
        states = 3 * vision.hidden_size + 2 * vision.intermediate_size
        return int(copied_bytes(pixel_bytes, element) + patches * element * states)

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates | None:
        """Return every tile's merged patches, an entry per tile; statistics are the last layer's (``towers``)."""
        if batch.pixel_values is None:
            return None
        tower, pixels = self.model.model.vision_model, batch.pixel_values.to(self.model.dtype)
        if statistics is None:
            return VisualStates(list(self.merged(tower(pixels).last_hidden_state)))
        hidden_IPc, *parts = with_statistics(
            tower.encoder.layers[-1].self_attn, lambda: tower(pixels).last_hidden_state
        )
        return VisualStates(list(self.merged(hidden_IPc)), None, *merged_statistics(self.merged, *parts))

    def merged(self, patches_IPc: Tensor) -> Tensor:
        """Merge each tile's patches by transformers' own pixel shuffle, [I, T, C]."""
        shuffled: Tensor = self.model.model.connector.pixel_shuffle(patches_IPc, self.merge)
        return shuffled

    def project(self, states_TC: Tensor) -> Tensor:
        """Apply the connector's projection."""
        features: Tensor = self.model.model.connector.modality_projection(states_TC)
        return features

    def _check_tiles(self, pixels: Tensor) -> None:
        if tuple(pixels.shape[1:]) != (3, self.side, self.side):
            raise ValueError(
                f"tiles of {list(pixels.shape[1:])}: this {self.name} takes {[3, self.side, self.side]}; use the "
                "processor of the same checkpoint, and pass its whole output"
            )

    def _check_count(self, tiles: int, tokens: int) -> None:
        if tiles * self.tile_tokens != tokens:
            raise ValueError(
                f"{tokens} image tokens for {tiles} tiles: {self.name} takes {self.tile_tokens} for each tile; pass "
                "the whole output of the checkpoint's processor, made with the same images"
            )


class SmolVLMFamily(Idefics3Family):
    """SmolVLM2 (256M, 500M, 2.2B): Idefics3's parts around SmolLM2; images, and no videos."""

    name = "smolvlm"
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": lambda: SmolVLMConfig(**_smallest()),
        "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": lambda: SmolVLMConfig(**_small()),
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct": lambda: SmolVLMConfig(**_large(49280)),
    }
    licences: ClassVar[dict[str, Licence]] = dict.fromkeys(published, APACHE)


def _smallest() -> dict[str, Any]:
    return _published(_smollm2(576, 1536, 30, 9, 3), 512)


def _small() -> dict[str, Any]:
    return _published(_smollm2(960, 2560, 32, 15, 5), 512)


def _large(vocabulary: int) -> dict[str, Any]:
    return _published(_smollm2(2048, 8192, 24, 32, 32, vocabulary, 16384, 273768.0), 384)


def _idefics3() -> dict[str, Any]:
    text = llama31_config()
    text.vocab_size = 128259
    return {**_published(text, 364), "image_token_id": 128257}


def _smollm2(
    width: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int = 49280,
    positions: int = 8192,
    theta: float = 1e5,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )


def _published(text: LlamaConfig, side: int) -> dict[str, Any]:
    """Return a configuration's fields for tiles of ``side`` pixels: SigLIP-base for those of 512, else So400m."""
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    if side == 512:
        vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return {
        "text_config": text,
        "vision_config": {**vision, "image_size": side, "patch_size": 16 if side == 512 else 14},
        "scale_factor": {512: 4, 384: 3, 364: 2}[side],
        "image_token_id": 49190,
        "tie_word_embeddings": False,
    }
