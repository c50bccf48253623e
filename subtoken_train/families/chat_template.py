"""Conversations in a tokenizer's own chat template: the text, its parts, and what assistants say in it.

A template is somebody else's program. It runs in the sandbox of transformers, and no longer than ``MAX_STEPS`` lines of
it: a template that loops is refused. (One that computes an enormous number or text in a single step is not.) Messages
are ``{"role": "system", "user" or "assistant", "content": TEXT}``; a template may refuse a role, or their order. What
looks like a special token in a content is text (``literal_marks``), so a rendered text is tokenised by ``tokenise``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from subtoken_train.families.literal_marks import hidden_specials
from subtoken_train.types import Asked, RenderedPrompt, Turn

Message = Mapping[str, str]
MAX_STEPS = 5_000_000
"""Lines of a template that run at most, a few seconds; long conversations take some ten thousands."""
_MARK = "(what is said stands here)"


def messages_of(turns: Iterable[Turn]) -> list[Message]:
    """Return turns as messages of user and assistant."""
    messages: list[Message] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.prompt})
        if turn.answer is not None:
            messages.append({"role": "assistant", "content": turn.answer})
    return messages


def filled_template(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """Return messages as one text in a tokenizer's chat template.

    Args:
        tokenizer: one with a template.
        messages: ``role`` and ``content`` each.
        options: further ones of ``apply_chat_template``.

    Raises:
        ValueError: the template cannot be filled, or does not end.
    """
    with _bounded():
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return text


def rendered_prompt(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> RenderedPrompt:
    """Return a conversation that is to be answered, with ``system_end`` and ``asked``, and no spans of answers.

    Args:
        tokenizer: one with a template.
        messages: the last one is the user's.
        variables: given to the template, which may not know them.

    Raises:
        ValueError: the template cannot be filled, or leaves out what the user or the system says.
    """
    assert messages[-1]["role"] == "user"
    shown = _shown(tokenizer, messages)
    text = filled_template(tokenizer, shown, add_generation_prompt=True, **variables)
    pieces = _pieces(tokenizer, shown, add_generation_prompt=True, **variables)
    end, said = len(text) - len(pieces[-1]), shown[-1]["content"]
    forms = (said, said.strip(), said.rstrip(), said.lstrip())
    found = [form for form in forms if text.endswith(form + pieces[-1])]
    if not found or not text.startswith(pieces[0]):
        raise _unwritten("user")
    start = end - len(found[0])
    opening = start - len(pieces[-2])
    system_end = len(pieces[0]) if _told(shown) in pieces[0] else start
    return RenderedPrompt(text, [], "", system_end, Asked(max(0, opening), start, end))


def answer_opening(tokenizer: Any) -> str:
    """Return what a template writes between what the user says and the answer, with thinking off.

    Args:
        tokenizer: one with a template; it may know no thinking.

    Raises:
        ValueError: the template cannot be filled, or leaves out what the user says.
    """
    said = [{"role": "user", "content": _MARK}]
    return _pieces(tokenizer, said, add_generation_prompt=True, enable_thinking=False)[-1]


def rendered_conversation(tokenizer: Any, messages: Sequence[Message]) -> RenderedPrompt:
    """Return a conversation with ``system_end`` and the spans of what assistants say, one for each such message.

    A span is what the template marks as generated (``{% generation %}``); where it marks nothing, all that the
    conversation up to the end of the message has more than the prompt before it, white space at its end left out. A
    conversation that ends with a question ends with the opening of its answer.

    Args:
        tokenizer: one with a template.
        messages: at least one.

    Raises:
        ValueError: the template cannot be filled, leaves out what is said, or rewrites an answer, so that its place
            is not found.
    """
    shown, opens = _shown(tokenizer, messages), messages[-1]["role"] != "assistant"
    text = filled_template(tokenizer, shown, add_generation_prompt=opens)
    head = _pieces(tokenizer, shown, add_generation_prompt=opens)[0]
    if not text.startswith(head):
        raise _unwritten("user")
    told, system_end = _told(shown), len(head)
    if told not in head:  # some templates put it into the last turn
        system_end = text.index(told) + len(told) if told in text else len(head)
    places = [place for place, message in enumerate(shown) if message["role"] == "assistant"]
    spans = _marked(tokenizer, shown, opens)
    if spans is not None and len(spans) != len(places):
        raise ValueError(
            f"the tokenizer's chat template marks {len(spans)} texts as generated, but there are {len(places)} "
            "assistant messages; set another chat_template"
        )
    if spans is None:
        spans, after = [], 0
        for place in places:
            spans.append(_difference(tokenizer, shown, place, text, after))
            after = spans[-1][1]
    return RenderedPrompt(text, spans, "", system_end)


def _shown(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    return [{**each, "content": hidden_specials(tokenizer, each["content"])} for each in messages]


def _told(messages: Sequence[Message]) -> str:
    """Return what the system says first."""
    first = messages[0]
    return first["content"].strip() if first["role"] == "system" else ""


def _pieces(tokenizer: Any, messages: Sequence[Message], **options: Any) -> list[str]:
    """Return the template's texts before, between and after what user and assistants say."""
    said = [each["role"] != "system" for each in messages]
    marked = [{**each, "content": _MARK} if spoken else each for each, spoken in zip(messages, said, strict=True)]
    pieces = filled_template(tokenizer, marked, **options).split(_MARK)
    if len(pieces) != sum(said) + 1:
        raise _unwritten("user" if messages[-1]["role"] == "user" else "assistant")
    if not any(_told(messages) in piece for piece in pieces):
        raise _unwritten("system")
    return pieces


