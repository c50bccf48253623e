"""Contexts whose questions are not there yet, as batches: a text, or the pictures of one prompt.

Legend: B batch, N positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from subtoken_train.datasets.text_batches import padding_id
from subtoken_train.documents import check_characters
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.families.images import Picture
from subtoken_train.functional.digests import digest_tensor
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.inputs import inputs_of
from subtoken_train.inference.opening import contexts_of, reader_of_question
from subtoken_train.inference.prefill import check_before_prefill
from subtoken_train.inference.prompt_batch import batch_from_inputs, joined_batches
from subtoken_train.inference.question_frames import QuestionFrame, picture_frame, text_frame
from subtoken_train.inference.text_prompts import EncodedText, text_batch, text_ids
from subtoken_train.inference.tokens_given import check_ids
from subtoken_train.types import Batch

Context = str | Sequence[Picture]
"""What questions are about: a text, or the pictures of one prompt."""


def context_batches(
    backbone: CompressedBackbone, compression: Compression, contexts: Sequence[Context]
) -> tuple[Batch, list[QuestionFrame]]:
    """Contexts as one batch that a prefill takes, and the frames of their questions.

    Args:
        backbone: in evaluation mode.
        compression: eviction and precision.
        contexts: at least one.

    Raises:
        ValueError: something that compresses reads the question, which is not there; a context that is empty, or
            of another kind than the model reads.
    """
    if (reads := reader_of_question(backbone, compression)) is not None:
        raise ValueError(f"ask compresses before any question is seen, but {reads}; use generate or chat")
    family = backbone.family
    made = [_context_batch(family, context) for context in contexts]
    batch = joined_batches([each for each, _ in made], padding_id(family.tokenizer))
    check_ids(batch.input_ids_BN, family.model.get_input_embeddings().num_embeddings)
    check_before_prefill(backbone, batch, compression)
    return batch, [frame for _, frame in made]


def _context_batch(family: Family, context: Context) -> tuple[Batch, QuestionFrame]:
    """One context as a batch on the model's device, and the frame of its questions."""
    return _pictures(family, context) if family.sees_images else _text(family, context)


def _text(family: Family, context: Context) -> tuple[Batch, QuestionFrame]:
    """A text as a batch of one context."""
    if not isinstance(context, str):
        raise ValueError(f"{family.name} reads texts; a context is {type(context).__name__}, not text")
    if not context.strip():
        raise ValueError("a context is empty; write what the questions are about")
    check_characters(context, "a context")
    head, frame = text_frame(family, context)
    ids = text_ids(family, head)
    # a prompt must ask: its last token does, and goes again
    prompt = text_batch(family, [EncodedText((*ids, ids[-1]), len(ids))])
    return _named(contexts_of(prompt), family), frame


def _pictures(family: Family, context: Context) -> tuple[Batch, QuestionFrame]:
    """Pictures as a batch of one context: all up to the last visual token."""
    if isinstance(context, str) or not context:
        raise ValueError(
            f"{family.name} sees images: a context is an image or a list of images, and text belongs to the questions"
        )
    inputs = inputs_of(family, "?", context)
    visible_BN = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    prompt = batch_from_inputs(family, inputs["input_ids"], visible_BN, inputs, None)
    return _named(contexts_of(prompt), family), picture_frame(family, context)


def _named(batch: Batch, family: Family) -> Batch:
    """On the model's device, with its digest as its name, so that random choices do not depend on the batch."""
    digest = hashlib.sha256()
    for name in ("input_ids_BN", "pixel_values", "image_grid_I3", "seconds_I"):
        if (part := getattr(batch, name)) is not None:
            digest_tensor(digest, name, part)
    return replace(on_device(batch, family.device), record_ids=[digest.hexdigest()])
