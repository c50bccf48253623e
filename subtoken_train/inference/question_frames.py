"""What stands around a question that is asked after a compressed context.

Context and question are encoded apart, so that one compressed context serves every question: no token spans the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subtoken_train.families.chat_template import filled_template
from subtoken_train.families.family import Family
from subtoken_train.families.images import Picture, count_images
from subtoken_train.families.literal_marks import IMAGE_MARK, hidden, tokenise
from subtoken_train.types import Turn

_MARK = "(the question stands here)"


@dataclass(frozen=True)
class QuestionFrame:
    """The texts between a context and the answer.

    Attributes:
        anchor: what a question is encoded behind, and then taken off: tokenizers begin a text otherwise than they go on
            with one. The last picture's placeholder; of a text a line break.
        before: from the context's last token to the question.
        after: from the question to the answer.
    """

    anchor: str
    before: str
    after: str

    def ids(self, family: Family, question: str) -> list[int]:
        """Token ids from the context to the answer.

        Raises:
            ValueError: a question that holds a picture's placeholder.
        """
        if family.sees_images:
            question = hidden(question.strip())
            if held := next((mark for mark in (IMAGE_MARK, *family.placeholders) if mark in question), None):
                raise ValueError(
                    f"a question holds {held}; all pictures belong to the context (where it is text, write "
                    f"\\{IMAGE_MARK})"
                )
        text = self.before + question + self.after
        anchor, whole, alone = (
            tokenise(family.tokenizer, words)[0] for words in (self.anchor, self.anchor + text, text)
        )
        ids: list[int] = whole[len(anchor) :] if whole[: len(anchor)] == anchor else alone
        if not ids:
            raise ValueError(f"the question {question[:40]!r} gives no token")
        return ids


def text_frame(family: Family, context: str, **variables: object) -> tuple[str, QuestionFrame]:
    """A language model's context as it reads it, and the frame of its questions.

    In the tokenizer's chat template context and question are one turn of the user; without a template the question
    follows the context as both are written. ``variables`` are given to the template, which may not know them.

    Raises:
        ValueError: the template cannot be filled, or does not show what the user says.
    """
    if not family.tokenizer.chat_template:
        return context, QuestionFrame("\n", "", "")
    turns = [{"role": "user", "content": context + _MARK}]
    text = filled_template(family.tokenizer, turns, add_generation_prompt=True, **variables)
    head, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ValueError("the tokenizer's chat template does not write what the user says; set another chat_template")
    return head, QuestionFrame("\n", "", after)


def picture_frame(family: Family, pictures: Sequence[Picture]) -> QuestionFrame:
    """The frame of questions after pictures, which stand in front, in the family's chat format."""
    rendered = family.render([Turn("<image>\n" * len(pictures) + _MARK)])
    head, _, after = rendered.text.rpartition(_MARK)
    last = family.picture_text(pictures[-1], rendered.image_marker, count_images(pictures))
    end, anchor = max((last.rfind(each) + len(each), each) for each in family.placeholders if each in last)
    return QuestionFrame(anchor, last[end:] + head.rpartition(rendered.image_marker)[2], after)
