"""Prompts of language models as LongBench's ``pred.py`` makes them: the middle cut out, a chat format around."""

from __future__ import annotations

from subtoken_train.families.chat_template import filled_template
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.text_prompts import check_template


def without_middle(
    family: Family, prompt: str, context: int, max_length: int | None, max_new_tokens: int, chat: bool = False
) -> tuple[str, int]:
    """A prompt that leaves room for its answer: its first and its last tokens, half of what there is room for each.

    As in the original the two ends are decoded and joined as texts, and special tokens are left out. They may encode
    to another token or two than they had; where the positions are too few for these, more is cut.

    Args:
        family: a language model.
        prompt: the whole text.
        context: characters of it, from its start, that may be compressed.
        max_length: tokens of the prompt, without its chat format; None: what the positions
            allow that the model was made for.
        max_new_tokens: of the answer.
        chat: whether ``in_chat`` is called next.

    Returns:
        (text, its characters that may be compressed); both as given where nothing is cut.

    Raises:
        ValueError: there is no room for a prompt.
    """
    tokenizer, positions = family.tokenizer, position_bound(family.decoder.config)
    around = len(tokenizer(in_chat(family, "", None)[0], add_special_tokens=False)["input_ids"]) if chat else 0
    room = None if positions is None else positions - max_new_tokens - around
    limit = min(given) if (given := [each for each in (max_length, room) if each is not None]) else None
    ids = tokenizer(prompt)["input_ids"]
    if limit is None or len(ids) <= limit:
        return prompt, context
    half = limit // 2
    while half > 0:
        first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
        over = 0 if room is None else len(tokenizer(first + last)["input_ids"]) - room
        if over <= 0:
            asked = min(len(prompt) - context, len(last))  # all of the question that is left stands at the end
            return first + last, len(first + last) - asked
        half -= (over + 1) // 2
    raise ValueError(
        f"there is room for {limit} tokens of a prompt beside {max_new_tokens} of its answer; raise max_length, or "
        "take a model of more positions"
    )


def in_chat(family: Family, prompt: str, context: int | None) -> tuple[str, int | None]:
    """A prompt as the user's turn in the tokenizer's chat template, and the characters that may be compressed.

    A template that can ask a model to think first is told not to: answers have few tokens.

    Raises:
        ValueError: the tokenizer has no chat template, or one that cannot be filled or leaves the prompt out.
    """
    check_template(family.tokenizer)
    turns = [{"role": "user", "content": prompt}]
    text = filled_template(family.tokenizer, turns, add_generation_prompt=True, enable_thinking=False)
    if context is None:
        return text, None
    bare = prompt.strip()  # some templates strip it
    if bare not in text:
        raise ValueError("the tokenizer's chat template does not write what the user says; set another chat_template")
    before = text.index(bare) - (len(prompt) - len(prompt.lstrip()))
    return text, min(max(0, before + context), len(text) - 1)
