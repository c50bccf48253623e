"""Text-only samples as padded batches: a context, a query and what is predicted. Legend: B batch, N positions.

A sample is ``[SYSTEM ... | CONTEXT ... | QUERY ... | ANSWER ...]``, often without the first. Nothing that is decided
before ANSWER may look at it. Where a sample has none, the whole query region is read *and* predicted.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from subtoken_train.families.family import Family
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, Region, RenderedPrompt

QUERY_TOKENS = 64  # last tokens of a prompt that ask, unless told


@dataclass(frozen=True)
class TextSample:
    """One text as unpadded token ids."""

    input_ids: Sequence[int]  # token ids; a BOS, where there is one, is the first of the system's or the context
    context_length: int
    query_length: int  # tokens of the QUERY region, right after the context
    record_id: str
    without_loss: Sequence[int] = ()  # places that are read and never labelled: QUERY, behind the prompt
    system_length: int = 0  # tokens of the SYSTEM region, before the context

    @property
    def prompt_length(self) -> int:
        """Tokens before the ANSWER region."""
        return self.system_length + self.context_length + self.query_length


def collate_text(samples: Sequence[TextSample], pad_id: int) -> Batch:
    """Pad on the right, mark the regions, label ANSWER (or QUERY, where there is none), rank by the last of QUERY."""
    shape = len(samples), max(len(sample.input_ids) for sample in samples)
    input_ids_BN = torch.full(shape, pad_id)
    labels_BN = torch.full(shape, IGNORE_INDEX)
    regions_BN = torch.full(shape, int(Region.PADDING))
    for row, sample in enumerate(samples):
        length, system, prompt = len(sample.input_ids), sample.system_length, sample.prompt_length
        asks = system + sample.context_length
        assert asks < prompt <= length
        input_ids_BN[row, :length] = torch.as_tensor(sample.input_ids)
        regions_BN[row, :system] = int(Region.SYSTEM)
        regions_BN[row, system:asks] = int(Region.CONTEXT)
        regions_BN[row, asks:prompt] = int(Region.QUERY)
        regions_BN[row, prompt:length] = int(Region.ANSWER)
        first_label = asks if prompt == length else prompt
        labels_BN[row, first_label:length] = input_ids_BN[row, first_label:length]
        read = torch.as_tensor(sample.without_loss, dtype=torch.long)
        labels_BN[row, read] = IGNORE_INDEX
        regions_BN[row, read[read >= prompt]] = int(Region.QUERY)
    return Batch(
        input_ids_BN=input_ids_BN,
        labels_BN=labels_BN,
        regions_BN=regions_BN,
        rank_position_B=torch.tensor([sample.prompt_length - 1 for sample in samples]),
        pixel_values=None,
        images_per_sample_B=torch.zeros(len(samples), dtype=torch.long),
        record_ids=[sample.record_id for sample in samples],
    )


def context_tokens(family: Family, token_ids: list[int], asking: int = QUERY_TOKENS) -> int:
    """Count context tokens: up to the last blank line of the later half, else all but the last ``asking`` ones."""

    def text(start: int) -> str:
        return str(family.tokenizer.decode(token_ids[start - 1 :]))

    starts = range(len(token_ids) // 2 + 1, len(token_ids))
    # the later the start the shorter the ending: the last one that still holds a blank line is found by halving
    place = bisect_left(starts, True, key=lambda start: "\n\n" not in text(start))
    if place and text(starts[place - 1]).split("\n\n")[-1].strip():
        return starts[place - 1]
    return max(0, len(token_ids) - asking)


def chat_split(
    family: Family, ids: list[int], starts: Sequence[int], prompt: RenderedPrompt, asking: int = QUERY_TOKENS
) -> tuple[int, int]:
    """Return how many tokens of a chat's prompt stand before its context, and how many before what asks.

    The last question asks, with the template's end: all of it where it has at most ``asking`` tokens, otherwise its
    last part, as ``context_tokens``. ``starts``: the characters of ``ids``.
    """
    if not starts:
        raise ValueError("the tokenizer gives no character offsets; install its fast (tokenizer.json) version")
    assert prompt.asked is not None
    system, opening, begin, end = (bisect_left(starts, place) for place in (prompt.system_end, *prompt.asked))
    asks = max(system, opening)
    return system, begin + context_tokens(family, ids[begin:end], asking) if end - begin > asking else asks


def padding_id(tokenizer: object) -> int:
    """Return the tokenizer's pad token, or its EOS where it has none."""
    for name in ("pad_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    raise ValueError("the tokenizer has neither a pad nor an EOS token; set one of them")
