"""Conversations as a language model's samples: a chat each, in the tokenizer's own template, and only answers learnt.

Before the first learnt answer stands the prompt: template and system text (SYSTEM), what may be compressed (CONTEXT),
and what asks (QUERY): of a long question its end. Behind it, answers are ANSWER and what is read between them QUERY.
``as_asked`` learns the last answer alone, in the form that asks.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from subtoken_train.datasets.collate import all_masked, starts_within
from subtoken_train.datasets.conversations import chat_messages
from subtoken_train.datasets.corpus import IDS, CorpusSource, fingerprint
from subtoken_train.datasets.record_format import answer_is_learnt, used_turns
from subtoken_train.datasets.row_files import Kind, kept_rows
from subtoken_train.datasets.text_batches import TextSample, chat_split, context_tokens
from subtoken_train.errors import at_place, refuse
from subtoken_train.families import chat_template as template
from subtoken_train.families.chat_template import Message
from subtoken_train.families.family import Family
from subtoken_train.families.literal_marks import tokenise

if TYPE_CHECKING:
    from datasets import Dataset


def reads_chats(source: CorpusSource, tokenizer: Any) -> bool:
    """Return whether a corpus is one of conversations that the tokenizer has a template for."""
    return source.documents == "conversations" and bool(tokenizer.chat_template)


@dataclass(frozen=True)
class ChatLimits:
    """Limits of a chat in tokens, and how it is written."""

    length: int  # of the whole; a longer one is cut at the right, behind its prompt
    context: int  # of its context, at most
    asking: int  # of a question that asks as a whole; of a longer one so many at its end, or what follows a blank line
    as_asked: bool = False  # whether only the last answer that is learnt is, right behind the prompt that asks for it
    variables: Mapping[str, Any] = field(default_factory=dict)  # given to the chat template


def iterate_chats(rows: Iterable[dict[str, Any]], family: Family, limits: ChatLimits) -> Iterator[TextSample]:
    """Yield the chats of some conversations (rows of ``corpus.load_rows``) in order."""
    refuse((not limits.asking, "data.prefix_tokens is 0, and the prompt of a chat must ask; give it 1 or more"))
    for row in rows:
        yield chat_sample(row, family, limits)


def chat_sample(row: dict[str, Any], family: Family, limits: ChatLimits) -> TextSample:
    """Return a conversation (a row of ``corpus.load_rows``) as a sample."""
    tokenizer, conversation = family.tokenizer, json.loads(row["conversation"])
    with at_place(f"{row['name']}: "):
        messages = chat_messages(conversation)
        switches = [answer_is_learnt(turn) for turn in used_turns(conversation)[1::2]]
        variables = template.checked_variables(tokenizer, limits.variables)
        if limits.as_asked and True in switches:
            answers = len(switches) - switches[::-1].index(True)
            messages, switches = messages[: _places(messages)[answers - 1] + 1], [True]
        made = template.rendered_as_asked if limits.as_asked else template.rendered_conversation
        rendered = made(tokenizer, messages, **variables)
        ids, starts = tokenise(tokenizer, rendered.text)
        spans = [span for span, learnt in zip(rendered.answer_spans, switches, strict=True) if learnt]
        learnt = starts_within(starts, spans, rendered.text)
        if not any(learnt[: limits.length]):
            raise all_masked(len(ids), limits.length)
        length = learnt.index(True)
        first = _places(messages)[-len(switches) :][switches.index(True)]
        prompt = template.rendered_prompt(tokenizer, messages[:first], **variables)
        if rendered.text.startswith(prompt.text):
            system, asks = chat_split(family, ids, starts, prompt, limits.asking)
        else:  # the template writes a prompt otherwise, once it is answered
            system = min(bisect_left(starts, rendered.system_end), length)
            asks = max(system, context_tokens(family, ids[:length], limits.asking))
        if asks - system > limits.context:
            raise ValueError(f"its context has {asks - system:,} tokens, more than context_length {limits.context:,}")
    read = [place for place in range(length, min(len(ids), limits.length)) if not learnt[place]]
    return TextSample(ids[: limits.length], asks - system, length - asks, row["name"], read, system)


def _places(messages: Sequence[Message]) -> list[int]:
    return [place for place, each in enumerate(messages) if each["role"] == "assistant"]


def cached_chats(rows: "Dataset", source: CorpusSource, family: Family, limits: ChatLimits) -> "Dataset":
    """Return the chats of a corpus, kept, by the fields of ``TextSample``."""
    tokenizer = family.tokenizer
    specials = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}  # which a template may write
    name = fingerprint(rows, source, tokenizer, tokenizer.get_chat_template(), specials, *astuple(limits))
    lengths = dict.fromkeys(("context_length", "query_length", "system_length"), "int32")
    columns: dict[str, Kind] = {**IDS, "without_loss": ("int32",), **lengths, "record_id": "string"}
    return kept_rows(lambda: map(vars, iterate_chats(rows, family, limits)), columns, name)


def asked_words(tokenizer: Any, limits: ChatLimits) -> str | None:
    """Return in words how a prompt that asks differs from one in a conversation; None where chats begin as it does."""
    variables = template.checked_variables(tokenizer, limits.variables)
    if limits.as_asked or (forms := template.asked_otherwise(tokenizer, **variables)) is None:
        return None
    written, asked, which = forms
    instead = "set data.as_asked: true to train answers where they are asked, or data.chat_template_kwargs"
    return f"the chat template writes {written!r} before {which} in a conversation, but asks by {asked!r}; {instead}"


def wholly_read(context_lengths: Sequence[int], limits: ChatLimits) -> str | None:
    """Return in words how many chats have no context that could be compressed; None where each has one."""
    if not (whole := sum(length == 0 for length in context_lengths)):
        return None
    which = f"{whole:,} of {len(context_lengths):,} chats have no context"
    short = f"a first question of {limits.asking:,} tokens or fewer"
    return f"{which} ({short}): they are trained whole, and no router learns from them"
