"""What an encoded sample must be: its placeholders whole, its images and their question within the length."""

from __future__ import annotations


def check_image_tokens(found: int, texts: list[str], whole: str, placeholders: tuple[str, ...]) -> None:
    """The tokenizer must keep every placeholder as one token of its own, and none stands outside of the pictures."""
    written = sum(whole.count(placeholder) for placeholder in placeholders)
    if found != written:
        raise ValueError(
            f"{written} visual tokens were written but the tokenizer made {found} image tokens of them; make "
            f"{' and '.join(map(repr, placeholders))} special tokens of the tokenizer"
        )
    expected = sum(text.count(placeholder) for text in texts for placeholder in placeholders)
    if written != expected:
        raise ValueError(
            f"its text holds {' or '.join(map(repr, placeholders))}, which stands for visual tokens; write <image> "
            "where a picture stands"
        )


def check_cut(length: int, max_length: int, rank_position: int, generation: bool) -> None:
    """The cut must leave the images and the question about them whole; a generation prompt is never cut."""
    needed = length if generation else rank_position + 1
    if length > max_length and needed > max_length:
        what = "its prompt" if generation else "its images and their question"
        raise ValueError(
            f"{length} tokens, and {what} end at token {needed}, past max_length {max_length}; raise max_length to "
            f"{length} or drop the record"
        )


def all_masked(length: int, max_length: int) -> ValueError:
    """Why a sample has nothing to learn."""
    if length > max_length:
        cause = (
            f"its {length} tokens were cut to max_length {max_length} before the first answer that is learnt; raise it"
        )
    else:
        cause = "no token starts inside an answer; the chat format and the tokenizer disagree"
    return ValueError(f"all labels masked, {cause}")
