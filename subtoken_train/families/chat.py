r"""Chat formats of families: the texts around questions and answers, as templates, and LLaVA's conversation modes.

Source: haotian-liu/LLaVA at c121f043, ``Conversation.get_prompt``, and ``preprocess_plain`` of ``train.py``; its own
evaluation writes the system text. ``plain`` is its first stage of pre-training: ``<s><image>caption\n``; a prompt to be
answered is ``<s>question\n``. ``mistral_instruct`` and ``chatml_direct`` (LLaVA-NeXT) cannot be chosen.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from subtoken_train.errors import check_word
from subtoken_train.types import RenderedPrompt, Turn

TEMPLATES = ("vicuna_v1", "llava_v1", "plain")
SYSTEMS = ("none", "vicuna_v1")
_MARKER = "<image>"
_LEADING = re.compile(rf"\A(?:{_MARKER}\n)*")


def joined(prompt: str, picture: str) -> str:
    """Write a prompt with pictures where it has them, without white space beside them."""
    return picture.join(part.strip() for part in prompt.split(_MARKER))


def pictures_first(prompt: str, picture: str) -> str:
    """Write a prompt's words behind its pictures, a line each."""
    return f"{picture}\n" * prompt.count(_MARKER) + prompt.replace(_MARKER, "").strip()


def as_given(prompt: str, picture: str) -> str:
    """Write a prompt as LLaVA does: pictures in front, a line each; other words are stripped only if one moves."""
    words = _LEADING.sub("", prompt, count=1)
    return pictures_first(prompt, picture) if _MARKER in words else f"{picture}\n" * prompt.count(_MARKER) + words


@dataclass(frozen=True)
class ChatFormat:
    """A chat format; ``{}`` stands for the words of a question or an answer, ``{bos}`` and ``{eos}`` for its tokens."""

    asked: str
    answered: str  # learnt of an answer
    begin: str = ""
    after: str = ""  # text behind an answer, which is not learnt
    between: str = ""
    words: Callable[[str, str], str] = joined
    """Writes a question with its pictures, from the prompt and an image's placeholder."""
    tokens: dict[str, int] | None = None
    """Text tokens beside the image in the paper's prompt; None: the family's ``paper_text``."""

    def render(self, turns: Iterable[Turn], marker: str, tokenizer: Any) -> RenderedPrompt:
        """Return the conversation as the model's text; ``marker``: one image's placeholder."""
        text, spans = self.begin.format(bos=tokenizer.bos_token or ""), []
        for number, turn in enumerate(turns):
            text += (self.between if number else "") + self.asked.format(self.words(turn.prompt, marker))
            if turn.answer is not None:
                start = len(text)
                text += self.answered.format(turn.answer.strip(), eos=tokenizer.eos_token or "")
                spans.append((start, len(text)))
                text += self.after
        return RenderedPrompt(text, spans, marker)


class _Plain(ChatFormat):
    def render(self, turns: Iterable[Turn], marker: str, tokenizer: Any) -> RenderedPrompt:
        turn, *more = turns
        if more or (turn.answer is not None and turn.prompt.count(_MARKER) != 1):
            raise ValueError("template 'plain' is one image and its caption in one turn; use 'vicuna_v1'")
        if turn.answer is None:
            return super().render([turn], marker, tokenizer)
        before = (tokenizer.bos_token or "") + marker
        text = f"{before}{turn.answer.strip()}\n"
        return RenderedPrompt(text, [(len(before), len(text))], marker)


CHATML = ChatFormat("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "{}<|im_end|>", after="\n")
_VICUNA = ChatFormat("USER: {} ASSISTANT:", " {}{eos}", "{bos}", words=as_given)
_WITH_SYSTEM, _HUMAN = (
    replace(
        _VICUNA,
        begin=f"{{bos}}A chat between a curious {user} and an artificial intelligence assistant. The assistant gives "
        f"helpful, detailed, and polite answers to the {user}'s questions. ",
        tokens={"system": 35, "query": 14},
    )
    for user in ("user", "human")
)
LLAVA_MODES = {
    "vicuna_v1": _VICUNA,
    "llava_v1": _HUMAN,
    "plain": _Plain("{}\n", "", "{bos}", words=as_given, tokens={"system": 1, "query": 10}),
    # the space between turns as transformers' chat template has it; LLaVA's own stands before </s>
    "mistral_instruct": ChatFormat("[INST] {} [/INST]", " {}{eos}", "{bos}", between=" ", words=as_given),
    "chatml_direct": ChatFormat(
        "<|im_start|>user\n{}<|im_end|><|im_start|>assistant\n",
        "{}<|im_end|>",
        "<|im_start|>system\nAnswer the questions.<|im_end|>",
        words=as_given,
        tokens={"system": 11, "query": 14},
    ),
}


def llava_chat(template: str | None = None, system: str | None = None) -> ChatFormat:
    """Return the mode of a name of ``TEMPLATES``, ``vicuna_v1`` with or without its system text."""
    return _WITH_SYSTEM if system == "vicuna_v1" else LLAVA_MODES[template or "vicuna_v1"]


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
