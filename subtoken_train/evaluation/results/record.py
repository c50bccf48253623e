"""What is kept of one answered sample: one line of JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from subtoken_train.evaluation.metrics.base import Prediction


@dataclass(frozen=True)
class SampleRecord:
    """One sample of one arm and task. Everything that scoring and reports need; no model is needed again.

    Bytes are of this sample's prompt cache: measured on the packed tensors, index included.

    Attributes:
        id: the sample's.
        kind: the sample's question kind.
        prompt_sha256: digest of what was asked, see ``prompt_digest``.
        reference: the sample's, for scoring again.
        prediction: generated text, or the log-likelihood of each choice.
        score: of this sample alone, see ``TaskMetric.score``.
        kv_bytes: the whole prompt: text, compressed region and index.
        dense_kv_bytes: the same prompt uncompressed.
        region_bytes: the compressed region (visual or context) alone; 0 where a prompt has none.
        region_dense_bytes: the same region uncompressed.
        index_bytes: of ``region_bytes``, those that find the stored value groups; the paper's fraction leaves them out.
        entries_before: (token, layer) entries of the compressed region before compression.
        entries_after: those that stayed in any head: the proof that token reduction or eviction acted.
        values_after: their value parts, in whole values, rounded to 4 places: below ``entries_after`` where routing
            acted.
        kept_visual: hexadecimal bits of the visual tokens that the last layer keeps, first token first; None for text.
        new_tokens: tokens generated or, for choices, scored.
        batch_size: samples that shared the pass.
        prefill_seconds: the batch's prompt pass over ``batch_size``.
        decode_seconds: what came after it, likewise.
    """

    id: str
    kind: str
    prompt_sha256: str
    reference: dict[str, Any]
    prediction: Prediction
    score: float
    kv_bytes: int
    dense_kv_bytes: int
    region_bytes: int
    region_dense_bytes: int
    index_bytes: int
    entries_before: int
    entries_after: int
    values_after: float
    kept_visual: str | None
    new_tokens: int
    batch_size: int
    prefill_seconds: float
    decode_seconds: float

    def line(self) -> str:
        """One line of JSON, newline included."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":")) + "\n"

    @classmethod
    def parse(cls, line: str | bytes, place: str) -> SampleRecord:
        """Read ``line`` back.

        Args:
            line: JSON.
            place: file and line, for the message.

        Raises:
            ValueError: it is no record.
        """
        try:
            content = json.loads(line)
            return cls(**{field.name: content.pop(field.name) for field in fields(cls)}, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is no record of a sample ({type(error).__name__} {error})") from None


TIMES = ("prefill_seconds", "decode_seconds")
"""The fields in which two runs of the same arm differ."""


def prompt_digest(prompt: str, choices: tuple[str, ...] = ()) -> str:
    """SHA-256 of what was asked, in hexadecimal."""
    return hashlib.sha256(json.dumps([prompt, *choices], ensure_ascii=False).encode()).hexdigest()
