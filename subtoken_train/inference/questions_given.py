"""What ``ask`` is given: contexts and their questions, one by one or in lists, or a worded error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from subtoken_train.documents import check_characters
from subtoken_train.families.family import Family
from subtoken_train.families.images import Video
from subtoken_train.inference.context_batches import Context


@dataclass(frozen=True)
class Questions:
    """Questions of every context; ``nested``: they were given as a list for each."""

    of_each: list[list[str]]
    nested: bool

    def check_fits(self, contexts: int) -> None:
        """Raise a worded ``ValueError`` unless there are questions of as many contexts."""
        if len(self.of_each) != contexts:
            given = f"{len(self.of_each)} lists of questions" if self.nested else "one list of questions"
            raise ValueError(
                f"{given} for {contexts} contexts; give a list for each: ask([context, context], [[question], []])"
            )


def read_questions(questions: Any, max_new_tokens: Any) -> Questions:
    """Questions of one context (a list of texts), or of several (a list of such lists).

    Raises:
        ValueError: they are something else, or answers are to have no token.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1")
    if not _is_list(questions):
        got = "none" if questions is None else type(questions).__name__
        raise ValueError(f"questions must be a list of texts, not {got}: ask(context, [question, question])")
    nested = bool(questions) and all(_is_list(each) for each in questions)
    lists = [list(own) for own in questions] if nested else [list(questions)]
    for own in lists:
        if wrong := [type(each).__name__ for each in own if not isinstance(each, str)]:
            raise ValueError(
                f"a question is of type {wrong[0]}, not a text; questions are a list of texts, or for several "
                "contexts a list of texts for each"
            )
        if not all(each.strip() for each in own):
            raise ValueError("a question is empty; write what the model should answer")
        check_characters(own, "a question")
    return Questions(lists, nested)


def read_contexts(family: Family, context: Any, questions: Questions) -> list[Context]:
    """The contexts that questions are about, in the form that the model reads.

    Raises:
        ValueError: they are not as many as there are lists of questions.
    """
    given = context if questions.nested else [context]
    if not _is_list(given):
        raise ValueError(
            f"{len(questions.of_each)} lists of questions for one context; give a list of contexts, or one list of "
            "questions"
        )
    questions.check_fits(len(given))
    if family.sees_images:
        alone = [[each] if isinstance(each, Image.Image | Video) else each for each in given]
        return [list(each) if _is_list(each) else "" for each in alone]  # what is no picture is refused as a text is
    if not questions.nested and _is_list(context):
        raise ValueError(
            "several contexts need a list of questions each: ask([context, context], [[question], [question]])"
        )
    return list(given)


def _is_list(thing: Any) -> bool:
    return isinstance(thing, Sequence) and not isinstance(thing, str | bytes)
