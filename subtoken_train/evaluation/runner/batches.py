"""Samples to batches: which are answered together, what the model reads; and prompts for passes without answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords, Record
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.errors import MAX_TOKENS
from subtoken_train.evaluation.tasks.task import Modality, Sample
from subtoken_train.families.family import Family
from subtoken_train.inference.batched import in_batches
from subtoken_train.inference.text_prompts import (
    EncodedText,
    encode_chat,
    encode_text,
    in_chat,
    text_batch,
    without_middle,
)
from subtoken_train.types import Batch, Turn

Continuations = list[tuple[tuple[int, ...], ...]]


def plan_batches(samples: Sequence[Sample], batch_size: int) -> list[list[int]]:
    """Which samples are answered together: places of ``samples``, the longest first, so that memory runs out at once.

    Samples of one batch ask for the same: as many new tokens under the same stops, or choices to be scored. The plan
    depends on samples and size only, never on what was answered already.
    """

    def asks(place: int) -> tuple[bool, int, tuple[str, ...]]:
        sample = samples[place]
        return bool(sample.choices), 0 if sample.choices else sample.max_new_tokens, sample.stop

    def length(place: int) -> tuple[int, int]:
        return len(samples[place].images), len(samples[place].prompt)

    order = sorted(range(len(samples)), key=lambda place: (asks(place), *(-n for n in length(place)), place))
    return [list(batch) for _, alike in groupby(order, key=asks) for batch in in_batches(list(alike), batch_size)]


def model_inputs(
    samples: Sequence[Sample], family: Family, modality: Modality, max_length: int | None
) -> tuple[Batch, Continuations]:
    """The batch of some samples' prompts and, for samples with choices, the choices' token ids.

    Raises:
        ValueError: an image cannot be read, or a prompt is longer than ``max_length``.
    """
    if modality == "image":
        assert not any(sample.choices for sample in samples)
        records = [Record(s.id, list(s.images), [*s.earlier, Turn(s.prompt)], s.kind) for s in samples]
        return Collator(family, max_length or MAX_TOKENS, padding_side="left", generation=True)(records), []
    encoded = [_encoded(sample, family, max_length) for sample in samples]
    return text_batch(family, encoded), [text.continuations for text in encoded]


def _encoded(sample: Sample, family: Family, max_length: int | None) -> EncodedText:
    try:
        prompt, context = sample.prompt, sample.context_characters
        if sample.cut_middle:
            assert context is not None
            prompt, context = without_middle(family, prompt, context, max_length, sample.max_new_tokens, sample.chat)
            max_length = None  # it fits, and a token more than asked for may have come in where both ends meet
        if sample.chat and sample.prefix_characters is not None:
            assert context is not None
            end = len(prompt) - sample.prefix_characters
            parts = prompt[:context], prompt[context:end], prompt[end:]
            return replace(encode_chat(family, *parts, max_length=max_length), record_id=sample.id)
        if sample.chat:
            prompt, context = in_chat(family, prompt, context)
        text = encode_text(family, prompt, sample.choices, context, max_length=max_length)
    except ValueError as error:
        raise ValueError(f"sample {sample.id!r}: {error}") from error
    return replace(text, record_id=sample.id)


def record_prompts(
    family: Family, records: InstructionRecords, limit: int, batch_size: int = 16, max_length: int = 2048
) -> Iterator[Batch]:
    """The first ``limit`` records in order, the last turn of each without its answer, padded on the left."""
    collate = Collator(family, max_length, padding_side="left", generation=True)
    for places in in_batches(range(min(limit, len(records))), batch_size):
        yield collate([records[i] for i in places])


def recall_prompts(family: Family, limit: int, batch_size: int = 16, context_length: int = 512) -> Iterator[Batch]:
    """``limit`` contexts of ``context_length`` tokens with a question after them: dev samples of key-value recall.

    See ``datasets/recall.py``: English that ships with the project, for a language model with any tokenizer.
    """
    records = RecallRecords(RecallTask(family.tokenizer, context_length), "dev", limit)
    pad_id = padding_id(family.tokenizer)
    for places in in_batches(range(limit), batch_size):
        samples = [records[i].text for i in places]
        yield collate_text(
            [replace(sample, input_ids=sample.input_ids[: sample.prompt_length]) for sample in samples], pad_id
        )
