"""Token sequences with a context, a query and what is predicted, as padded batches: the regions of text-only samples.

Legend: B batch, N sequence positions.

A sample is laid out as ``[CONTEXT ... | QUERY ... | ANSWER ...]``. Reducers and query summaries read CONTEXT and QUERY;
the ANSWER tokens are predicted, so nothing that is decided before them may look at them. Where a sample has no ANSWER
(the ``region`` reading: the whole query region is read *and* predicted), QUERY carries the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, Region


@dataclass(frozen=True)
class TextSample:
    """One unpadded sequence.

    Attributes:
        input_ids: token ids; a BOS, where there is one, is the first of the context.
        context_length: tokens of the CONTEXT region.
        query_length: tokens of the QUERY region, right after the context.
        record_id: a name for messages and logs.
        without_loss: places in it that are read and never labelled.
    """

    input_ids: Sequence[int]
    context_length: int
    query_length: int
    record_id: str
    without_loss: Sequence[int] = ()

    @property
    def prompt_length(self) -> int:
        """Tokens before the ANSWER region."""
        return self.context_length + self.query_length


def collate_text(samples: Sequence[TextSample], pad_id: int) -> Batch:
    """Pad on the right, mark the regions, label the ANSWER tokens (the QUERY tokens where there is no ANSWER).

    ``rank_position_B`` is the last position of QUERY, ``pad_id`` the id at PADDING positions.
    """
    shape = len(samples), max(len(sample.input_ids) for sample in samples)
    input_ids_BN = torch.full(shape, pad_id)
    labels_BN = torch.full(shape, IGNORE_INDEX)
    regions_BN = torch.full(shape, int(Region.PADDING))
    for row, sample in enumerate(samples):
        length, prompt = len(sample.input_ids), sample.prompt_length
        assert 0 < sample.query_length <= length - sample.context_length
        input_ids_BN[row, :length] = torch.as_tensor(sample.input_ids)
        regions_BN[row, : sample.context_length] = int(Region.CONTEXT)
        regions_BN[row, sample.context_length : prompt] = int(Region.QUERY)
        regions_BN[row, prompt:length] = int(Region.ANSWER)
        first_label = sample.context_length if prompt == length else prompt
        labels_BN[row, first_label:length] = input_ids_BN[row, first_label:length]
        labels_BN[row, torch.as_tensor(sample.without_loss, dtype=torch.long)] = IGNORE_INDEX
    return Batch(
        input_ids_BN=input_ids_BN,
        labels_BN=labels_BN,
        regions_BN=regions_BN,
        rank_position_B=torch.tensor([sample.prompt_length - 1 for sample in samples]),
        pixel_values=None,
        images_per_sample_B=torch.zeros(len(samples), dtype=torch.long),
        record_ids=[sample.record_id for sample in samples],
    )


def padding_id(tokenizer: object) -> int:
    """Return the tokenizer's pad token, or its EOS where it has none.

    Raises:
        ValueError: it has neither.
    """
    for name in ("pad_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    raise ValueError("the tokenizer has neither a pad nor an EOS token; set one of them")
