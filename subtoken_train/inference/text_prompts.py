"""Texts as token ids: prompts and continuations, questions after a context, LongBench's long prompts.

Prompts and continuations follow lm-evaluation-harness (``TemplateLM._encode_pair``, ``HFLM`` of lm_eval 0.4.13): both
are encoded together, and the continuation's ids are what comes after as many as the prompt alone has. No token spans a
compressed context and its question.

Legend: B batch, N positions.
"""

import hashlib
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from subtoken_train.datasets.text_batches import TextSample, chat_split, collate_text, context_tokens, padding_id
from subtoken_train.errors import SubTokenWarning, refuse
from subtoken_train.families.chat_template import Message, filled_template, rendered_prompt
from subtoken_train.families.family import Family
from subtoken_train.families.images import Picture, count_images
from subtoken_train.families.literal_marks import IMAGE_MARK, as_text, hidden_turn, tokenise
from subtoken_train.families.positions import position_bound
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, RenderedPrompt, Turn

_MARK = "(the question stands here)"
_GOES_ON = "\udfff"
"""Half of a character, which no text holds: behind it an answer would end."""


@dataclass(frozen=True)
class QuestionFrame:
    """The texts between a context and the answer: ``before`` and ``after`` the question.

    A question is encoded behind ``anchor``, which is then taken off: tokenizers begin a text otherwise than they go on
    with one. White space in ``before`` is left out where the question begins with a line break.
    """

    anchor: str
    before: str
    after: str

    def ids(self, family: Family, question: str) -> list[int]:
        """Return the token ids between the context and the answer."""
        if family.sees_images or self.after:
            question = as_text(family, question.strip() if family.sees_images else question)
        held = [mark for mark in (IMAGE_MARK, *family.placeholders) if family.sees_images and mark in question]
        belongs = f"all pictures belong to the context (where it is text, write \\{IMAGE_MARK})"
        refuse((held, f"a question holds {''.join(held[:1])}; {belongs}"))
        text = ("" if question.startswith("\n") and not self.before.strip() else self.before) + question + self.after
        texts = (self.anchor, self.anchor + text, text)
        anchor, whole, alone = (tokenise(family.tokenizer, words)[0] for words in texts)
        ids: list[int] = whole[len(anchor) :] if whole[: len(anchor)] == anchor else alone
        refuse((not ids, f"the question {question[:40]!r} has no tokens"))
        return ids


RAW_FRAME = QuestionFrame("\n", "", "")
"""Without a chat template a question follows its context as both are written."""


def text_frame(
    family: Family, context: str, system: str | None = None, **variables: object
) -> tuple[str, int, QuestionFrame]:
    """Return a context in the chat template, the characters before it, and the frame of its questions."""
    messages: list[Message] = [*_told(system), {"role": "user", "content": context + _MARK}]
    rendered = rendered_prompt(family.tokenizer, messages, **variables)
    assert rendered.asked is not None
    end = rendered.asked.end
    # behind a letter no line break is joined to what stands before it, behind a line break no letter
    anchor, before = ("\n", "") if context.endswith("\n") else ("a", "\n\n")
    return rendered.text[: end - len(_MARK)], rendered.system_end, QuestionFrame(anchor, before, rendered.text[end:])


def system_frame(family: Family, context: str, **variables: object) -> tuple[str, int, QuestionFrame]:
    """Return likewise a context that is what the system says; questions are the user's first turn."""
    told: list[Message] = [*_told(context), {"role": "user", "content": _MARK}]
    rendered = rendered_prompt(family.tokenizer, told, **variables)
    assert rendered.asked is not None
    text, asked, (start, end) = rendered.text, rendered.asked, rendered.told
    end = start + len(text[start:end].rstrip())
    return text[:end], start, QuestionFrame("a", text[end : asked.start], text[asked.end :])


def further_turns(family: Family, messages: Sequence[Message], **variables: object) -> str:
    """Return what the chat format writes between a first question, which is not given, and the last answer."""
    asked: Message = {"role": "user", "content": _MARK}
    if not family.sees_images:
        check_template(family.tokenizer)
        return rendered_prompt(family.tokenizer, [asked, *messages], **variables).text.partition(_MARK)[2]
    turns = [hidden_turn(family, turn) for turn in as_turns([asked, *messages])]
    return rendered_turns(family, turns).text.partition(_MARK)[2]


def as_turns(messages: Sequence[Message]) -> list[Turn]:
    """Return messages as turns for chat formats without a template, the system's words before the first question."""
    told, said = "", list[Message]()
    for number, message in enumerate(messages, 1):
        role, last = message["role"], said[-1]["role"] if said else None
        due = "assistant" if last == "user" else "user"
        if role == "system" and number == 1:
            told = message["content"].strip()
        elif role == last:
            said[-1] = {**message, "content": f"{said[-1]['content']}\n{message['content']}"}
        elif role == due:
            said.append(message)
        else:
            words = f"message {number} is the {role}'s where the {due}'s is due"
            raise ValueError(f"{words}; user and assistant take turns, after one system message at most")
    contents = [each["content"] for each in said]
    if told:
        contents[0] = f"{told}\n\n{contents[0]}"
    answers = [*contents[1::2], *([None] if len(contents) % 2 else [])]
    return [Turn(asked, answer) for asked, answer in zip(contents[::2], answers, strict=True)]


