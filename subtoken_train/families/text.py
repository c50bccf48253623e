"""Language models without images: Llama, Qwen2 and Mistral shapes behind the family interface.

Legend: B batch, N positions, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from subtoken_train.families.family import Family
from subtoken_train.types import APACHE, Batch, Licence, RenderedPrompt, TowerStatistics, Turn


class TextFamily(Family):
    """``LlamaForCausalLM``, ``Qwen2ForCausalLM`` or ``MistralForCausalLM``; full attention in every layer."""

    name = "a language model"
    sees_images = False
    auto_model = AutoModelForCausalLM
    auto_processor = AutoTokenizer
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "meta-llama/Llama-2-7b-hf": lambda: llama_config(32000, 4096, 11008, 32, 32),
        "Qwen/Qwen2.5-7B": lambda: Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=131072,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
    }
    licences: ClassVar[dict[str, Licence]] = {
        "meta-llama/Llama-2-7b-hf": Licence("llama2"),
        "mistralai/Mistral-7B-v0.1": APACHE,
        "Qwen/Qwen2.5-7B": APACHE,
    }
    lora_pattern = r"model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers."""
        return self.model.model

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """``USER: question ASSISTANT: answer</s>``, as LLaVA's format without images.

        Raises:
            ValueError: a turn holds an image.
        """
        text, spans = self.tokenizer.bos_token or "", []
        for turn in turns:
            if "<image>" in turn.prompt:
                raise _no_images(self.model.config.model_type)
            text += f"USER: {turn.prompt.strip()} ASSISTANT:"
            if turn.answer is not None:
                start = len(text)
                text += f" {turn.answer.strip()}{self.tokenizer.eos_token or ''}"
                spans.append((start, len(text)))
        return RenderedPrompt(text, spans, "")

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """A language model has no visual tokens."""
        raise _no_images(self.model.config.model_type)

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, None]:
        """A language model takes no images."""
        raise _no_images(self.model.config.model_type)

    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> None:
        """There are none."""
        if batch.pixel_values is not None:
            raise _no_images(self.model.config.model_type)

    def project(self, states_TC: Tensor) -> Tensor:
        """A language model has no projector."""
        raise _no_images(self.model.config.model_type)


def llama_config(vocabulary: int, width: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    """The configuration of a published Llama 2, which LLaVA-1.5's language model is too."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )


def _no_images(model_type: str) -> ValueError:
    return ValueError(f"{model_type} is a language model and takes no images; use a LLaVA or Qwen2.5-VL backbone")
