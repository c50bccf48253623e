"""Turns of a record; a tokenizer of bytes with many formats' special tokens; templates as they are published."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
SPECIAL += ["<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<IMG_CONTEXT>", "<img>", "</img>"]


def talk(*values: str) -> list[dict[str, str]]:
    """A record's turns as LLaVA writes them: a question, its answer, and so on."""
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]


def byte_tokenizer(special: Sequence[str], size: int, text: str, **named: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    known = {"special_tokens": list(special), "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator([text] * 50, trainers.BpeTrainer(vocab_size=size, show_progress=False, **known))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def byte_level(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with all marks of all families as special tokens, and a chat template."""
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    text = "USER: what is <image> in a file ? ASSISTANT: a tag"
    return byte_tokenizer(SPECIAL, 400, text, additional_special_tokens=SPECIAL[3:], **named)


_SAID = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHATML = _SAID["short"]["CHATML"]  # as SmolLM2's and Qwen2.5's: a system text of its own where none is given
MARKED = _SAID["short"]["MARKED"]  # the same with marks around what assistants say
LLAMA2 = _SAID["short"]["LLAMA2"]  # a space before each answer, no opening of one, no system
MISTRAL = _SAID["short"]["MISTRAL"]  # the system's text stands in the last turn
PHI3 = _SAID["short"]["PHI3"]  # a text that is not to be answered ends beside its last turn
THINKING = _SAID["short"]["THINKING"]
"""As Qwen3's: the last answer begins otherwise than earlier ones, whose thoughts are left out."""
IM = "<|im_end|>"


class Format(NamedTuple):
    """A format, and what is learnt of answers (@: their words)."""

    template: str
    eos: str
    learnt: str  # of an answer that others follow
    last: str = ""  # of the last one; "": the same
    stripped: bool | str = False  # of white space; "lines": of line breaks before it; "last line": of the last one's


PUBLISHED = {name: Format(**form) for name, form in _SAID["published"].items()}


@cache
def published(name: str) -> PreTrainedTokenizerFast:
    form = PUBLISHED[name]
    tokenizer = byte_level(form.template)
    tokenizer.add_special_tokens({"eos_token": form.eos})
    tokenizer.add_tokens(
        [IM, "<|im_start|>", "<|end|>", "<|user|>", "<|assistant|>", *_SAID["special"]], special_tokens=True
    )
    return tokenizer
