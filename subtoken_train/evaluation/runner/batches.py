"""Samples to batches: which are answered together, and what the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import Record
from subtoken_train.evaluation.tasks.task import Modality, Sample
from subtoken_train.families.base import Family, Turn
from subtoken_train.inference.text_prompts import EncodedText, encode_text, text_batch
from subtoken_train.types import Batch

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
    batches = []
    for _, alike in groupby(order, key=asks):
        places = list(alike)
        batches += [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
    return batches


def model_inputs(
    samples: Sequence[Sample], family: Family, modality: Modality, max_length: int | None
) -> tuple[Batch, Continuations]:
    """The batch of some samples' prompts and, for samples with choices, the choices' token ids.

    Raises:
        ValueError: an image cannot be read, or a prompt is longer than ``max_length`` or the model's positions.
    """
    if modality == "image":
        assert not any(sample.choices for sample in samples)
        records = [Record(s.id, list(s.images), [*s.earlier, Turn(s.prompt)], s.kind) for s in samples]
        positions = int(family.decoder.config.max_position_embeddings)
        return Collator(family, max_length or positions, padding_side="left", generation=True)(records), []
    encoded = [_encoded(sample, family, max_length) for sample in samples]
    return text_batch(family, encoded), [text.continuations for text in encoded]


def _encoded(sample: Sample, family: Family, max_length: int | None) -> EncodedText:
    try:
        text = encode_text(family, sample.prompt, sample.choices, sample.context_characters, max_length=max_length)
    except ValueError as error:
        raise ValueError(f"sample {sample.id!r}: {error}") from error
    return replace(text, record_id=sample.id)
