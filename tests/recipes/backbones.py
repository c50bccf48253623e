"""Models that recipes train: what a recipe's first word stands for."""

from dataclasses import dataclass

from checkpoints import tiny_llama, tiny_llava
from subtoken_train.ledger.kv_budget import KVShape, geometry

TINY = {
    "tiny-llava": KVShape(tiny_llava.TEXT_LAYERS, tiny_llava.HEADS, tiny_llava.WIDTH // tiny_llava.HEADS, 4),
    "tiny-llama": KVShape(tiny_llama.LAYERS, tiny_llama.KV_HEADS, tiny_llama.WIDTH // tiny_llama.HEADS, 4),
}


@dataclass(frozen=True)
class Backbone:
    """What a recipe's first word stands for: words, Hub id, ledger geometry, and tokens of the compressed region."""

    words: str
    path: str
    shape: str
    tokens: int
    is_text: bool = False

    @property
    def geometry(self) -> KVShape:
        """What its cache is made of; in fp32 that of the embedded models."""
        return TINY.get(self.shape) or geometry(self.shape)

    @property
    def region(self) -> str:
        """What is compressed."""
        return "context" if self.is_text else "visual"


BACKBONES = {
    "llava7b": Backbone("LLaVA-1.5-7B", "llava-hf/llava-1.5-7b-hf", "llava-1.5-7b", 576),
    "llava13b": Backbone("LLaVA-1.5-13B", "llava-hf/llava-1.5-13b-hf", "llava-1.5-13b", 576),
    "qwenvl3b": Backbone("Qwen2.5-VL-3B", "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2.5-vl-3b", 144),
    "qwenvl7b": Backbone("Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b", 144),
    "llavanext7b": Backbone("LLaVA-NeXT-Vicuna-7B", "llava-hf/llava-v1.6-vicuna-7b-hf", "llama-2-7b", 2928),
    "llavanextmistral7b": Backbone("LLaVA-NeXT-Mistral-7B", "llava-hf/llava-v1.6-mistral-7b-hf", "mistral-7b", 2928),
    # its language model is Qwen2.5-7B; 1,280 tokens are an image of 896 x 896 pixels
    "internvl8b": Backbone("InternVL3-8B", "OpenGVLab/InternVL3-8B-hf", "qwen2.5-7b", 1280),
    "llavaov7b": Backbone("LLaVA-OneVision-7B", "llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava-onevision-7b", 3699),
    "qwen2vl7b": Backbone("Qwen2-VL-7B", "Qwen/Qwen2-VL-7B-Instruct", "qwen2-vl-7b", 144),
    "qwen3vl4b": Backbone("Qwen3-VL-4B", "Qwen/Qwen3-VL-4B-Instruct", "qwen3-vl-4b", 100),
    "qwen3vl8b": Backbone("Qwen3-VL-8B", "Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b", 100),
    "mistralsmall24b": Backbone(
        "Mistral-Small-3.1-24B", "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral-small-24b", 768
    ),
    "glm41v9b": Backbone("GLM-4.1V-9B", "zai-org/GLM-4.1V-9B-Thinking", "glm-4.1v-9b", 144),
    # a photograph of 4 : 3 in twelve tiles and its whole
    "smolvlm500m": Backbone("SmolVLM2-500M", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "smolvlm2-500m", 832),
    "llama7b": Backbone("LLaMA-2-7B", "meta-llama/Llama-2-7b-hf", "llama-2-7b", 1024, is_text=True),
    "qwen7b": Backbone("Qwen2.5-7B", "Qwen/Qwen2.5-7B", "qwen2.5-7b", 1024, is_text=True),
    "llama31": Backbone("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "llama-3.1-8b", 1024, is_text=True),
    "qwen38b": Backbone("Qwen3-8B", "Qwen/Qwen3-8B", "qwen3-8b", 1024, is_text=True),
    "qwen314b": Backbone("Qwen3-14B", "Qwen/Qwen3-14B", "qwen3-14b", 1024, is_text=True),
    "tinylm": Backbone("tiny-llama", "checkpoints/tiny-llama", "tiny-llama", 512, is_text=True),
    "tiny": Backbone("tiny-llava", "checkpoints/tiny-llava", "tiny-llava", tiny_llava.VISUAL_TOKENS),
}
