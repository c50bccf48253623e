"""What is kept of one answered sample: one line of JSON."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from subtoken_train.documents import parse_json
from subtoken_train.evaluation.metrics.metric import Prediction
from subtoken_train.inference.accounting import Measured
from subtoken_train.typed import shown, typed


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
        """One line of JSON, newline included.

        Raises:
            ValueError: a log-likelihood or score is NaN or infinite, which no reader of records takes.
        """
        content = asdict(self)
        told = {name: content.pop(name) for name in SampleRecord.__annotations__}  # before what was measured
        try:
            text = json.dumps({**told, **content}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except ValueError:
            raise ValueError(
                f"sample {self.id!r}: the model gave NaN or infinity; choose a wider dtype, or another adapter"
            ) from None
        return text + "\n"

    @classmethod
    def parse(cls, line: str | bytes, place: str) -> SampleRecord:
        """Read ``line`` back.

        Args:
            line: JSON.
            place: file and line, for the message.

        Raises:
            ValueError: it is no record: a key or type is another one, or a number is negative or not finite.
        """
        try:
            record = typed(cls, parse_json(line, "line"), "line")
        except ValueError as error:
            raise ValueError(f"{place} is no record of a sample ({error})") from None
        if min([getattr(record, name) for name in _COUNTS]) < 0 or record.batch_size < 1:
            wrong = next((name for name in _COUNTS if getattr(record, name) < 0), "batch_size")
            raise ValueError(f"{place}: {wrong} is {getattr(record, wrong)}; nothing can be counted so")
        if record.kept_visual is not None and _HEX.fullmatch(record.kept_visual) is None:
            raise ValueError(f"{place}: kept_visual is {shown(record.kept_visual)}; it must be hexadecimal digits")
        return record


_HEX = re.compile("(?:[0-9a-f]{2})*")
_COUNTS = [field.name for field in fields(Measured) if field.name not in ("kept_visual", "emptied")]
TIMES = ("prefill_seconds", "decode_seconds")
"""The fields in which two runs of the same arm differ."""


def prompt_digest(prompt: str, choices: tuple[str, ...] = ()) -> str:
    """SHA-256 of what was asked, in hexadecimal."""
    return hashlib.sha256(json.dumps([prompt, *choices], ensure_ascii=False).encode()).hexdigest()
