"""Language models without images: Llama, Qwen2, Qwen3 and Mistral shapes behind the family interface.

Legend: B batch, N positions, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from subtoken_train.families import FAMILIES
from subtoken_train.families.family import Family
from subtoken_train.families.text_configs import (
    llama31_config,
    llama_config,
    mistral_config,
    qwen3_config,
    qwen25_config,
)
from subtoken_train.types import APACHE, Batch, Licence, RenderedPrompt, TowerStatistics, Turn


class TextFamily(Family):
    """``LlamaForCausalLM``, ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM`` or ``MistralForCausalLM``.

    Llama 3.1 is a Llama whose rotary frequencies are scaled; Qwen3 norms the queries and keys of every head.
    """

    name = "a language model"
    sees_images = False
    auto_model = AutoModelForCausalLM
    auto_processor = AutoTokenizer
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "meta-llama/Llama-2-7b-hf": lambda: llama_config(32000, 4096, 11008, 32, 32),
        "meta-llama/Llama-3.1-8B": llama31_config,
        "meta-llama/Llama-3.1-8B-Instruct": llama31_config,
        "mistralai/Mistral-7B-v0.1": mistral_config,
        "Qwen/Qwen2.5-7B": qwen25_config,
        "Qwen/Qwen2.5-7B-Instruct": qwen25_config,
        "Qwen/Qwen3-8B": lambda: qwen3_config(4096, 12288, 36, 32),
        "Qwen/Qwen3-14B": lambda: qwen3_config(5120, 17408, 40, 40),
    }
    licences: ClassVar[dict[str, Licence]] = {
        "meta-llama/Llama-2-7b-hf": Licence("llama2"),
        "meta-llama/Llama-3.1-8B": Licence("llama3.1"),
        "meta-llama/Llama-3.1-8B-Instruct": Licence("llama3.1"),
        "mistralai/Mistral-7B-v0.1": APACHE,
        "Qwen/Qwen2.5-7B": APACHE,
        "Qwen/Qwen2.5-7B-Instruct": APACHE,
        "Qwen/Qwen3-8B": APACHE,
        "Qwen/Qwen3-14B": APACHE,
    }
    lora_pattern = r"model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"

    @property
    def decoder(self) -> Any:
        """The stack of decoder layers."""
        return self.model.model

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """Write ``USER: question ASSISTANT: answer</s>``, as LLaVA's format without images; ``<image>`` is text."""
        text, spans = self.tokenizer.bos_token or "", []
        for turn in turns:
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


def _no_images(model_type: str) -> ValueError:
    seeing = ", ".join(name for name, family in FAMILIES.items() if family.sees_images)
    return ValueError(f"{model_type} is a language model and takes no images; use a backbone that does ({seeing})")
