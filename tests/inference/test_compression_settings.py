"""What is said by keyword becomes the compression that the command line makes of the same words."""

from __future__ import annotations

import pytest

from subtoken_train.inference.compression import compression_of


@pytest.mark.parametrize(
    ("text", "keep", "unit"),
    [
        ("64tokens", 64, "tokens"),
        (" 64 Tokens ", 64, "tokens"),
        ("0.25", 0.25, "fraction"),
        ("20MB", 20_000_000, "bytes"),
        ("1.5kb", 1500, "bytes"),
    ],
)
def test_a_budget_may_be_written_as_the_command_line_has_it(text, keep, unit):
    made = compression_of({"eviction": "snapkv", "eviction_keep": text})
    assert made == compression_of({"eviction": "snapkv", "eviction_keep": keep, "eviction_unit": unit})
    assert (made.keep, made.unit) == (keep, unit)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eviction_keep": "some"}, "'some' is not a budget; write a fraction"),
        ({"eviction_keep": "x" * 5000}, r"^'x{56}\.\.\. is not a budget"),
        ({"eviction_keep": "64 pages"}, "unknown unit of a budget 'pages'"),
        ({"eviction_keep": "64"}, r"eviction_keep=64.0 must lie in \(0, 1\]"),
        ({"eviction_keep": "0.5tokens"}, "eviction_keep=0.5 tokens must be a whole number"),
        ({"eviction_keep": "64tokens", "eviction_unit": "tokens"}, "eviction_keep='64tokens' already has a unit"),
        ({"eviction_keep": "64tokens", "eviction": None}, "eviction_keep=64.0 needs an eviction method"),
    ],
)
def test_what_is_no_budget_is_refused_in_words(settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        compression_of({"eviction": "snapkv", **settings})
    assert len(str(caught.value)) < 400
