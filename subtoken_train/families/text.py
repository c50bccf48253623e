"""Language models without images: any decoder that is built of parts which are understood (``proof``)."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from subtoken_train.families import FAMILIES
from subtoken_train.families.chat import ChatFormat
from subtoken_train.families.chat_template import messages_of, rendered_conversation
from subtoken_train.families.family import Family, published_of
from subtoken_train.families.literal_marks import hidden_turn
from subtoken_train.types import Batch, RenderedPrompt, TowerStatistics, Turn, VisualStates


class TextFamily(Family):
    """Any causal language model on transformers' attention interface; an unknown type is run first (``proof``)."""

    name = "a language model"
    sees_images = False
    unquantised = ("lm_head",)
    auto_model = AutoModelForCausalLM
    auto_processor = AutoTokenizer
    published, licences = published_of("llama", "mistral", "qwen2", "qwen3")
    lora_pattern = r"model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    # as LLaVA's format without images
    chat = ChatFormat("USER: {} ASSISTANT:", " {}{eos}", "{bos}", words=lambda prompt, _: prompt.strip())

    @property
    def decoder(self) -> Any:
        return self.model.model

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """Write a conversation in the tokenizer's chat template, or in ``chat`` without one; ``<image>`` is text."""
        if self.tokenizer.chat_template:
            return rendered_conversation(self.tokenizer, messages_of(turns))
        return self.chat.render([hidden_turn(self, turn) for turn in turns], "", self.tokenizer)

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        raise self._no_images()

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, None]:
        raise self._no_images()

    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        raise self._no_images()

    def _no_images(self) -> ValueError:
        seeing, kind = ", ".join(name for name, family in FAMILIES.items() if family.sees_images), self.model.config
        return ValueError(f"{kind.model_type} is a language model and takes no images; use one of {seeing}")