def _marked(tokenizer: Any, messages: Sequence[Message], opens: bool) -> list[tuple[int, int]] | None:
    """Return what the template marks as generated; None where it has no such marks."""
    template = tokenizer.get_chat_template()
    if not re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return None
    with _bounded():
        _, (spans,) = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=opens,
            **tokenizer.special_tokens_map,
        )
    return list(spans)


def _difference(tokenizer: Any, messages: Sequence[Message], place: int, text: str, after: int) -> tuple[int, int]:
    """Return the span of one message in a rendered conversation, which has no marks.

    Args:
        tokenizer: one with a template.
        messages: the conversation's.
        place: of the assistant's message.
        text: the conversation.
        after: characters before which the message cannot be.
    """
    said = messages[place]["content"].strip()
    prompt = filled_template(tokenizer, messages[:place], add_generation_prompt=True) if place else ""
    until = filled_template(tokenizer, messages[: place + 1])
    begun = text.startswith(prompt)
    ending = until.rpartition(said)[2] if said else until.removeprefix(prompt)
    # some templates write the end of a text beside that of its last turn
    ends = [ending.rstrip() or ending, ending.removesuffix(tokenizer.eos_token or "").rstrip()]
    for end in filter(None, ends if said in until else []):
        start = text.find(said + end, max(after, len(prompt)) if begun else after)
        if start >= 0:
            return (len(prompt) if begun else start), start + len(said + end)
    raise ValueError(
        f"the tokenizer's chat template does not write what the assistant says in message {place + 1} as it is, so "
        "its tokens cannot be told; set another chat_template"
    )


def _unwritten(role: str) -> ValueError:
    return ValueError(f"the tokenizer's chat template does not write what the {role} says; set another chat_template")


@contextmanager
def _bounded() -> Iterator[None]:
    """Turn whatever a template raises into a ``ValueError``, and stop one after ``MAX_STEPS`` of its lines."""
    left, before = MAX_STEPS, sys.gettrace()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":  # as jinja names what it compiles
            return None
        left -= 1
        if left < 0:
            raise RuntimeError(f"it does not end within {MAX_STEPS:,} steps")
        return count

    try:
        sys.settrace(count)
        yield
    except Exception as error:  # whatever a template raises
        words = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"the tokenizer's chat template cannot be filled: {words}") from error
    finally:
        sys.settrace(before)
