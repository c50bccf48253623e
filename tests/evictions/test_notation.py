"""Evictions as they are written: names, settings, and what is said of mistakes."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions import DEEPEST, EVICTIONS, WRAPPERS, build_eviction, notation_names, setting_fields
from subtoken_train.evictions.snapkv import SnapKV
from subtoken_train.evictions.wrappers import Ada, CriticalKV
from subtoken_train.view.method import _words
from tests.support.refusals import refuses, refusing


def test_wrappers_stand_in_each_other_and_settings_find_their_method():
    built = build_eviction("ada(critical(snapkv))", alpha=0.5, epsilon=0.01, window=3, **{"snapkv.kernel": 3})
    assert built == Ada(CriticalKV(SnapKV(window=3, kernel=3), epsilon=0.01), alpha=0.5)
    assert built.name == "ada(critical(snapkv))"
    assert hash(built) == hash(build_eviction("ada(critical(snapkv))", alpha=0.5, epsilon=0.01, window=3, kernel=3))
    assert notation_names("ada(critical(snapkv))")[-1] == "snapkv"


@pytest.mark.parametrize(
    ("notation", "words"),
    [
        ("ada(snapkv", r"'ada\(snapkv' cannot be read; write a method, or wrappers around one, each once .*: ada\("),
        ("ada(snapkv)x", "cannot be read"),
        ("ada()", "cannot be read"),
        ("ada(ada(snapkv))", "cannot be read; .*, each once"),
        ("ada(snapvk)", r"unknown eviction method 'snapvk'\. Did you mean 'snapkv'\?"),
        ("adda(snapkv)", r"unknown eviction wrapper 'adda'\. Did you mean 'ada'\? Allowed: ada, .*per_layer"),
        ("ada", r"'ada': ada goes around a method; write ada\(snapkv\)"),
        ("knorm(snapkv)", "unknown eviction wrapper 'knorm'.*Allowed: ada, "),
        (5, "eviction 5 cannot be read; write a method"),
        ("ada(" * 10**6 + "snapkv" + ")" * 10**6, f"cannot be read; .* at most {DEEPEST} in all"),
        ("x" * 10**6, "unknown eviction method"),
    ],
)
def test_mistakes_are_worded_shortly(notation, words):
    assert len(refuses(words, build_eviction, notation)) < 450


@given(st.text(alphabet="()ab", max_size=12))
def test_any_text_is_read_or_refused_in_words(text):
    try:
        names = notation_names(text)
    except ValueError:
        return
    assert "(".join(names) + ")" * (len(names) - 1) == text
    assert len(set(names)) == len(names)


@dataclass(frozen=True)
class Both(SnapKV):
    """A method with a setting that a wrapper has, too."""

    name: ClassVar[str] = "both"
    epsilon: float = 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"windo": 3}, r"unknown setting of critical\(both\) 'windo'\. Did you mean 'window'"),
        ({"base": 1}, "unknown setting of .* 'base'"),
        ({"critical.base": 1}, "unknown setting of critical 'base'"),
        ({"bth.window": 3}, r"unknown method of critical\(both\) 'bth'\. Did you mean 'both'"),
        ({"both.windo": 3}, r"unknown setting of both 'windo'\. Did you mean 'window'"),
        ({"epsilon": 0.1}, "several methods of .* have the setting 'epsilon'; write critical.epsilon or both.epsilon"),
        ({"window": 3, "both.window": 3}, "setting 'window' of both is given twice; both.window is the same"),
    ],
)
def test_settings_of_a_chain(monkeypatch, options, words):
    monkeypatch.setitem(EVICTIONS, "both", Both)
    refuses(words, build_eviction, "critical(both)", **options)
    named = {"both.epsilon": 0.5, "critical.epsilon": 0.25}
    assert build_eviction("critical(both)", **named) == CriticalKV(Both(epsilon=0.5), epsilon=0.25)
    defaults = {key: field.default for key, field in setting_fields("critical(both)").items()}
    assert defaults["both.epsilon"] == 0.0
    assert defaults["critical.epsilon"] == 1e-4
    assert defaults["window"] == defaults["both.window"] == 64
    assert "epsilon" not in defaults
    assert not any(key.endswith("base") for key in defaults)


NUMBERS = [
    (name, key, type(field.default))
    for name in [*EVICTIONS, *(f"{wrapper}(snapkv)" for wrapper in WRAPPERS)]
    for key, field in setting_fields(name).items()
    if key.startswith(f"{name.partition('(')[0]}.") and isinstance(field.default, int | float)
]


@pytest.mark.parametrize(("name", "key", "kind"), NUMBERS, ids=[key for _, key, _ in NUMBERS])
def test_numbers_and_switches_of_another_type_are_refused_in_words(name, key, kind):
    wrong = {bool: ["false", 0, None], int: ["3", 2.5, True, None, [1], 2**31, -(10**30)], float: ["3", True, [1]]}
    for value in wrong[kind]:
        named = key.replace(".", " ")
        refuses(rf"^{named}( is .*; it must |=2.5 must be . or more entries)", build_eviction, name, **{key: value})


NAN = math.nan

OUT_OF_RANGE = {
    "ada(knorm)": {"alpha": [-0.1, 1.5, NAN]},
    "aircache": {"alpha": [1.5], "window_size": [0]},
    "cake": {"window": [0], "kernel": [2], "gamma": [-1.0], "tau1": [0.0], "tau2": [NAN]},
    "capkv": {"tau": [-1.0, NAN], "future": [0], "sinks": [-1]},
    "chunk(knorm)": {"length": [0]},
    "compactor": {"sinks": [-1], "chunk": [0, 10**9], "sketch": [0], "seed": [-3], "blending": [-0.1, NAN]},
    "critical(knorm)": {"first_share": [1.5, -0.5], "epsilon": [-1.0, math.inf]},
    "cur": {"sinks": [-1], "local": [-1]},
    "duo_attention": {"recent": [0], "sinks": [-1]},
    "elastic": {"recent": [-1]},
    "expected_attention": {"future": [0, 10**9], "sinks": [-1], "epsilon": [-0.1, NAN]},
    "h2o": {"recent_share": [1.5], "window": [-1]},
    "headkv": {"floor": [1.5]},
    "kvcompose": {"lower_bound": [-1]},
    "kvzap": {"last": [-1], "lower_bound": [-1]},
    "kvzip": {"chunk": [0], "sinks": [-1]},
    "lagkv": {"sinks": [-1], "lag": [1]},
    "per_layer(knorm)": {"shares": [[1, -1], [1, NAN], [1, 1e308], [1, 10**400], [1, "2"], [1, True]]},
    "pyramidkv": {"beta": [0], "window": [0]},
    "quest_steps": {"page_size": [0], "least_pages": [0], "dense_layers": [-1]},
    "rkv": {"window": [0], "kernel": [2], "importance": [1.5, NAN], "alike": [-1.5]},
    "simlayerkv": {"sinks": [-1], "rows": [0], "recent": [0, 1.5]},
    "snapkv": {"kernel": [4, -1], "window": [0, -1, 0.0, 1.0, -0.1, 64.0, 1.5]},
    "sparsemm": {"kernel": [2]},
    "streaming_llm": {"sinks": [-1]},
    "tgv_kv": {"window_size": [0]},
    "triattention": {"window": [1.0]},
    "vl_cache": {"threshold": [0.0], "recent": [2.0], "least": [-1.0], "window_size": [0]},
}
REFUSED = [
    ("cake", {"kernel": 2}, r"cake kernel=2 must be an odd number, 1 or more"),
    ("random", {"sed": 1}, r"unknown setting of random 'sed'\. Did you mean 'seed'\? Allowed: seed"),
    ("kvcompose", {"adaptive": False, "structured": False}, r"adaptive=False needs structured=True"),
    ("kvzip", {"level": "token"}, r"unknown setting of kvzip 'level'.*Allowed: chunk, lower_bound, pool, sinks"),
    ("tgv_kv", {"released": True, "budgets": "VV"}, r"released=true has its own budgets"),
    ("ada(streaming_llm)", {}, r"ada divides a budget between heads, and streaming_llm keeps one set for all heads"),
    ("critical(per_layer(chunk(knorm)))", {"shares": [1]}, r"chunk ranks chunks of them; write chunk\(critical"),
    ("per_layer(knorm)", {"shares": ()}, r"needs shares, a number for every layer: 4:3:2:1, or \[4, 3, 2, 1\] in"),
    ("per_layer(knorm)", {"shares": [0, 0.0]}, r"per_layer shares are all 0"),
]
REFUSED += [
    (notation, {key: value}, rf"^{notation.partition('(')[0]} {key}(\[1\])?( is |=)")
    for notation, settings in OUT_OF_RANGE.items()
    for key, values in settings.items()
    for value in values
]
CHOICES = [(name, *each) for own in (EVICTIONS, WRAPPERS) for name in own for each in _words(own[name]).items()]


@pytest.mark.parametrize(("name", "key", "words"), CHOICES)
def test_a_word_that_is_no_choice_is_refused_with_all_that_are(name, key, words):
    notation = name if name in EVICTIONS else f"{name}(knorm)"
    with pytest.raises(
        ValueError, match=rf"unknown {name} {key} 'wrong'.*Allowed: {re.escape(', '.join(sorted(words)))}"
    ):
        build_eviction(notation, **{key: "wrong"})


test_a_wrong_setting_is_refused_in_words = refusing(REFUSED, lambda name, own: build_eviction(name, **own))
