"""Texts and continuations as token ids, by lm-evaluation-harness's rules, so that log-likelihoods are the same.

The rules (``TemplateLM._encode_pair`` and ``HFLM`` of lm_eval 0.4.13): a prompt and a continuation are encoded
together, and the continuation's ids are what comes after as many ids as the prompt alone has; white space at the end of
the prompt moves to the continuation first; BOS is what the tokenizer adds, unless the text starts with it.

Legend: B batch, N positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subtoken_train.datasets.text_batches import TextSample, collate_text, padding_id
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.inference.prompt_batch import context_tokens
from subtoken_train.inference.question_frames import text_frame
from subtoken_train.types import Batch


@dataclass(frozen=True)
class EncodedText:
    """One prompt of a language model.

    Attributes:
        input_ids: the prompt's, BOS included.
        context_length: of them, those that may be compressed; the others ask.
        continuations: token ids of each continuation.
        record_id: made of the prompt, so that random choices do not depend on the batch.
        dropped_tokens: ids cut from the left.
    """

    input_ids: tuple[int, ...]
    context_length: int
    continuations: tuple[tuple[int, ...], ...] = ()
    record_id: str = "text"
    dropped_tokens: int = 0


def encode_text(
    family: Family,
    prompt: str,
    continuations: Sequence[str] = (),
    context_characters: int | None = None,
    *,
    max_length: int | None = None,
    truncate_left: bool = False,
) -> EncodedText:
    """Encode one prompt.

    Args:
        family: a language model.
        prompt: what the model reads. With continuations, white space at its end moves to them.
        continuations: what is scored.
        context_characters: how much of the prompt, from its start, may be compressed; a token across that boundary is
            not in it. None: the default split, see ``context_tokens``.
        max_length: positions for prompt and continuation (its last token needs none); None: any number, or with
            ``truncate_left`` those that the model was made for.
        truncate_left: cut a longer prompt from the left, and say so in ``dropped_tokens``; the continuation is never
            cut.

    Raises:
        ValueError: a model that sees images, an empty prompt or continuation, a context that leaves nothing to ask, or
            a prompt that is too long.
    """
    if family.image_token_id is not None:
        raise ValueError(f"{family.name} is no language model; its prompts are made by its chat format")
    moved = prompt[len(prompt.rstrip()) :] if continuations else ""
    kept = prompt.removesuffix(moved) if moved else prompt
    if not kept:
        raise ValueError("the prompt is empty; a language model needs at least one token to go on from")
    if context_characters is not None and not 0 <= context_characters < len(prompt):
        raise ValueError(
            f"context_characters={context_characters} must lie between 0 and {len(prompt) - 1}, the prompt's "
            "characters less one that asks"
        )
    ids = text_ids(family, kept)
    pairs = [tuple(text_ids(family, kept + moved + each)[len(ids) :]) for each in continuations]
    for text, pair in zip(continuations, pairs, strict=True):
        if not pair:
            raise ValueError(f"continuation {text!r} adds no token to the prompt; there is nothing to score")
    total = len(ids) + max(map(len, pairs), default=1) - 1
    limit = position_bound(family.decoder.config) if max_length is None and truncate_left else max_length
    dropped = 0 if limit is None else max(0, total - limit)
    if dropped and (not truncate_left or dropped >= len(ids)):
        raise ValueError(_too_long(total, limit))
    if context_characters is None:
        context = context_tokens(family, ids[dropped:])
    else:
        context = max(0, min(_tokens_within(family, kept, context_characters), len(ids) - 1) - dropped)
    record_id = f"text {hashlib.sha256(prompt.encode()).hexdigest()[:16]}"
    return EncodedText(tuple(ids[dropped:]), context, tuple(pairs), record_id, dropped)


def encode_chat(
    family: Family, context: str, asked: str, answer_prefix: str, *, max_length: int | None = None
) -> EncodedText:
    """Encode a prompt in the tokenizer's chat template, what may be compressed and what asks apart, as kvpress does.

    Context and ``asked`` are one turn of the user. The template's text up to the end of the context is the one part;
    ``asked``, the template's end and the first words of the answer are the other. No token spans the two, and no
    special token is added: the template writes its own. One that can ask a model to think first is told not to.

    Args:
        family: a language model.
        context: what may be compressed; the question too, where it is to be.
        asked: what the user says after it, "" where the context holds the question.
        answer_prefix: what the answer begins with, which the model goes on from.
        max_length: positions; None: any number.

    Raises:
        ValueError: no chat template, one that cannot be filled, or a prompt that is too long.
    """
    check_template(family.tokenizer)
    head, frame = text_frame(family, context, enable_thinking=False)
    first, second = (
        family.tokenizer.encode(text, add_special_tokens=False) for text in (head, asked + frame.after + answer_prefix)
    )
    if not first or not second:
        raise ValueError("the chat template leaves nothing before or nothing after the context; ask with chat: false")
    total = len(first) + len(second)
    if max_length is not None and total > max_length:
        raise ValueError(_too_long(total, max_length))
    digest = hashlib.sha256((head + asked + frame.after + answer_prefix).encode()).hexdigest()
    return EncodedText((*first, *second), len(first), record_id=f"text {digest[:16]}")


def check_template(tokenizer: Any) -> None:
    """Raise a worded ``ValueError`` where a tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; ask without one (chat: false)")


def _too_long(total: int, limit: int | None) -> str:
    return f"the prompt needs {total} positions and there are {limit}; shorten it, or cut it on the left"


def text_batch(family: Family, encoded: Sequence[EncodedText]) -> Batch:
    """Prompts as a batch of CONTEXT and QUERY regions, padded on the right; continuations are left out."""
    samples = [
        TextSample(x.input_ids, x.context_length, len(x.input_ids) - x.context_length, x.record_id) for x in encoded
    ]
    batch = collate_text(samples, padding_id(family.tokenizer))
    batch.labels_BN.fill_(IGNORE_INDEX)
    return batch


def text_ids(family: Family, text: str) -> list[int]:
    """Ids of a text with what the tokenizer adds: BOS, unless the text starts with it."""
    ids: list[int] = family.tokenizer.encode(text, add_special_tokens=_adds_bos(family, text))
    return ids


def _adds_bos(family: Family, text: str) -> bool:
    bos = family.tokenizer.bos_token
    return not (bos and text.startswith(bos))


def _tokens_within(family: Family, text: str, characters: int) -> int:
    """Leading tokens that end at or before a character."""
    if not family.tokenizer.is_fast:
        raise ValueError("the tokenizer tells no character offsets; install its fast (tokenizer.json) version")
    made = family.tokenizer(text, add_special_tokens=_adds_bos(family, text), return_offsets_mapping=True)
    ends = [end for _, end in made["offset_mapping"]]
    return next((i for i, end in enumerate(ends) if end > characters), len(ends)) if characters else 0
