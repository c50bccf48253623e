r"""LLaVA's conversation modes.

They write the texts that ``llava/conversation.py`` writes around questions and answers.
Source: haotian-liu/LLaVA at c121f043, ``Conversation.get_prompt`` of the modes ``vicuna_v1``, ``llava_v1`` and
``plain``, and ``preprocess_plain`` of ``llava/train/train.py``. LLaVA's own evaluation writes the system text;
transformers' chat template of LLaVA-1.5 does not.

* ``vicuna_v1``: ``<s>USER: <image>\nquestion ASSISTANT: answer</s>USER: ...``; the system text stands before the first
  ``USER:`` where it is asked for.
* ``llava_v1``: the same, always with a system text in which the user is a "human".
* ``plain``: LLaVA's first stage of pre-training. ``<s><image>caption\n``, the question left out; a prompt to be
  answered is ``<s>question\n``, and its answer ends in a line break, not in ``</s>``.
* ``mistral_instruct``: LLaVA-NeXT on Mistral, not to be chosen. ``<s>[INST] <image>\nquestion [/INST] answer</s> [INST]
  ...``, the space as transformers' chat template of that model has it (LLaVA's own stands before ``</s>``).
* ``chatml_direct``: LLaVA-NeXT 34B (Yi), not to be chosen. ``<|im_start|>system\nAnswer the questions.<|im_end|>
  <|im_start|>user\n<image>\nquestion<|im_end|><|im_start|>assistant\nanswer<|im_end|>...`` in one piece, no ``<s>``.

A question is written as it is given, spaces around it included. Where its image markers do not stand before it, each
with its line break, they are moved there and the space around the rest is dropped, as LLaVA's ``preprocess_multimodal``
does. (LLaVA's training drops that space in every turn with an image, its evaluation in none.) Answers are stripped. The
modes with ``<Image>`` tags (``mmtag``) and those of other language models (Llama 2, MPT) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from subtoken_train.errors import check_word
from subtoken_train.types import RenderedPrompt, Turn

TEMPLATES = ("vicuna_v1", "llava_v1", "plain")
SYSTEMS = ("none", "vicuna_v1")
_SYSTEM = (
    "A chat between a curious {user} and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the {user}'s questions. "
)
_USERS = {"vicuna_v1": "user", "llava_v1": "human"}
_END = "<|im_end|>"
_ANSWER_SYSTEM = f"<|im_start|>system\nAnswer the questions.{_END}"
_AROUND = {
    "vicuna_v1": ("USER: ", " ASSISTANT:", "", " "),
    "mistral_instruct": ("[INST] ", " [/INST]", " ", " "),
    "chatml_direct": ("<|im_start|>user\n", f"{_END}<|im_start|>assistant\n", "", ""),
}
"""Texts before a question, after it, between turns, and before an answer; ``llava_v1`` is as ``vicuna_v1``."""
_MARKER = "<image>"
_LEADING = re.compile(rf"(?:{_MARKER}\n)*")


def check_chat(template: str | None, system: str | None) -> None:
    """Raise ``ValueError`` unless both are names (or None) that go together."""
    if template is not None:
        check_word("template", template, TEMPLATES)
    if system is not None:
        check_word("system", system, SYSTEMS)
        if template not in (None, system) and system != "none":
            raise ValueError(f"system {system!r} is the text of template {system!r}, not of {template!r}; remove it")
        if template == "llava_v1":
            raise ValueError("template 'llava_v1' differs only in its system text; remove system, or use 'vicuna_v1'")


@dataclass(frozen=True)
class LlavaChat:
    """A conversation mode.

    Attributes:
        template: one of ``TEMPLATES``, ``mistral_instruct`` or ``chatml_direct``.
        system: whether ``vicuna_v1`` has its system text: one of ``SYSTEMS``.
    """

    template: str = "vicuna_v1"
    system: str = "none"

    @property
    def system_text(self) -> str:
        """Return the text before the first turn, with the space that follows it."""
        name = "llava_v1" if self.template == "llava_v1" else self.system
        return _SYSTEM.format(user=_USERS[name]) if name in _USERS else ""

    def render(self, turns: Sequence[Turn], marker: str, bos: str, eos: str) -> RenderedPrompt:
        """Return the conversation as the model's text.

        Args:
            turns: what is said.
            marker: text of one image placeholder.
            bos: the tokenizer's first token.
            eos: its end-of-turn token.
        """
        if self.template == "plain":
            return _plain(turns, marker, bos)
        text, spans = bos + self.system_text, []
        before, after, between, space = _AROUND.get(self.template, _AROUND["vicuna_v1"])
        if self.template == "chatml_direct":
            text, eos = _ANSWER_SYSTEM, _END
        for number, turn in enumerate(turns):
            text += (between if number else "") + before + _asked(turn.prompt, marker) + after
            if turn.answer is not None:
                start = len(text)
                text += f"{space}{turn.answer.strip()}{eos}"
                spans.append((start, len(text)))
        return RenderedPrompt(text, spans, marker)


def _plain(turns: Sequence[Turn], marker: str, bos: str) -> RenderedPrompt:
    if len(turns) != 1:
        raise ValueError(f"template 'plain' is one image and its caption, not {len(turns)} turns; use 'vicuna_v1'")
    (turn,) = turns
    if turn.answer is None:
        return RenderedPrompt(f"{bos}{_asked(turn.prompt, marker)}\n", [], marker)
    if (images := turn.prompt.count(_MARKER)) != 1:
        raise ValueError(f"template 'plain' learns the caption of one image, and the turn shows {images}")
    before = bos + marker
    text = f"{before}{turn.answer.strip()}\n"
    return RenderedPrompt(text, [(len(before), len(text))], marker)


def _asked(prompt: str, marker: str) -> str:
    """Return the user's words, behind their image markers."""
    leading = _LEADING.match(prompt)
    assert leading is not None  # it may be empty
    count, words = prompt.count(_MARKER), prompt[leading.end() :]
    if _MARKER in words:
        words = prompt.replace(_MARKER, "").strip()
    return f"{marker}\n" * count + words
