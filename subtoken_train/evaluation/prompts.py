"""Batches of prompts without answers, for passes that do not generate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.families.base import Family
from subtoken_train.types import Batch


def record_prompts(
    family: Family, records: InstructionRecords, limit: int, batch_size: int = 16, max_length: int = 2048
) -> Iterator[Batch]:
    """The first ``limit`` records in order, the last turn of each without its answer, padded on the left."""
    collate = Collator(family, max_length, padding_side="left", generation=True)
    total = min(limit, len(records))
    for start in range(0, total, batch_size):
        yield collate([records[i] for i in range(start, min(start + batch_size, total))])


def recall_prompts(family: Family, limit: int, batch_size: int = 16, context_length: int = 512) -> Iterator[Batch]:
    """``limit`` contexts of ``context_length`` tokens with a question after them: dev samples of key-value recall.

    See ``datasets/recall.py``: English that ships with the project, for a language model with any tokenizer.
    """
    records = RecallRecords(RecallTask(family.tokenizer, context_length), "dev", limit)
    pad_id = padding_id(family.tokenizer)
    for start in range(0, limit, batch_size):
        samples = [records[i].text for i in range(start, min(start + batch_size, limit))]
        yield collate_text(
            [replace(sample, input_ids=sample.input_ids[: sample.prompt_length]) for sample in samples], pad_id
        )
