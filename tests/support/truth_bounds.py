"""How far packed logits may be from the truth, by what is rounded."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = {
    "int8": 1 / 127,
    "int4": 1 / 7,
    "int4_rotated": 1 / 7,
    "int8_channel": 1 / 255,
    "kivi4": 1 / 15,
    "kivi2": 1 / 3,
}
"""Formats that round: a step of their codes, as a share of the largest number of a vector or block."""
EXACT, EDGE, TIED, TIMES = 1e-4, 3e-6, 0.4, 2.0
"""Bounds.

``EXACT``: of a logit, in fp32 and in formats that round, which the truth rounds as they do. ``EDGE``: a sample may be
farther apart where a number lies so near the edge of two codes, as a share of its vector's largest, or a scale so near
that of two of fp16, that the last bits of fp32 decide; then by ``TIED`` steps at most, in root mean square over that of
the logits. Most exact samples hold such a number, too: alone it excuses much, and ``TIED`` bounds it.
``TIMES``: a packed bfloat16 model may be so many times as far from the truth in fp32 as eager attention is.
"""


@dataclass(frozen=True)
class Difference:
    """Of packed logits from the truth.

    Attributes:
        largest: difference of a logit.
        relative: root mean square of the difference over that of the logits.
        same_tokens: whether all decoded tokens are the truth's.
        edge: of the samples that are not exact how near each came to an edge, at most; 0 where all are.
        times: of bfloat16 ``relative`` over that of eager attention.
    """

    largest: float
    relative: float
    same_tokens: bool
    edge: float = 0.0
    times: float | None = None

    @property
    def exact(self) -> bool:
        """Whether all logits and tokens are the truth's."""
        return self.largest < EXACT and self.same_tokens

    def fits(self, precision: str) -> bool:
        """Whether it is within the precision's bound."""
        if precision == "bf16":
            return self.times is not None and self.times < TIMES
        tied = precision in STEPS and self.edge < EDGE and self.relative < TIED * STEPS[precision]
        return self.exact or tied
