"""GLM-4.1V and GLM-4.5V in the transformers 5 format: chat format, marks of pictures, and what differs from Qwen's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Glm4vConfig, Glm4vMoeConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize

from subtoken_train.families.family import PilProcessor
from subtoken_train.families.images import Picture, Video
from subtoken_train.families.qwen_vl.inputs import IMAGE, VIDEO
from subtoken_train.families.qwen_vl.model import TimedVLFamily
from subtoken_train.types import MIT, Licence, RenderedPrompt, Turn

_TEXT = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 12, 12],
    },
}
_VISION = {"hidden_size": 1536, "depth": 24, "num_heads": 12, "image_size": 336, "out_hidden_size": 4096}


def _glm41() -> Glm4vConfig:
    heads = {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2}
    text, vision = ({**shared, "intermediate_size": 13696} for shared in (_TEXT, _VISION))
    return Glm4vConfig(text_config=text | heads, vision_config=vision)


def _glm45() -> Glm4vMoeConfig:
    heads = {"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
    experts = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
    text, vision = ({**shared, "intermediate_size": 10944} for shared in (_TEXT, _VISION))
    return Glm4vMoeConfig(text_config=text | heads | experts, vision_config=vision)


class GlmProcessor(PilProcessor):
    """Tokenizer and PIL image processor, to which frames of videos are images."""

    image_reader: ClassVar[Any] = Glm4vImageProcessorPil
    image_token: ClassVar[str] = "<|image|>"
    video_token: ClassVar[str] = image_token


class Glm4vFamily(TimedVLFamily):
    """GLM-4.1V (9B): Qwen's patches, grids and mRoPE positions, which turn half of a head's channels.

    It thinks before it answers, and its template has no way to turn that off. An image's bounds count its pixels twice,
    once for each frame of a patch. One placeholder stands for images and for videos, which are told by the marks around
    them; each layer of a video stands between an image's marks and has the whole seconds of its first frame behind it.
    Frames are given: the published processors choose them by themselves.
    """

    name = "glm4v"
    title = "GLM-4V"
    least_pixels = 112 * 112 // 2
    counted = 2
    unthinking: ClassVar[tuple[str, str]] = ("", "")
    """Texts behind a question and before an answer that turn thinking off."""
    auto_processor = GlmProcessor
    published: ClassVar[dict[str, Callable[[], Any]]] = {"zai-org/GLM-4.1V-9B-Thinking": _glm41}
    licences: ClassVar[dict[str, Licence]] = dict.fromkeys(published, MIT)
    # of a question of six tokens: [gMASK]<sop><|user|>\n<|begin_of_image|>; <|end_of_image|> and <|assistant|>\n
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 9}

    def kinds(self, ids: Tensor) -> Tensor:
        """Return ``mm_token_type_ids``: 2 at placeholders between a video's marks, 1 at others, 0 at text."""
        config = self.model.config
        opened, closed = ((ids == mark).cumsum(-1) for mark in (config.video_start_token_id, config.video_end_token_id))
        kinds: Tensor = (ids == config.image_token_id).int() * torch.where(opened > closed, VIDEO, IMAGE)
        return kinds

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        r"""Write the published template; white space beside a picture is dropped.

        ``[gMASK]<sop><|user|>\n<|image|>question<|assistant|>\nanswer<|user|>\n...``, in one piece. An answer's span
        ends with ``<|user|>``, which opens the next question and ends what the model says, as in the authors'
        fine-tuning of GLM-4.
        """
        marker, spans, opening = self.processor.image_token, [], "<|user|>"
        behind, before = self.unthinking
        text = f"[gMASK]<sop>{opening}"
        for turn in turns:
            words = marker.join(part.strip() for part in turn.prompt.split("<image>"))
            text += f"\n{words}{behind}<|assistant|>\n{before}"
            if turn.answer is not None:
                start = len(text)
                text += f"{turn.answer.strip()}{opening}"
                spans.append((start, len(text)))
        return RenderedPrompt(text, spans, marker)

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels; a side below a visual token is scaled up first, the other with it."""
        self._check_aspect(height, width)
        bounds = (self.counted * self.min_pixels, self.counted * self.max_pixels)
        high, wide = smart_resize(self.counted, height, width, self.counted, self.unit, *bounds)
        return int(high), int(wide)

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        """Return an image's or a video's placeholders and marks."""
        text = super().picture_text(picture, marker, together)
        if isinstance(picture, Video):
            return f"<|begin_of_video|>{text}<|end_of_video|>"
        return _marked(text)

    def video_text(self, video: Video, tokens: int) -> str:
        """Return the layers' placeholders and times."""
        run = _marked(self.processor.video_token * tokens)
        starts = range(0, len(video.frames), int(self.vision.temporal_patch_size))
        return "".join(f"{run}{int(start / video.fps)}" for start in starts)

    def block_bytes(self, element: int) -> int:
        """Return an attention's, or an MLP's: residual, norm, and three of its inner width."""
        channels, inner = self.vision.hidden_size, self.vision.out_hidden_size
        return int(max(self.attention_bytes(channels, element), element * (2 * channels + 3 * inner)))


class Glm4vMoeFamily(Glm4vFamily):
    """GLM-4.5V (106B-A12B): GLM-4.1V's tower before a decoder with experts; asked and trained with its thinking off."""

    name = "glm4v_moe"
    title = "GLM-4.5V"
    unthinking = ("/nothink", "<think></think>\n")
    published: ClassVar[dict[str, Callable[[], Any]]] = {"zai-org/GLM-4.5V": _glm45}
    licences: ClassVar[dict[str, Licence]] = dict.fromkeys(published, MIT)
    # and /nothink, <think></think>\n
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 13}


def _marked(placeholders: str) -> str:
    return f"<|begin_of_image|>{placeholders}<|end_of_image|>"
