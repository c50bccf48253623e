"""Language models without images: any decoder that is built of parts which are understood (``structure``).

Legend: B batch, N positions, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from subtoken_train.families import FAMILIES
from subtoken_train.families.chat_template import messages_of, rendered_conversation
from subtoken_train.families.family import Family
from subtoken_train.families.literal_marks import hidden_turn
from subtoken_train.types import APACHE, Batch, Licence, RenderedPrompt, TowerStatistics, Turn


def llama_config(vocabulary: int, width: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    """Return a published Llama 2, which is LLaVA-1.5's language model too."""
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


def llama31_config() -> LlamaConfig:
    """Return Llama-3.1-8B: grouped heads, and slow rotary frequencies stretched for 131,072 positions."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=128000,
        eos_token_id=128001,
    )


def yi_config(vocabulary: int) -> LlamaConfig:
    """Return Nous-Hermes-2-Yi-34B, the language model of LLaVA-NeXT 34B."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=7168,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=56,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    )


def qwen25_config() -> Qwen2Config:
    """Return Qwen2.5-7B; it names a window that no layer uses."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )


def qwen3_config(width: int, mlp: int, layers: int, heads: int) -> Qwen3Config:
    """Return a published Qwen3 of 8B or 14B: eight key-value heads of width 128, q and k normed by head."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    )


def mistral_config(vocabulary: int = 32000, window: int | None = 4096, theta: float = 1e4) -> MistralConfig:
    """Return Mistral-7B-v0.1; without a window, at a base of 1e6, the Instruct-v0.2 of a LLaVA-NeXT."""
    return MistralConfig(
        vocab_size=vocabulary,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        sliding_window=window,
    )


class TextFamily(Family):
    """Any causal language model that transformers builds on its attention interface.

    What differs between them is read from their modules (``DecoderStack``): a fused projection, norms, windows, rotary
    embeddings. Model types that the registry names are known by tests; any other is looked at (``structure``) and run
    on random tokens (``proof``) when it is loaded.
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
        return self.model.model

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """Write a conversation in the tokenizer's chat template; ``<image>`` is text.

        Without one: ``USER: question ASSISTANT: answer</s>``, as LLaVA's format without images.
        """
        if self.tokenizer.chat_template:
            return rendered_conversation(self.tokenizer, messages_of(turns))
        text, spans = self.tokenizer.bos_token or "", []
        for turn in (hidden_turn(self, turn) for turn in turns):
            text += f"USER: {turn.prompt.strip()} ASSISTANT:"
            if turn.answer is not None:
                start = len(text)
                text += f" {turn.answer.strip()}{self.tokenizer.eos_token or ''}"
                spans.append((start, len(text)))
        return RenderedPrompt(text, spans, "")

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Refuse: a language model has no visual tokens."""
        raise _no_images(self.model.config.model_type)

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, None]:
        """Refuse images: a language model takes none."""
        raise _no_images(self.model.config.model_type)

    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> None:
        """Return None; refuse images."""
        if batch.pixel_values is not None:
            raise _no_images(self.model.config.model_type)

    def project(self, states_TC: Tensor) -> Tensor:
        """Refuse: a language model has no projector."""
        raise _no_images(self.model.config.model_type)


def _no_images(model_type: str) -> ValueError:
    seeing = ", ".join(name for name, family in FAMILIES.items() if family.sees_images)
    return ValueError(f"{model_type} is a language model and takes no images; use a backbone that does ({seeing})")
