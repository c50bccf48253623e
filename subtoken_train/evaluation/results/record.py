"""What is kept of one answered sample: one line of JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from subtoken_train.evaluation.metrics.base import Prediction
from subtoken_train.inference.accounting import Measured


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Measured):
    """One sample of one arm and task. Everything that scoring and reports need; no model is needed again.

    Attributes:
        id: the sample's.
        kind: the sample's question kind.
        prompt_sha256: digest of what was asked, see ``prompt_digest``.
        reference: the sample's, for scoring again.
        prediction: generated text, or the log-likelihood of each choice.
        score: of this sample alone, see ``TaskMetric.score``.
    """

    id: str
    kind: str
    prompt_sha256: str
    reference: dict[str, Any]
    prediction: Prediction
    score: float

    def line(self) -> str:
        """One line of JSON, newline included."""
        content = asdict(self)
        told = {name: content.pop(name) for name in SampleRecord.__annotations__}  # before what was measured
        return json.dumps({**told, **content}, ensure_ascii=False, separators=(",", ":")) + "\n"

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
            content.setdefault("emptied", {})  # of records before there was this field
            return cls(**{field.name: content.pop(field.name) for field in fields(cls)}, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is no record of a sample ({type(error).__name__} {error})") from None


TIMES = ("prefill_seconds", "decode_seconds")
"""The fields in which two runs of the same arm differ."""


def prompt_digest(prompt: str, choices: tuple[str, ...] = ()) -> str:
    """SHA-256 of what was asked, in hexadecimal."""
    return hashlib.sha256(json.dumps([prompt, *choices], ensure_ascii=False).encode()).hexdigest()
