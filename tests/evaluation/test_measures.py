"""Several measures of one difference, and the words that they give together."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.runner.data_file import measure_names, paired, verdict_words

ABOVE, BELOW, ZERO = (0.01, 0.02), (-0.2, -0.1), (-0.1, 0.1)
ENDS = st.tuples(st.floats(-1, 1), st.floats(-1, 1)).map(sorted).map(tuple)


@pytest.mark.parametrize(
    ("intervals", "words"),
    [
        ({"score": ABOVE, "token accuracy": ABOVE}, "ahead"),
        ({"score": ABOVE, "token accuracy": ZERO}, "ahead (score; level: token accuracy)"),
        ({"score": ZERO, "token accuracy": ZERO}, "level"),
        ({"score": (0.0, 0.1)}, "level"),
        ({"score": (-0.1, 0.0)}, "level"),
        ({"score": BELOW}, "behind"),
        ({"a": BELOW, "b": ZERO, "c": BELOW, "d": ZERO}, "behind (a, c; level: b, d)"),
        ({"a": BELOW, "b": ABOVE}, "mixed (ahead: b; behind: a)"),
        ({"a": BELOW, "b": ABOVE, "c": ZERO}, "mixed (ahead: b; behind: a; level: c)"),
    ],
)
def test_words(intervals, words):
    assert verdict_words(intervals) == words


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(st.dictionaries(st.sampled_from("abcdef"), ENDS, min_size=1))
def test_words_are_the_rule(intervals):
    above, below = any(low > 0 for low, _ in intervals.values()), any(high < 0 for _, high in intervals.values())
    expected = "mixed" if above and below else "ahead" if above else "behind" if below else "level"
    words = verdict_words(intervals)
    assert words.split(" (")[0] == expected
    turned = {name: (-high, -low) for name, (low, high) in intervals.items()}
    other = {"ahead": "behind", "behind": "ahead"}.get(expected, expected)
    assert verdict_words(turned).split(" (")[0] == other


def test_measures_pair_where_both_have_them():
    assert paired([1.0, None, 0.5, None], [0.5, 1.0, None, None]) == [0.5]
    assert measure_names([{"other": 0, "digit_f1": 0}, {"token_accuracy": 0}]) == [
        "token_accuracy",
        "digit_f1",
        "other",
    ]
