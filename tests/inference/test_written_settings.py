"""Budgets and settings as they are written, on a command line or by keyword."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import compression_of, parse_keep, parse_settings


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("0.1", (0.1, "fraction")),
        (".5", (0.5, "fraction")),
        ("1", (1.0, "fraction")),
        ("1e-2", (0.01, "fraction")),
        ("-2", (-2.0, "fraction")),
        ("256tokens", (256, "tokens")),
        (" 256 tokens ", (256, "tokens")),
        ("4096B", (4096, "bytes")),
        ("300kB", (300_000, "bytes")),
        ("20MB", (20_000_000, "bytes")),
        ("0.3mb", (300_000, "bytes")),
        ("1.5GB", (1_500_000_000, "bytes")),
    ],
)
def test_budgets(text, keep):
    assert parse_keep(text) == keep


@pytest.mark.parametrize("text", ["", "a tenth", "10%", "0,1", "1.2.3", "MB", "nan", "inf", "1 2"])
def test_what_is_no_budget(text):
    with pytest.raises(ValueError, match=r"is not a budget; write a fraction .0.1., tokens .256tokens. or bytes"):
        parse_keep(text)


@pytest.mark.parametrize(("text", "nearest"), [("20MBs", "MB"), ("256token", "tokens")])
def test_other_units_get_the_nearest(text, nearest):
    with pytest.raises(ValueError, match=f"unknown unit of a budget .*Did you mean '{nearest}'"):
        parse_keep(text)


@given(st.integers(1, 10**12))
def test_whole_numbers_stay_whole(number):
    assert parse_keep(f"{number}tokens") == (number, "tokens")
    assert parse_keep(f"{number}B") == (number, "bytes")


def test_settings_take_the_kind_of_their_defaults(dummy_evictions):
    read = parse_settings("first", ["window=3", "weight=2", "loud=true", "mode=1", "stranger=x=y"])
    assert read == {"window": 3, "weight": 2.0, "loud": True, "mode": "1", "stranger": "x=y"}
    assert isinstance(read["weight"], float)


def test_settings_of_a_chain(dummy_evictions):
    read = parse_settings("per_layer(ada(first))", ["window=3", "ada.alpha=1", "shares=4:3:2.5", "first.weight=2"])
    assert read == {"window": 3, "ada.alpha": 1.0, "shares": (4.0, 3.0, 2.5), "first.weight": 2.0}
    with pytest.raises(ValueError, match=r"shares='4:b' must be numbers between colons, for instance 4:3:2:1"):
        parse_settings("per_layer(first)", ["shares=4:b"])
    assert parse_settings("h2o", ["window=3"]) == {"window": 3}
    with pytest.raises(ValueError, match=r"unknown eviction method 'frst'\. Did you mean 'first'"):
        parse_settings("ada(frst)", ["alpha=1"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["window"], "'window' of first must be written key=value"),
        (["=3"], "must be written key=value"),
        (["window=3", "window=4"], "'window' of first is given twice"),
        (["window=3.5"], "first window='3.5' must be a whole number; its default is 1"),
        (["weight=much"], "first weight='much' must be a number"),
        (["loud=yes"], "unknown value of first loud 'yes'"),
    ],
)
def test_wrong_settings(dummy_evictions, settings, words):
    with pytest.raises(ValueError, match=words):
        parse_settings("first", settings)


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "h2o"])
def test_a_window_is_a_number_or_a_share(method):
    for text, value in (("64", 64), ("0.1", 0.1)):
        (read,) = parse_settings(method, [f"window={text}"]).values()
        assert (read, type(read)) == (value, type(value))
        assert build_eviction(method, window=read).window == value
    with pytest.raises(ValueError, match=f"{method} window='half' must be a number"):
        parse_settings(method, ["window=half"])


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
