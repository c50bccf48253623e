"""How far packed logits may be from the truth, by what is rounded."""

from __future__ import annotations

from dataclasses import dataclass

BOUNDS = {"bf16": 0.04, "int8": 0.06, "int4": 0.7, "int4_rotated": 0.7, "kivi4": 0.4, "kivi2": 0.9}
"""Root mean square of the difference over that of the logits; both sides of bf16 round.

Set from what rounding was measured to cost these random models, single samples of few tokens being the worst. They find
gross faults only: that rounded storage is read right is for ``tests/kernels`` to show.
"""


@dataclass(frozen=True)
class Difference:
    """Of packed logits from the truth: the largest, the root mean square over that of the logits, and the tokens."""

    largest: float
    relative: float
    same_tokens: bool

    def fits(self, precision: str) -> bool:
        """Whether it is within the precision's bound; roundings cannot keep all tokens."""
        if precision == "fp32":
            return self.largest < 1e-4 and self.same_tokens
        return self.relative < BOUNDS[precision]
