"""What is measured of an answer beside its score, and what several measures say together of a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEASURES = {
    "token_accuracy": "token accuracy",
    "log_likelihood": "log-likelihood",
    "place_f1": "place F1",
    "color_f1": "colour F1",
    "digit_f1": "digit F1",
}
"""Name in records -> words of tables, in their order. Of all, more is better.

The first two score the reference's tokens under teacher forcing (``answer_samples``; the second in nats per token), the
others the attributes of scene descriptions (``attribute_f1``). A metric's further figures go by their own names.
"""


def measure_names(runs: Sequence[Mapping[str, object]]) -> list[str]:
    """The measures that any of some runs has, those of ``MEASURES`` first."""
    named = dict.fromkeys(name for run in runs for name in run)
    return [name for name in MEASURES if name in named] + [name for name in named if name not in MEASURES]


def paired(first: Sequence[float | None], second: Sequence[float | None]) -> list[float]:
    """First less second, where both have a figure."""
    pairs = zip(first, second, strict=True)
    return [mine - its for mine, its in pairs if mine is not None and its is not None]


def verdict_words(intervals: Mapping[str, tuple[float, float]]) -> str:
    """What all measures of one difference say together.

    ``ahead``: no interval lies below zero and at least one above it; ``behind``: the reverse; ``mixed``: some lie above
    and some below; ``level``: all hold zero. Where not all measures agree the words name them. Each interval is taken
    as it is: of many independent measures some would lie off zero by chance, and none is corrected for that.

    Args:
        intervals: words of a measure -> (low, high) of its difference, in the order in which they are named; of all,
            more is better.

    Returns:
        ``ahead``, ``level``, ``ahead (score, token accuracy; level: log-likelihood)``, or
        ``mixed (ahead: token accuracy; behind: score)``.
    """
    assert intervals
    found: dict[str, list[str]] = {"ahead": [], "behind": [], "level": []}
    for name, (low, high) in intervals.items():
        found["ahead" if low > 0 else "behind" if high < 0 else "level"].append(name)
    ahead, behind, level = (", ".join(names) for names in found.values())
    rest = f"; level: {level}" if level else ""
    if ahead and behind:
        return f"mixed (ahead: {ahead}; behind: {behind}{rest})"
    for word, names in (("ahead", ahead), ("behind", behind)):
        if names:
            return f"{word} ({names}{rest})" if rest else word
    return "level"
