"""Samples to batches: which are answered together, and what the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from subtoken_train.backbones.base import Family, Turn
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import Record
from subtoken_train.evaluation.tasks.base import Modality, Sample
from subtoken_train.inference.text_prompts import encode_text, text_batch
from subtoken_train.types import Batch

Continuations = list[list[list[int]]]


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
    samples: Sequence[Sample], family: Family, modality: Modality, max_length: int
) -> tuple[Batch, Continuations]:
    """The batch of some samples' prompts and, for samples with choices, the choices' token ids.

    Raises:
        ValueError: an image cannot be read, or a prompt is longer than ``max_length``.
    """
    if modality == "image":
        assert not any(sample.choices for sample in samples)
        records = [Record(s.id, list(s.images), [Turn(s.prompt)], s.kind) for s in samples]
        return Collator(family, max_length, padding_side="left", generation=True)(records), []
    encoded = [encode_text(family, s.prompt, s.choices, s.context_characters) for s in samples]
    for sample, text in zip(samples, encoded, strict=True):
        longest = len(text.input_ids) + max(map(len, text.continuations), default=0)
        if longest > max_length:
            raise ValueError(
                f"sample {sample.id!r} has {longest} tokens, more than the {max_length} of the model or of max_length"
            )
    return text_batch(family, encoded), [text.continuations for text in encoded]