def rendered_turns(family: Family, turns: Sequence[Turn]) -> RenderedPrompt:
    """Return turns in a chat format that is no template, up to the last answer's last word if there is one."""
    if (answer := turns[-1].answer) is None:
        return family.render(turns)
    rendered = family.render([*turns[:-1], replace(turns[-1], answer=answer + _GOES_ON)])
    return replace(rendered, text=rendered.text.rpartition(_GOES_ON)[0], answer_spans=rendered.answer_spans[:-1])


def check_raw(family: Family, raw: bool) -> None:
    """Refuse a raw prompt for a model that sees images, and warn of one for a model with a chat template."""
    seen = raw and family.sees_images
    refuse((seen, f"raw is for language models; {family.name} is asked in its chat format, leave it out"))
    if raw and family.tokenizer.chat_template:
        words = "a raw prompt for a model with a chat template: it will continue the text, not answer it"
        warnings.warn(f"{words}; leave raw out to ask it", SubTokenWarning, stacklevel=4)


def picture_frame(family: Family, pictures: Sequence[Picture], system: str | None = None) -> QuestionFrame:
    """Return the frame of questions that follow pictures, in the family's chat format."""
    turns = as_turns(picture_messages(pictures, _MARK, system))
    rendered = family.render([hidden_turn(family, turn) for turn in turns])
    head, _, after = rendered.text.rpartition(_MARK)
    last = family.picture_text(pictures[-1], rendered.image_marker, count_images(pictures))
    end, anchor = max((last.rfind(each) + len(each), each) for each in family.placeholders if each in last)
    return QuestionFrame(anchor, last[end:] + head.rpartition(rendered.image_marker)[2], after)


def picture_messages(pictures: Sequence[Picture], question: str, system: str | None) -> list[Message]:
    """Return a question about pictures, which stand in front of it, behind what the system says."""
    return [*_told(system), {"role": "user", "content": f"{IMAGE_MARK}\n" * len(pictures) + question}]


def _told(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


@dataclass(frozen=True)
class EncodedText:
    """One prompt of a language model.

    Of its ids, BOS included, ``system_length`` stay and the next ``context_length`` may be compressed; the others ask.
    The ``record_id`` is made of the prompt, so that random choices do not depend on the batch.
    """

    input_ids: tuple[int, ...]
    context_length: int
    continuations: tuple[tuple[int, ...], ...] = ()
    record_id: str = "text"
    system_length: int = 0


def encode_text(
    family: Family,
    prompt: str,
    continuations: Sequence[str] = (),
    context_characters: int | None = None,
    *,
    max_length: int | None = None,
) -> EncodedText:
    """Encode one prompt. With continuations, white space at its end moves to them.

    ``context_characters`` of the prompt, from its start, may be compressed; None: the default split. Prompt and
    continuation, whose last token needs none, may take ``max_length`` positions.
    """
    moved = prompt[len(prompt.rstrip()) :] if continuations else ""
    kept, most = prompt.removesuffix(moved) if moved else prompt, len(prompt) - 1
    outside = context_characters is not None and not 0 <= context_characters <= most
    place = f"must lie between 0 and {most}, the prompt's characters less one that asks"
    refuse(
        (family.sees_images, f"{family.name} is not a language model; its prompts are made by its chat format"),
        (not kept, "the prompt is empty; a language model needs at least one token to continue from"),
        (outside, f"context_characters={context_characters} {place}"),
    )
    ids = _ids(family, kept)
    pairs = [tuple(_ids(family, kept + moved + each)[len(ids) :]) for each in continuations]
    for text, pair in zip(continuations, pairs, strict=True):
        refuse((not pair, f"continuation {text!r} adds no token to the prompt; there is nothing to score"))
    context = context_tokens(family, ids) if context_characters is None else 0
    if context_characters:
        ends = [end for _, end in _spans(family, kept)[1]]
        context = min(next((i for i, end in enumerate(ends) if end > context_characters), len(ends)), len(ids) - 1)
    encoded = EncodedText(tuple(ids), context, tuple(pairs), _name(prompt.encode()))
    return _fitting(encoded, max(map(len, pairs), default=1) - 1, max_length)


def _name(content: bytes) -> str:
    return f"text {hashlib.sha256(content).hexdigest()[:16]}"


def _fitting(text: EncodedText, beside: int, most: int | None) -> EncodedText:
    total = len(text.input_ids) + beside
    long = most is not None and total > most
    refuse((long, f"the prompt needs {total} positions, but there are {most}; shorten it, or raise max_length"))
    return text


def _ids(family: Family, text: str, **how: Any) -> Any:
    """Ids of a text with what the tokenizer adds: BOS, unless the text starts with it."""
    bos = family.tokenizer.bos_token
    made = family.tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)), **how)
    return made if how else made["input_ids"]


