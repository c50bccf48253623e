"""The prompts that calibrations are made of: a file's, or drawn ones that ship with the project."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.fabric.utilities import move_data_to_device

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.text_batches import collate_text, padding_id
from subtoken_train.errors import MAX_TOKENS
from subtoken_train.families.family import Family
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.batched import in_batches
from subtoken_train.types import Batch

RECALL = "recall"
"""The data set of language models: facts among English, questions and answers; the training split."""


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from.

    Attributes:
        name: a data set's, or a file's.
        batches: padded, on the backbone's device.
        sha256: digest of the file; None for drawn prompts.
    """

    name: str
    batches: Iterator[Batch]
    sha256: str | None = None


def calibration_prompts(
    family: Family, data: str | None, samples: int, batch_size: int, context_length: int, seed: int, answers: bool
) -> PromptSource:
    """Prompts for a backbone.

    Args:
        family: the backbone's.
        data: a language model reads ``recall``, the default; one that sees images a file of records.
        samples: prompts, or as many as a file has.
        batch_size: of them, at a time.
        context_length: tokens of a drawn context.
        seed: of what is drawn.
        answers: whether the answers follow.

    Raises:
        ValueError: data of the other kind, or a broken file.
    """
    if family.image_token_id is None:
        if data not in (None, RECALL):
            raise ValueError(f"data {data!r}: {family.name} is calibrated on {RECALL!r}; leave it out")
        return PromptSource(RECALL, _drawn(family, samples, batch_size, context_length, seed, answers))
    if data is None:
        example = "for instance data/scenes/dev.json"
        raise ValueError(f"{family.name} is calibrated on a file of records with images; give data, {example}")
    records = InstructionRecords(data)
    with Path(data).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PromptSource(Path(data).name, _read(family, records, samples, batch_size, answers), digest)


def _drawn(
    family: Family, samples: int, batch_size: int, context_length: int, seed: int, answers: bool
) -> Iterator[Batch]:
    records = RecallRecords(RecallTask(family.tokenizer, context_length), "train", samples, seed)
    for places in in_batches(range(samples), batch_size):
        texts = [records[i].text for i in places]
        if not answers:
            texts = [replace(text, input_ids=text.input_ids[: text.prompt_length]) for text in texts]
        yield move_data_to_device(collate_text(texts, padding_id(family.tokenizer)), family.device)


def _read(family: Family, records: InstructionRecords, samples: int, batch_size: int, answers: bool) -> Iterator[Batch]:
    bound = position_bound(family.decoder.config) or MAX_TOKENS
    collate = Collator(family, bound, generation=not answers)
    for places in in_batches(range(min(samples, len(records))), batch_size):
        yield move_data_to_device(collate([records[i] for i in places]), family.device)
