"""Fill in the chat template that a tokenizer brings."""

from __future__ import annotations

from typing import Any


def filled_template(tokenizer: Any, turns: list[dict[str, str]], **options: Any) -> str:
    """Return the turns as one text in a tokenizer's chat template.

    Args:
        tokenizer: one with a template, which is somebody else's program in Jinja's sandbox.
        turns: ``role`` and ``content`` each.
        options: further ones of ``apply_chat_template``.

    Raises:
        ValueError: the template cannot be filled.
    """
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except Exception as error:  # whatever a template raises
        words = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"the tokenizer's chat template cannot be filled: {words}") from error
    return text