def encode_chat(
    family: Family, context: str, asked: str, answer_prefix: str, *, max_length: int | None = None
) -> EncodedText:
    """Encode a prompt in the tokenizer's chat template, context and question apart, as kvpress does.

    Context and ``asked`` are one turn of the user; no token spans the end of the context, and no special token is
    added. A template that can ask a model to think first is told not to.
    """
    head, _, frame = text_frame(family, context, enable_thinking=False)
    asked = as_text(family, asked) + frame.after + answer_prefix
    first, second = (tokenise(family.tokenizer, text)[0] for text in (head, asked))
    nothing = "the chat template leaves nothing before or after the context; ask with chat: false"
    refuse((not first or not second, nothing))
    name = _name((head + asked).encode(errors="surrogatepass"))
    return _fitting(EncodedText((*first, *second), len(first), record_id=name), 0, max_length)


def encode_messages(family: Family, messages: Sequence[Message], **variables: object) -> EncodedText:
    """Encode a conversation that is to be answered, or gone on with, as the tokenizer's chat template writes it."""
    if family.tokenizer.chat_template:
        rendered = rendered_prompt(family.tokenizer, messages, **variables)
        ids, starts = tokenise(family.tokenizer, rendered.text)
        system, asks = chat_split(family, ids, starts, rendered)
    else:
        ids, _ = tokenise(family.tokenizer, rendered_turns(family, as_turns(messages)).text)
        system, asks = 0, context_tokens(family, ids)
    name = _name(torch.tensor(ids).numpy().tobytes())
    return EncodedText(tuple(ids), asks - system, record_id=name, system_length=system)


def tokens_before(starts: Sequence[int], character: int) -> int:
    """Return how many tokens begin before a character; ``starts`` are those of ``tokenise``."""
    refuse((not starts, _NO_OFFSETS))
    return bisect_left(starts, character)


_NO_OFFSETS = "the tokenizer gives no character offsets; install its fast (tokenizer.json) version"


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template."""
    refuse((not tokenizer.chat_template, "the tokenizer has no chat template; ask without one (chat: false)"))


def text_batch(family: Family, encoded: Sequence[EncodedText]) -> Batch:
    """Encode prompts as SYSTEM, CONTEXT and QUERY regions, padded on the right; continuations are left out."""
    samples = []
    for text in encoded:
        asks = len(text.input_ids) - text.system_length - text.context_length
        samples.append(TextSample(text.input_ids, text.context_length, asks, text.record_id, (), text.system_length))
    batch = collate_text(samples, padding_id(family.tokenizer))
    batch.labels_BN.fill_(IGNORE_INDEX)
    return batch


def told_ids(family: Family, system: str, text: str) -> tuple[list[int], int]:
    """Return the ids of a text behind what the system says, a blank line between, and how many begin before it."""
    if not system.strip():
        return _ids(family, text), 0
    told = f"{system.strip()}\n\n"
    ids, spans = _spans(family, told + text)
    return ids, tokens_before([start for start, _ in spans], len(told))


def _spans(family: Family, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    refuse((not family.tokenizer.is_fast, _NO_OFFSETS))
    made = _ids(family, text, return_offsets_mapping=True)
    return made["input_ids"], made["offset_mapping"]


def without_middle(
    family: Family, prompt: str, context: int, max_length: int | None, max_new_tokens: int, chat: bool = False
) -> tuple[str, int]:
    """Cut out of a prompt's middle what leaves no room for its answer (LongBench), and tell what may be compressed.

    ``context`` characters of the prompt may be; ``max_length`` are its tokens without a chat format (None: what the
    positions allow), ``chat`` whether ``in_chat`` is called next.
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
            return first + last, len(first + last) - min(len(prompt) - context, len(last))
        half -= (over + 1) // 2
    words = f"there is room for {limit} tokens of a prompt beside {max_new_tokens} of its answer"
    raise ValueError(f"{words}; raise max_length, or use a model with more positions")


def in_chat(family: Family, prompt: str, context: int | None) -> tuple[str, int | None]:
    """Write a prompt as the user's turn of the chat template; return it and the characters that may be compressed."""
    check_template(family.tokenizer)
    turns = [{"role": "user", "content": prompt}]
    text = filled_template(family.tokenizer, turns, add_generation_prompt=True, enable_thinking=False)
    if context is None:
        return text, None
    asked = rendered_prompt(family.tokenizer, turns, enable_thinking=False).asked  # of as many characters
    assert asked is not None
    stripped = len(prompt) - len(prompt.lstrip()) if asked.end - asked.start < len(prompt.rstrip()) else 0
    return text, min(max(0, asked.start - stripped + context), len(text) - 1)
